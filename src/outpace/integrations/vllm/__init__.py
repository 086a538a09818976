"""vLLM: one command that serves with outpace's heads and drafters, and a plug-in that drafts inside vLLM.

``Proposer`` is what ``speculative_config`` names: ``{"method": "custom_class", "model":
"outpace.integrations.vllm.Proposer", "num_speculative_tokens": 8}``. vLLM calls ``register`` in each of its processes.
Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.integrations.vllm.proposer import Proposer

__all__ = ["Proposer", "register"]


def register() -> None:
    """The entry point of ``vllm.general_plugins``; vLLM may call it several times in a process."""
    from outpace.integrations.vllm.plugin import install

    install()


def __getattr__(name: str) -> Any:
    if name == "Proposer":
        from outpace.integrations.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
