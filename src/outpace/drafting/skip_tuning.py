"""Finding the sublayers that ``dv`` skips, on the user's own prompts.

The target answers the prompts once, greedily. A set of skipped sublayers is then judged by drafting at many places of
these answers: one parallel pass over the beginnings of all of them gives the number of draft tokens in a row that would
have been accepted, as in decoding, since tokens drafted after a wrong one do not count. With the seconds that such a
sub-graph and a verifying forward of so many rows take, the expected speed follows (Zhang et al. 2023, arXiv 2309.08168,
section 3.3, measure decoding itself, which takes about ten times as long). Costs are measured once and kept with the
tries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Annotated, Any

from pydantic import BaseModel, Field

from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.drafting.layer_skips import FORMAT, Mask, Skips
from outpace.drafting.skip_search import MaskSearch
from outpace.targets.base import Sequence, SubGraph, Target

_ROWS = 128
"""Rows of one judging forward: bounds the memory that logits take."""


@dataclass(slots=True)
class Beginning:
    """A place where a draft could start: the committed tokens, and the target's next tokens."""

    sequence: Sequence
    expected: list[int]


class Beginnings:
    """Places in the target's answers, ``length`` tokens apart, each with K/V of its own.

    ``texts``: prompts and answers. Raises BadInput where no answer has ``length`` tokens.
    """

    def __init__(self, target: Target, texts: Iterable[tuple[Seq[int], Seq[int]]], length: int) -> None:
        self.target = target
        self.length = length
        self.all: list[Beginning] = []
        digest = hashlib.blake2b(digest_size=16)
        for prompt, answer in texts:
            tokens = [*prompt, *answer]
            digest.update(repr((len(prompt), tokens)).encode())
            whole = target.sequence(tokens)
            target.prefill([whole])
            for root in range(len(prompt) - 1, len(tokens) - length, length):
                kv = target.fork(whole.kv, root)
                place = target.sequence(tokens[: root + 1], kv=kv)
                self.all.append(Beginning(place, tokens[root + 1 : root + 1 + length]))
            target.close(whole.kv)
        self.fingerprint = digest.hexdigest()
        if not self.all:
            raise BadInput(f"no answer has {length} tokens to draft; give other prompts, or more tokens an answer")

    def runs(self, graph: SubGraph) -> list[int]:
        """The number of tokens drafted through ``graph`` that would be accepted in a row, at every place."""
        found: list[int] = []
        step = max(1, _ROWS // self.length)
        for first in range(0, len(self.all), step):
            places = self.all[first : first + step]
            batch = [(one.sequence, TokenTree.chain(one.expected[:-1])) for one in places]
            for one, part in zip(places, self.target.score(batch, graph=graph).parts, strict=True):
                guesses = part.logits.argmax(-1).tolist()
                pairs = zip(guesses, one.expected, strict=True)
                found.append(next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), self.length))
        return found

    def close(self) -> None:
        """Free the K/V."""
        for one in self.all:
            self.target.close(one.sequence.kv)


_Saved = Annotated[float, Field(allow_inf_nan=False)]
"""A difference of two timings, which noise may make negative."""
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of one attention, one MLP and the LM head over a single row, and of a verifying forward over
    ``1 + i`` rows."""

    attention: _Saved
    mlp: _Saved
    head: _Saved
    verify: Annotated[tuple[_Seconds, ...], Field(min_length=2)]

    def draft(self, mask: Mask) -> float:
        """One draft token under ``mask``."""
        layers = len(mask) // 2
        return self.head + self.attention * (layers - sum(mask[:layers])) + self.mlp * (layers - sum(mask[layers:]))

    def pace(self, runs: Seq[int], mask: Mask) -> tuple[float, int]:
        """Expected tokens a second with the best fixed number of draft tokens, and that number (0: do not draft)."""
        drafting = self.draft(mask)
        paces = [
            (1.0 + sum(min(run, count) for run in runs) / len(runs)) / (count * drafting + self.verify[count])
            for count in range(1, len(self.verify))
        ]
        best = max(range(len(paces)), key=paces.__getitem__)
        return paces[best], 1 + best


def measured_costs(target: Target, sequence: Sequence, length: int, repeat: int = 15) -> Costs:
    """Costs on this machine: a sublayer costs what leaving it out saves; of ``repeat`` timings the least counts."""
    layers = frozenset(range(target.num_layers))
    one = TokenTree()
    runs: dict[str, Callable[[], object]] = {
        "full": lambda: target.score([(sequence, one)]),
        "no attention": lambda: target.score([(sequence, one)], graph=SubGraph(skip_attention=layers)),
        "no mlp": lambda: target.score([(sequence, one)], graph=SubGraph(skip_mlp=layers)),
        "head": lambda: target.score([(sequence, one)], graph=SubGraph(stop=0)),
    }
    chains = [TokenTree.chain([0] * count) for count in range(length + 1)]
    for count in range(1, length + 1):
        runs[f"verify {count}"] = lambda chain=chains[count]: target.score([(sequence, chain)])  # type: ignore[misc]
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(repeat):  # in turn, so that a disturbance does not fall on all timings of one forward
        for name, run in runs.items():
            began = perf_counter()
            run()
            least[name] = min(least[name], perf_counter() - began)
    full, head = least["full"], min(least["head"], least["full"])
    attention, mlp = (max(0.0, full - least[name]) for name in ("no attention", "no mlp"))
    scale = (full - head) / (attention + mlp) if attention + mlp else 0.0
    timed = [full, *(least[f"verify {count}"] for count in range(1, length + 1))]
    # Fewer rows never cost more, and noise makes a forward slower, never quicker.
    verify = tuple(min(timed[count:]) for count in range(length + 1))
    return Costs(attention * scale / len(layers), mlp * scale / len(layers), head, verify)


class _Trial(BaseModel):
    mask: str
    tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    length: int
    accepted: Annotated[float, Field(allow_inf_nan=False)]


class _Record(BaseModel):
    """What a search goes on from."""

    costs: Costs
    trials: list[_Trial]


class Tuning:
    """The search; ``record``, the file's content, is complete after every try.

    Raises BadInput for models too shallow to skip layers of, and for a record of another search.
    """

    def __init__(
        self, beginnings: Beginnings, model: str, *, seed: int = 0, record: dict[str, Any] | None = None
    ) -> None:
        target = beginnings.target
        layers = target.num_layers
        if layers < 3:
            raise BadInput(f"the model has {layers} layers; there is nothing in the middle to skip")
        self.beginnings = beginnings
        # The first and the last layer stay, as in the paper: without them nothing is left of the residual stream.
        free = [index for index in range(2 * layers) if index % layers not in (0, layers - 1)]
        self.search = MaskSearch(2 * layers, free, 1, len(free) * 3 // 4, initial=12, seed=seed)
        if record is None:
            self.costs = measured_costs(target, beginnings.all[0].sequence, beginnings.length)
            self.record: dict[str, Any] = {
                "format": FORMAT,
                "model": model,
                "layers": layers,
                "beginnings": beginnings.fingerprint,
                "seed": seed,
                "costs": asdict(self.costs),
                "trials": [],
            }
        else:
            self._continue(record, seed)
        self.plain = 1.0 / self.costs.verify[0]

    def _continue(self, record: dict[str, Any], seed: int) -> None:
        """Continue the search of a record."""
        same = record.get("beginnings") == self.beginnings.fingerprint and record.get("seed") == seed
        if not same:
            raise BadInput(
                "the file holds a search with another model, other prompts or another seed; name another file to write"
            )
        try:
            before = _Record.model_validate(record)
            self.costs = before.costs
            for trial in before.trials:
                self.search.tell(_unpacked(trial.mask, self.search.length), trial.tokens_per_second)
        except ValueError:  # pydantic's errors are ValueErrors
            raise BadInput("the file of the interrupted search is damaged; delete it, or name another") from None
        self.record = record

    @property
    def done(self) -> int:
        """Tries so far."""
        return self.search.told

    def step(self) -> None:
        """Try one more set; afterwards ``record`` is complete."""
        # Skipping all attention of the middle, or all MLPs, are guesses that a random mask never makes.
        mask = self._guess() if self.done < 2 else self.search.suggest()
        runs = self.beginnings.runs(Skips.of(mask).graph)
        pace, length = self.costs.pace(runs, mask)
        self.search.tell(mask, pace)
        self.record["trials"].append(
            {"mask": _packed(mask), "tokens_per_second": pace, "length": length, "accepted": sum(runs) / len(runs)}
        )
        best = max(self.record["trials"], key=lambda trial: trial["tokens_per_second"])
        skips = Skips.of(_unpacked(best["mask"], self.search.length))
        self.record |= {
            "attention": list(skips.attention),
            "mlp": list(skips.mlp),
            "length": best["length"],
            "accepted": best["accepted"],
            "tokens_per_second": best["tokens_per_second"],
            "plain_tokens_per_second": self.plain,
        }

    def _guess(self) -> Mask:
        layers = self.search.length // 2
        middle = range(layers // 4, layers - layers // 4)
        skips = Skips(attention=tuple(middle)) if self.done == 0 else Skips(mlp=tuple(middle))
        chosen = {*skips.attention, *(layers + layer for layer in skips.mlp)} & set(self.search.free.tolist())
        return tuple(index in chosen for index in range(2 * layers))


def _packed(mask: Mask) -> str:
    return "".join("1" if flag else "0" for flag in mask)


def _unpacked(text: str, length: int) -> Mask:
    if len(text) != length or set(text) - {"0", "1"}:
        raise ValueError(text)
    return tuple(flag == "1" for flag in text)
