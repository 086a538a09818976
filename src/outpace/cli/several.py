"""Several answers to one prompt: samples, the best of them, or beams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.answer_report import population
from outpace.cli.options import option
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.api.result import Result

PANEL = "Several answers"


@dataclass(frozen=True, slots=True)
class Several:
    """How many answers, and which."""

    n: Annotated[
        int | None,
        option("--n", value="N", panel=PANEL, text="Number of answers: samples, or with --num-beams the best."),
    ] = None
    best_of: Annotated[
        int | None,
        option(
            value="N",
            panel=PANEL,
            text="Decode N samples and print the best, by the mean log-probability of a token (--n of them).",
        ),
    ] = None
    num_beams: Annotated[
        int | None,
        option(
            value="N",
            panel=PANEL,
            text="Beam search with N beams; above temperature 0 stochastic beams. [dim]\\[default: 1][/]",
        ),
    ] = None
    num_return_sequences: Annotated[
        int | None, option(value="N", panel=PANEL, text="The same as --n, as transformers names it.")
    ] = None
    length_penalty: Annotated[
        float | None,
        option(
            value="P",
            panel=PANEL,
            text="With --num-beams: rank by log-probability / length ** P. [dim]\\[default: 1][/]",
        ),
    ] = None
    early_stopping: Annotated[
        str | None,
        option(
            value="WHEN",
            panel=PANEL,
            text="With --num-beams, when the search ends: true, when N beams have ended; false, when no running "
            "beam is better; never, when none could become better. [dim]\\[default: false][/]",
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether any of these is asked for."""
        return any(getattr(self, name) is not None for name in self.__slots__)

    @property
    def beams(self) -> bool:
        """Whether there is more than one beam."""
        return self.num_beams is not None and self.num_beams > 1

    def options(self) -> dict[str, Any]:
        """As :func:`outpace.generate` names them. Raises BadInput for what it could not read."""
        found = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        if "early_stopping" in found:
            words = {"true": True, "false": False, "never": "never"}
            if found["early_stopping"] not in words:
                raise BadInput(f"--early-stopping must be true, false or never, not {found['early_stopping']}")
            found["early_stopping"] = words[found["early_stopping"]]
        return found


def remark_on_cut(*, complete: bool | None, finish_reason: str | None) -> None:
    """Say so where the length limit has cut an answer that its grammar demands more of."""
    from outpace.cli.output import err

    if complete is False and finish_reason == "length":
        err().print(
            "[yellow]note[/]: the answer reached its length limit before it was complete under its grammar; raise "
            "--max-new-tokens, or let the grammar's texts end sooner (one whose texts never end is always cut)",
            soft_wrap=True,
        )


def print_several(found: list[Result], *, method: str, json: bool) -> None:
    """Print all answers, and what they took."""
    from outpace.cli.output import err, print_json

    for one in [one for one in found if one.metrics["grammar_complete"] is False][:1]:
        remark_on_cut(complete=False, finish_reason=one.finish_reason)
    if json:
        print_json({"method": method, "answers": [_public(one) for one in found]})
        return
    for number, one in enumerate(found, 1):
        score = "" if one.score is None else f" (score {one.score:.4f})"
        if len(found) > 1:
            err().print(f"[dim]answer {number} of {len(found)}{score}[/]", soft_wrap=True)
        print(one.text, flush=True)
    first = found[0]
    seconds = max(one.metrics["seconds"] for one in found)
    tokens = sum(len(one.tokens) for one in found)
    lossy = "" if first.metrics["lossy"] is None else f", lossy: {first.metrics['lossy']}"
    seed = "" if first.seed is None else f", seed {first.seed}"
    count = "1 answer" if len(found) == 1 else f"{len(found)} answers"
    err().print(f"[dim]{method}: {count}, {tokens} tokens in {seconds:.2f} s{lossy}{seed}", soft_wrap=True)


def _public(one: Result) -> dict[str, Any]:
    return {
        "text": one.text,
        "tokens": one.tokens,
        "finish_reason": one.finish_reason,
        "score": one.score,
        "seed": one.seed,
        "metrics": one.metrics,
        "population": population(one.population),
    }
