"""ProposerOptions: what the plug-in is told, as ``additional_config`` of vLLM carries it under ``outpace``.

--additional-config '{"outpace": {"method": "cacheback", "settings": {"branches": 2}}}'
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel, validated

KEY = "outpace"
NAMESPACE = "namespace"
"""The request's own namespace: ``vllm_xargs`` of a request to the server, ``extra_args`` of vLLM's SamplingParams."""


class ProposerOptions(StrictModel):
    """Which method drafts, with which settings and datastore; the namespace of requests that name none.

    ``adaptive``: False drafts as many tokens as the method would without costs, up to num_speculative_tokens.
    ``remember``: tokens of earlier answers of a namespace that its requests may copy from. A new request takes them
    into its index, some microseconds a token.
    """

    method: str = "sam"
    settings: dict[str, Any] = Field(default_factory=dict)
    datastore: str | None = None
    namespace: str = ""
    adaptive: bool = True
    remember: Annotated[int, Field(ge=0)] = 4096

    @classmethod
    def of(cls, additional_config: Any) -> ProposerOptions:
        """The options in vLLM's ``additional_config``, defaults where it has none. Raises BadInput for wrong ones."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}

        def refusal(key: str, reason: str) -> BadInput:
            return BadInput(f"additional_config, {KEY}.{key}: {reason}")

        return validated(cls, given, refusal)
