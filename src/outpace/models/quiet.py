"""Silencing other libraries' progress bars and warnings, and turning their exceptions into one line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from outpace.core.errors import BadInput, OutpaceError, out_of_memory, shortened


def one_line(error: BaseException) -> str:
    """An exception's message in one line, :func:`shortened`; its type where it has no message."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    return shortened(str(error)) or type(error).__name__


@contextmanager
def explained(what: str, advice: str = "") -> Iterator[None]:
    """Turn whatever a library raises inside into BadInput: ``what: reason; advice``.

    The loaders called inside take files made by others and raise anything from KeyError to RuntimeError on bad ones,
    so every exception is caught; only calls into such a loader belong inside.
    """
    try:
        yield
    except OutpaceError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise BadInput(f"{what}: not enough memory; use a smaller model or dtype") from error
        raise BadInput(f"{what}: {one_line(error)}" + (f"; {advice}" if advice else "")) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines, warnings or progress bars of transformers and the hub client inside; as before afterwards."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_logging.set_verbosity(logging.CRITICAL)
        hf_logging.disable_progress_bar()
        hub.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            hf_logging.set_verbosity(level)
            hub.setLevel(hub_level)
            if bars:
                hf_logging.enable_progress_bar()
