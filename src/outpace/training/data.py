"""A folder of conversations: prompts collected, answered by the target, and kept with its hidden states.

The folder holds the shards (:mod:`outpace.training.shards`) and ``prompts.jsonl``, a line for every prompt that was
looked at: to be answered, or why not. A shard is one block of prompts and depends on nothing else, so a run that was
stopped at any moment and begun again writes what it would have written. Kinds of heads share a folder: it keeps states
of the layers that any of them reads, until they fill the byte budget; beyond it text alone, whose states the target
computes again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput, OutpaceError
from outpace.heads.fingerprint import alike, probe
from outpace.heads.kinds import kinds
from outpace.model import Model
from outpace.prompts.overlap import Overlap, Seen
from outpace.prompts.passages import PassagePrompts
from outpace.prompts.sources import Ask, Source, Variation
from outpace.targets.base import Target
from outpace.training.answers import TOGETHER, Prompt, answered
from outpace.training.dataset import held_out
from outpace.training.memory import give_back, ran_out
from outpace.training.prompt_log import LOG, Log
from outpace.training.self_written import SelfWritten
from outpace.training.shards import MANIFEST, Conversation, Shards

BLOCK = 192
"""Most prompts that are answered between two shards."""
_SHARD_BYTES = 256 * 2**20
_LEAST_BLOCK = 8
_TURNS = 64
"""Turns that the model is asked to write at once."""
_VAIN = 8
"""So many askings in a row without a turn of use, and the model is taken to write none."""
CACHE = 20 * 10**9


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is to be collected. ``tokens``: of answers; ``most``: in one of them; ``longest``: tokens of a prompt.

    ``self_written``: share of prompts that the model writes itself; None: those that are lacking when ``sources`` end.
    ``readings``: share of prompts about texts, as far as there are texts. ``cache_bytes``: for states; None: half of
    the free disk, up to CACHE.
    """

    tokens: int
    sources: Sequence[Source] = ()
    self_written: float | None = None
    readings: float = 0.0
    most: int = 224
    longest: int = 1024
    cache_bytes: int | None = None
    variation: Variation = field(default_factory=Variation)
    seed: int = 0
    together: int = TOGETHER


@dataclass(slots=True)
class Collected:
    """How far a collection is. ``removed``: prompts left out, by reason."""

    tokens: int = 0
    prompts: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    doing: str = ""

    def public(self) -> dict[str, Any]:
        """For a head's provenance."""
        return {
            "answer_tokens": self.tokens,
            "prompts": self.prompts,
            "sources": dict(self.sources),
            "removed": dict(self.removed),
        }


Watch = Callable[[Collected], None]


def layers_of_all_kinds(target: Target) -> tuple[int, ...]:
    """The layers that any kind of head reads with its default settings, and the last one's output."""
    found = {target.num_layers}
    for kind in kinds().values():
        found |= set(kind.aux_layers_of(target.num_layers, kind.Options()))
    return tuple(sorted(found))


def open_folder(folder: Path, target: Target, name: str, layers: Sequence[int]) -> Shards:
    """The conversations in ``folder``, or a new folder for states of ``layers``.

    A folder that exists keeps its own layers: others are computed when they are asked for. Raises BadInput for a folder
    of other weights, told by their fingerprint and not by name.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is a file; conversations need a folder")
        try:
            return Shards(folder, {"target": name, "fingerprint": probe(target), "layers": list(layers)})
        except OSError as error:
            raise BadInput(f"cannot write to {folder}: {error.strerror or error}") from None
    shards = Shards(folder, {})
    found = about(shards)
    theirs, kept = found.get("fingerprint"), found.get("layers")
    if not isinstance(theirs, list) or not isinstance(kept, list):
        raise BadInput(f"{manifest} does not say which target the conversations are of; give another folder")
    if not alike(theirs, probe(target)):
        raise BadInput(
            f"{folder} holds conversations of another target ({found.get('target', 'unnamed')}), not of '{name}'; "
            "give another folder"
        )
    return shards


def about(shards: Shards) -> dict[str, Any]:
    """What the folder's manifest says."""
    found = json.loads((shards.folder / MANIFEST).read_text())
    return found if isinstance(found, dict) else {}


class Collector:
    """Fills a folder with conversations of ``model``. ``excluded``: what no prompt may have in common with."""

    def __init__(self, model: Model, shards: Shards, wish: DataConfig, excluded: Overlap) -> None:
        self.model, self.shards, self.wish, self._excluded = model, shards, wish, excluded
        self.layers = tuple(about(shards).get("layers", ()))
        room = model.target.context_length
        self._most = max(1, min(wish.most, room // 2))
        self._longest = max(1, min(wish.longest, room - self._most - 2))
        self.log = Log(shards.folder / LOG)
        self._own = SelfWritten(model, wish.seed)
        self._readings = PassagePrompts(wish.seed)
        self._answered = set(shards.keys())
        for path in shards.paths if wish.readings else ():
            self._remember(shards.read(path))
        self._seen = self._known()
        self._given = self._in_turns([iter(one) for one in wish.sources])
        self._given_left = bool(wish.sources)
        self._turns: list[Ask] = []
        self._written = False
        self._vain = self._owned = 0
        self.state = Collected(shards.answer_tokens(), len(self._answered))

    def _known(self) -> Seen:
        """What is there already: the log's prompts, and those that were answered without one."""
        seen = Seen()
        for ask in self.log.asks:
            seen.add(ask.text)
        unlogged = self._answered - {ask.key for ask in self.log.asks}
        for path in self.shards.paths if unlogged else ():
            for one in self.shards.read(path, wanted=unlogged.__contains__):
                seen.add(self.model.tokenizer.decode(self._own.turn.inside(one.prompt)))
        return seen

    def _remember(self, conversations: Iterable[Conversation]) -> None:
        """Their answers are texts to ask about; but not answers about texts, nor any of the held-out split."""
        asked = {ask.key: ask for ask in self.log.asks if not ask.origin.startswith(f"{PassagePrompts.name}:")}
        for one in conversations:
            if one.key in asked and not held_out(one.key):
                self._readings.add(asked[one.key].text, self.model.tokenizer.decode(self._said(one)))

    def _said(self, one: Conversation) -> list[int]:
        """An answer without the token that ended it."""
        return one.answer[:-1] if one.answer[-1] in self.model.eos_ids else one.answer

    def run(self, watch: Watch = lambda _: None) -> Collected:
        """Collect until there are tokens enough or prompts have ended. What was written before is kept, always."""
        try:
            while self.state.tokens < self.wish.tokens:
                block = self._block(watch)
                if not block:
                    break
                self._answer(block, watch)
        except (MemoryError, RuntimeError) as error:
            if ran_out(error):
                raise BadInput(
                    "memory ran out while prompts were answered; what was written before is kept: free some, and run "
                    "again to go on"
                ) from error
            raise
        self._count()
        if not self.state.tokens:
            raise BadInput("no prompt was left to answer: " + (self._why() or "the sources have none"))
        return self.state

    def _why(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.log.removed.items()))

    def _count(self) -> None:
        self.state.removed = self.log.removed
        self.state.sources = Counter(
            ask.origin.rpartition(":")[0] for ask in self.log.asks if ask.key in self._answered
        )
        self.state.prompts = len(self._answered)

    def _block(self, watch: Watch) -> list[Ask]:
        """The next prompts to be answered: those that wait, and as many new ones as are lacking."""
        left = self.wish.tokens - self.state.tokens
        mean = self.state.tokens / len(self._answered) if self._answered else self._most / 2
        size = min(self._largest(), max(_LEAST_BLOCK, math.ceil(left / max(1.0, mean))))
        waiting = [ask for ask in self.log.asks if ask.key not in self._answered]
        while len(waiting) < size:
            self.state.doing = "collecting prompts"
            watch(self.state)
            before = len(self.log.asks)
            if not self._more(size - len(waiting)):
                break
            waiting += self.log.asks[before:]
        return waiting[:size]

    def _largest(self) -> int:
        """How many prompts a block may have: its states must fit into memory, and a shard be a file of a fair size."""
        tokens = 2 * self.model.target.hidden_size * max(1, len(self.layers)) * (self._most + 96)
        return max(_LEAST_BLOCK, min(BLOCK, _SHARD_BYTES // tokens))

    def _more(self, count: int) -> bool:
        """Look at some more candidates, from whichever kind of source is behind. False when there are none."""
        if self.log.read < self.wish.readings * len(self.log.asks) and self.log.readings < len(self._readings):
            self.log.write([self._judged(self._readings.ask(self.log.readings))])
            return True
        others = len(self.log.asks) - self.log.read
        share = self.wish.self_written or 0.0
        if self._given_left and self.log.own >= share * others:
            self._take_given(1 if share else count)
            return True
        if self.wish.self_written == 0.0:
            return False
        self._take_own(1 if 0.0 < share < 1.0 and self._given_left else count)
        return True

    def _take_given(self, count: int) -> None:
        taken = 0
        while taken < count:
            ask = next(self._given, None)
            if ask is None:
                self._given_left = False
                return
            if (ask.origin, ask.key) not in self.log.looked_at:
                self.log.write([self._judged(ask)])
                taken += 1

    def _take_own(self, count: int) -> None:
        """Judge up to ``count`` of the turns that the model has written; none where it must write some first."""
        if not self._turns:
            self._write_turns()
        some, self._turns = self._turns[:count], self._turns[count:]
        self.log.write([self._judged(ask) for ask in some])

    def _write_turns(self) -> None:
        """Let the model write the next turns. The log says so when they are used up: till then they can be made again.

        Raises BadInput when none of the last ones could be used.
        """
        if self._written:
            self.log.write([{"turns": self.log.turns + _TURNS}])
            self._vain = 0 if self.log.own > self._owned else self._vain + 1
            if self._vain >= _VAIN:
                raise BadInput(
                    f"the model wrote no users' turns that can be used ({_VAIN * _TURNS} were asked for); "
                    "give prompts: --prompts FILE"
                )
        self._owned = self.log.own
        found = self._own.turns(self.log.turns, _TURNS, self.wish.together)
        self._turns = [ask for ask in found if (ask.origin, ask.key) not in self.log.looked_at]
        self._written = True

    def _judged(self, ask: Ask) -> dict[str, Any]:
        """The log's line for a candidate; one that is taken counts as seen from here on."""
        entry: dict[str, Any] = {"origin": ask.origin, "key": ask.key}
        if reason := self._against(ask):
            return entry | {"removed": reason}
        self._seen.add(ask.text)
        return entry | {"text": ask.text} | ({"system": ask.system} if ask.system else {})

    def _against(self, ask: Ask) -> str:
        """Why this prompt is not answered, or ""."""
        if self._seen.duplicate(ask.text):
            return "duplicates"
        if ask.text in self._excluded:
            return "overlaps with bench prompts"
        if self._seen.near(ask.text):
            return "near duplicates"
        try:
            size = len(self.model.tokenizer.chat(ask.messages))
        except OutpaceError:
            return "refused by the chat template"
        return "" if 0 < size <= self._longest else "too long"

    def _answer(self, block: Sequence[Ask], watch: Watch) -> None:
        """Answer a block, and write its shard: in the order of its prompts, whichever ended first."""
        capture = self.layers if self.shards.bytes < self._cache() else ()
        prompts = []
        for ask in block:
            temperature, seed = self.wish.variation.of(ask.key)
            prompts.append(Prompt(ask.key, tuple(self.model.tokenizer.chat(ask.messages)), temperature, seed))
        found: dict[str, Conversation] = {}
        base = self.state.tokens
        self.state.doing = (
            "answering" if capture or not self.layers else "answering (states are not kept: --cache-bytes)"
        )
        for one in answered(
            self.model.target,
            prompts,
            capture,
            most=self._most,
            stop_ids=self.model.eos_ids,
            together=self.wish.together,
        ):
            found[one.key] = one
            self.state.tokens += len(one.answer)
            self.state.prompts += 1
            watch(self.state)
        if not found:
            raise BadInput("the model answered none of the prompts")
        self.shards.append([found[ask.key] for ask in block if ask.key in found])
        if self.wish.readings:
            self._remember(one for one in (found.get(ask.key) for ask in block) if one)
        give_back()
        self._answered |= {ask.key for ask in block}
        self.state.tokens = base + sum(len(one.answer) for one in found.values())

    def _cache(self) -> int:
        if self.wish.cache_bytes is not None:
            return self.wish.cache_bytes
        return min(CACHE, self.shards.bytes + shutil.disk_usage(self.shards.folder).free // 2)

    def _in_turns(self, sources: list[Iterator[Ask]]) -> Iterator[Ask]:
        """Prompts of all sources in turn, until each has ended."""
        while sources:
            for one in list(sources):
                ask = next(one, None)
                if ask is None:
                    sources.remove(one)
                else:
                    yield ask
