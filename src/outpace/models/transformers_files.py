"""Models and tokenizers in files that transformers reads, with errors that name what is wrong with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.core.files import home_expanded
from outpace.models.hub_access import hub_answers, not_on_hub
from outpace.models.quiet import explained, one_line, quiet
from outpace.models.source import Source

if TYPE_CHECKING:
    import torch

    from outpace.models.tokenizers import HFTokenizer

_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece.model", "sentencepiece", "tekken.json")


def model_from_files(source: Source, place: str, precision: Any, device: torch.device, local: bool) -> Any:
    """The model in ``place``, a folder or a hub id, as transformers loads it. ``local``: nothing is downloaded.

    Raises BadInput where it is no causal language model, or where weights are missing or broken.
    """
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    from outpace.models.hub_progress import HubBar
    from outpace.models.weights_check import check_layers, check_loaded, check_size, stored_in

    def refusal(why: str) -> BadInput:
        return BadInput(f"the weights in '{place}' {why}; complete the download, or make it again")

    # Code that comes with a model is never run: with None, transformers would stop and ask at the terminal.
    common = {"local_files_only": local, "trust_remote_code": False}
    truncated = f"the weights in '{place}' are truncated or corrupt"
    with explained(truncated, "download them again"):
        stored = stored_in(Path(place)) if source.kind == "folder" else None
    if stored is not None:
        check_layers(Path(place) / "config.json", stored)
    try:
        config = AutoConfig.from_pretrained(place, **common)
    except OSError as error:
        if source.kind != "hub":
            raise BadInput(f"cannot load '{place}': {one_line(error)}") from error
        raise BadInput(not_on_hub(source.location, local, error)) from error
    except Exception as error:  # config.json is somebody else's file: any value may be of any type
        raise BadInput(
            f"cannot load '{place}': its config.json does not describe a known model: {one_line(error)}"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise BadInput(f"'{place}' is of type {config.model_type}, which is not a decoder-only language model")
    with explained(f"cannot load '{place}'"):
        if stored is not None:
            check_size(config, stored, refusal)
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                place,
                config=config,
                dtype=precision,
                device_map=None if device.type == "cpu" else {"": device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused by name below
                tqdm_class=HubBar,
                **common,
            )
        except SafetensorError as error:
            raise BadInput(f"{truncated} ({one_line(error)}); download them again") from error
        check_loaded(model, report, refusal)
    return model.requires_grad_(False)


def tokenizer_from_files(place: str, given: Any, local: bool) -> HFTokenizer:
    """The tokenizer that was ``given``, else that of ``place``; read without transformers where that is the same.

    Raises BadInput where there is none, or where it cannot be read.
    """
    from outpace.models.plain_tokenizer import plain_tokenizer
    from outpace.models.tokenizers import HFTokenizer

    if isinstance(given, HFTokenizer):
        return given
    if given is not None and not isinstance(given, str | os.PathLike):
        return HFTokenizer(given)
    where = place if given is None else str(home_expanded(given))
    folder = Path(where)
    if given is not None:  # it may be somewhere else than the weights
        local = folder.is_dir() or not hub_answers()
    if folder.is_dir():
        if not any(file.name.startswith(_TOKENIZER_FILES) for file in folder.iterdir()):
            raise BadInput(
                f"'{where}' has no tokenizer (tokenizer.json); add its files or name another with tokenizer="
            )
        if (found := plain_tokenizer(folder)) is not None:
            return found
    with quiet(), explained(f"cannot load the tokenizer of '{where}'"):
        from transformers import AutoTokenizer

        return HFTokenizer(AutoTokenizer.from_pretrained(where, local_files_only=local, trust_remote_code=False))
