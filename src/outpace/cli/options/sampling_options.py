"""How the next token is chosen.

To add a sampling parameter, add a field to SamplingParams and one of that name to Sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.options.declaration import SAMPLING, option
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.core.sampling import SamplingParams

Seed = Annotated[int, option(value="N", panel=SAMPLING, text="Seed of the random numbers.")]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: the fields of SamplingParams that a command line can give."""

    temperature: Annotated[
        float,
        option("--temperature", "-t", value="X", panel=SAMPLING, text="Sampling temperature; 0 is greedy decoding."),
    ] = 0.0
    top_k: Annotated[int, option(value="N", panel=SAMPLING, text="Keep the N most likely tokens; 0 is off.")] = 0
    top_p: Annotated[
        float, option(value="X", panel=SAMPLING, text="Keep the smallest set of total probability X; 1 is off.")
    ] = 1.0
    min_p: Annotated[
        float,
        option(value="X", panel=SAMPLING, text="Keep tokens with at least X times the highest probability; 0 is off."),
    ] = 0.0
    repetition_penalty: Annotated[
        float, option(value="X", panel=SAMPLING, text="Values above 1 discourage repetition; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, option(value="X", panel=SAMPLING, text="Subtracted from the logits of tokens that the answer contains.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, option(value="X", panel=SAMPLING, text="Subtracted from a token's logit for each occurrence.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        option(value="TOKEN=BIAS", panel=SAMPLING, text="Add BIAS to a token id's logit; may be repeated."),
    ] = None
    seed: Annotated[
        int | None,
        option(
            value="N",
            panel=SAMPLING,
            text="Repeat a sampled answer. [dim]\\[default: drawn and shown; 0 for bench, certify][/]",
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether anything but the seed was asked for; a command's own default temperature is None."""
        own = [one for one in fields(self) if one.name not in ("seed", "temperature")]
        return self.temperature is not None or any(getattr(self, one.name) != one.default for one in own)

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters, with ``more`` of their fields. Raises BadInput for values out of range."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["logit_bias"] = logit_bias(self.logit_bias)
        from outpace.core.sampling import SamplingParams  # imports torch

        return SamplingParams(**given | more)


def logit_bias(pairs: Sequence[str] | None) -> dict[int, float]:
    """``TOKEN=BIAS`` pairs. Raises BadInput for what is not a token id and a number."""
    biases: dict[int, float] = {}
    for pair in pairs or ():
        token, sign, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise BadInput(f"--logit-bias takes TOKEN=BIAS, a token id and a number, not '{pair}'") from None
        if not sign or math.isnan(biases[int(token)]):
            raise BadInput(f"--logit-bias takes TOKEN=BIAS, a token id and a number, not '{pair}'")
    return biases
