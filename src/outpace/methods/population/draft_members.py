"""DraftMembers: a draft model's side of a group, a sequence for every member, gathered as the members are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.model_drafter import lag, prefill_behind
from outpace.engine.populations.base import Forest, Heir, Member
from outpace.engine.populations.gather import gather
from outpace.engine.populations.group import grown_by
from outpace.targets.base import Scores, Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor


class DraftMembers:
    """The draft model reads what the target's members are, and runs draft tokens after them, a level at a time."""

    def __init__(self, model: Target, prompt: Sequence) -> None:
        self.model, self._prompt = model, prompt
        self.sequences: list[Sequence] = []
        self._runs: list[TokenTree] = []
        self._where: list[dict[int, int]] = []
        """Of each member: where nodes of its tree are among those that are run."""
        self._scores: Scores | None = None

    def fits(self, members: Seq[Member], depth: int) -> bool:
        """Whether the draft model's context has room for ``depth`` tokens after every member."""
        return max(len(one.sequence.tokens) for one in members) + depth < self.model.context_length

    def start(self, members: Seq[Member]) -> None:
        """A new round: catch up with what the target committed."""
        if not self.sequences:
            self._begin(members)
        prefill_behind(self.model, self.sequences)
        # The others' first forward runs what they lack.
        self._runs = [TokenTree.chain(one.tokens[len(one.tokens) - lag(self.model, one) :]) for one in self.sequences]
        self._where = [{ROOT: len(run) - 1} for run in self._runs]
        self._scores = None

    def _begin(self, members: Seq[Member]) -> None:
        """Read the prompt once, and copy its K/V for every member."""
        first = replace(self._prompt, tokens=list(self._prompt.tokens), kv=self.model.open(), states=None)
        self.model.prefill([first])
        copies = [first.kv, *(self.model.fork(first.kv) for _ in members[1:])]
        self.sequences = [
            replace(first, tokens=list(one.sequence.tokens), kv=kv) for one, kv in zip(members, copies, strict=True)
        ]

    def run(self, added: Iterable[tuple[int, int, int, int]] = ()) -> None:
        """Run further nodes: (member, node of its tree, parent of the node, token) each."""
        for member, node, parent, token in added:
            self._where[member][node] = self._runs[member].add(self._where[member][parent], token)
        self._scores = self.model.score(list(zip(self.sequences, self._runs, strict=True)), resume=self._scores)

    def logits(self, member: int, nodes: Seq[int]) -> Tensor:
        """Raw logits after nodes of a member's tree that were run: (len(nodes), V)."""
        assert self._scores is not None
        return self._scores[member].logits[[self._where[member][node] + 1 for node in nodes]]

    def follow(self, forest: Forest, heirs: Seq[Heir]) -> None:
        """The members of the next round are ``heirs``: keep the K/V of what they kept."""
        if not self.sequences:
            return
        found = gather(self.model, self.sequences, [(one.ancestor, self._ran(one)) for one in heirs], self._scores)
        members = []
        for heir, kv in zip(heirs, found, strict=True):
            ancestor = self.sequences[heir.ancestor]
            grown = [*ancestor.tokens, *grown_by(forest.trees[heir.ancestor], heir)]
            members.append(replace(ancestor, tokens=grown, kv=kv))
        self.sequences = members
        self._scores = None

    def _ran(self, heir: Heir) -> list[int]:
        """What was run of an heir, and it kept: what was caught up, then draft tokens, but for those drafted last."""
        if self._scores is None:
            return []
        where = self._where[heir.ancestor]
        return [*range(where[ROOT] + 1), *(where[node] for node in heir.path if node in where)]

    def close(self) -> None:
        """Release the K/V."""
        for one in self.sequences:
            self.model.close(one.kv)
        self.sequences = []
