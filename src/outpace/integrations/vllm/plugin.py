"""What outpace does when vLLM loads its plug-ins: it checks the version, and installs the override for CPUs.

vLLM does not hand its model runner to a proposer. The runner knows the ids, temperatures and namespaces of requests,
so the method of the runner that calls the proposer is wrapped when the first proposer is made; where that is not
possible, requests are told by their tokens.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from outpace.core.errors import BadInput
from outpace.integrations.vllm.versions import REQUIREMENT, supported

RUNNER = "vllm.v1.worker.gpu_model_runner"
_SHOWN = "_outpace_shows_runner"
_log = logging.getLogger(__name__)


def install() -> None:
    """The entry point. Never raises: whoever has outpace installed may run vLLM without it."""
    from vllm.version import __version__

    if not supported(__version__):
        _log.warning("outpace supports %s, not vLLM %s: its plug-in does nothing", REQUIREMENT, __version__)
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from outpace.integrations.vllm import cpu_expand

        cpu_expand.install()


def check_running_version() -> None:
    """Raise BadInput in a process whose vLLM is not supported."""
    from vllm.version import __version__

    if not supported(__version__):
        raise BadInput(f"outpace.integrations.vllm.Proposer supports {REQUIREMENT}, and this is vLLM {__version__}")


def show_runner() -> None:
    """Let the model runner show itself to proposers of outpace. Does nothing where it was done, or cannot be."""
    import importlib

    from outpace.integrations.vllm.proposer import Proposer

    try:
        runner = importlib.import_module(RUNNER).GPUModelRunner
        original = runner.propose_draft_token_ids
    except (ImportError, AttributeError) as error:
        _log.warning("vLLM does not show its requests (%s): they are told by their tokens, without namespaces", error)
        return
    if getattr(original, _SHOWN, False):
        return

    @functools.wraps(original)
    def shown(self: Any, *given: Any, **named: Any) -> Any:
        if isinstance(self.drafter, Proposer):
            self.drafter.runner = self
        return original(self, *given, **named)

    setattr(shown, _SHOWN, True)
    runner.propose_draft_token_ids = shown
