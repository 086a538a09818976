"""GGUFMetadata: the metadata of a GGUF file that outpace reads, of the types and within the bounds that they must have.

What llama.cpp has a default for may be missing, and is None here. transformers would fill what llama.cpp requires with
defaults of its own, which describe another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from outpace.core.errors import BadInput
from outpace.core.validation import validated

_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Counts = _Count | list[Annotated[int, Field(ge=0, lt=2**31)]]
"""One number, or one for each block."""
_Token = Annotated[int, Field(ge=0, lt=2**63)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Keys(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class GeneralKeys(_Keys):
    """Keys that every file may have, whatever its architecture."""

    architecture: Annotated[str, Field(alias="general.architecture", min_length=1)]
    alignment: Annotated[int, Field(alias="general.alignment", ge=1, le=2**20)] = 32
    parts: Annotated[int, Field(alias="split.count", ge=0)] = 0
    eos: _Token | None = Field(None, alias="tokenizer.ggml.eos_token_id")
    eot: _Token | None = Field(None, alias="tokenizer.ggml.eot_token_id")
    eom: _Token | None = Field(None, alias="tokenizer.ggml.eom_token_id")
    pre: str | None = Field(None, alias="tokenizer.ggml.pre")
    chat_template: str | None = Field(None, alias="tokenizer.chat_template")


class ModelKeys(_Keys):
    """Keys under the architecture's own prefix. Those without a default are required for every architecture."""

    block_count: _Count
    context_length: _Count
    embedding_length: _Count
    head_count: _Counts | None = Field(None, alias="attention.head_count")
    head_count_kv: _Counts | None = Field(None, alias="attention.head_count_kv")
    rms_epsilon: _Positive | None = Field(None, alias="attention.layer_norm_rms_epsilon")
    epsilon: _Positive | None = Field(None, alias="attention.layer_norm_epsilon")
    feed_forward_length: _Counts | None = None
    vocab_size: _Count | None = None
    rope_dimensions: _Count | None = Field(None, alias="rope.dimension_count")
    rope_base: _Positive | None = Field(None, alias="rope.freq_base")
    rope_scaling: str = Field("none", alias="rope.scaling.type")
    rope_factor: Annotated[float, Field(alias="rope.scaling.factor", ge=0, allow_inf_nan=False)] = 0.0
    rope_original_length: _Count | None = Field(None, alias="rope.scaling.original_context_length")
    extra_blocks: Annotated[int, Field(alias="nextn_predict_layers", ge=0, lt=2**31)] = 0
    """Of the last blocks, those that predict further tokens and are no part of the model itself."""


Refusal = Callable[[str], BadInput]
"""Makes the error about a file from what is wrong with it."""


def general_keys(metadata: Mapping[str, Any], refusal: Refusal) -> GeneralKeys:
    """The keys of every file. Raises what ``refusal`` makes for one that is missing or unusable."""
    return validated(GeneralKeys, metadata, lambda key, reason: refusal(_problem(key, reason)))


def model_keys(metadata: Mapping[str, Any], architecture: str, refusal: Refusal) -> ModelKeys:
    """The keys under an architecture's prefix. Raises as :func:`general_keys` does."""
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}

    def unusable(place: str, reason: str) -> BadInput:
        key = next((one for one in own if place.startswith(f"{one}.")), place)  # which of several types is left out
        return refusal(_problem(prefix + key, reason))

    return validated(ModelKeys, own, unusable)


def _problem(key: str, reason: str) -> str:
    if reason == "Field required":
        return f"it lacks the metadata {key}"
    return f"its metadata {key} is unusable ({reason})"
