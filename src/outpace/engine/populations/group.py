"""Group: the sequences that one request owns, from the prompt on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.text import Tokenizer
from outpace.core.tree import TokenTree
from outpace.engine.populations.base import Forest, GroupVerdict, Heir, Hypothesis, Member, Population
from outpace.engine.populations.ends import Ends
from outpace.engine.populations.gather import gather
from outpace.targets.base import Scores, Sequence, Target

if TYPE_CHECKING:
    from outpace.engine.request import Request

_LOGIT_BYTES = 4
"""Of one logit of a round, float32."""


class Group:
    """One request's group. The request's own sequence holds the prompt and lends its K/V to the members."""

    def __init__(
        self,
        request: Request,
        population: Population,
        prompt: Sequence,
        context_length: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.population, self.prompt = population, prompt
        self.limit = min(request.max_new_tokens, context_length - len(prompt.tokens))
        """New tokens that an answer may have."""
        self.members = [Member(self._sequence(prompt.tokens)) for _ in range(population.rule.first_members)]
        self.hypotheses: tuple[Hypothesis, ...] = ()
        """Set when it ends."""
        self._state = population.rule.begin(Ends(request, self.limit, tokenizer))
        self._draft_state = population.drafter.begin(prompt)
        self._forest = Forest([])
        self._length = 0
        """New tokens of each member."""
        self.written = 0
        """New tokens of all members, those of members that are gone among them."""
        self._closed = False

    def _sequence(self, tokens: Seq[int], ancestor: Sequence | None = None, kv: Any = None) -> Sequence:
        whose = ancestor or self.prompt
        sampler = whose.sampler.fork()
        sampler.extend(tokens[len(whose.tokens) :])
        return replace(whose, tokens=list(tokens), kv=kv, sampler=sampler, states=None, noise=None)

    @property
    def sequences(self) -> list[Sequence]:
        """Those of its members that have K/V."""
        return [one.sequence for one in self.members if one.sequence.kv is not None]

    def open(self, target: Target) -> None:
        """Give every member K/V: the prompt's, copied, and that of what it has grown by since."""
        for one in self.members:
            if one.sequence.kv is None:
                one.sequence.kv = target.fork(self.prompt.kv, len(self.prompt.tokens) - 1)
        target.prefill([one.sequence for one in self.members])

    def suspend(self, target: Target) -> None:
        """Release the members' K/V; :meth:`open` computes it anew."""
        for sequence in self.sequences:
            target.close(sequence.kv)
            sequence.kv = None

    def close(self, target: Target) -> None:
        """Release everything, once."""
        self.suspend(target)
        if not self._closed:
            self._closed = True
            self.population.drafter.end(self._draft_state)

    def propose(self) -> list[tuple[Sequence, TokenTree]]:
        """This round's trees, beside their sequences."""
        room = self.limit - self._length - 1  # the token after the last layer needs none
        self._forest = self.population.drafter.propose(self._draft_state, self.members, room, self._chance("draft"))
        return self._trees()

    def undrafted(self) -> list[tuple[Sequence, TokenTree]]:
        """Trees of no nodes, for a round that ends the group."""
        self._forest = Forest([TokenTree() for _ in self.members])
        return self._trees()

    def _trees(self) -> list[tuple[Sequence, TokenTree]]:
        return [(one.sequence, tree) for one, tree in zip(self.members, self._forest.trees, strict=True)]

    def judge(self, scores: Scores, first: int) -> GroupVerdict:
        """The rule's verdict; the group's trees are those from part ``first`` on. Raises OutpaceError."""
        parts = scores.parts[first : first + len(self.members)]
        return self.population.rule.judge(self._state, self.members, self._forest, parts, self._chance("accept"))

    def take(self, target: Target, verdict: GroupVerdict, scores: Scores, first: int) -> None:
        """Become what the verdict says."""
        self.written += verdict.tokens * len(self.members)
        if verdict.ended is not None:
            self.hypotheses = verdict.ended
            return
        trees = self._forest.trees
        before = [one.sequence for one in self.members]
        found = gather(target, before, [(one.ancestor, one.path) for one in verdict.heirs], scores, first)
        members = []
        for heir, kv in zip(verdict.heirs, found, strict=True):
            whose = before[heir.ancestor]
            grown = [*whose.tokens, *grown_by(trees[heir.ancestor], heir)]
            members.append(Member(self._sequence(grown, whose, kv), heir.log_weight))
        self.population.drafter.observe(self._draft_state, self._forest, verdict.heirs)
        self.members = members
        self._length += verdict.tokens

    @property
    def drafted(self) -> tuple[int, int]:
        """Nodes of this round's forest, and the depth of its deepest tree."""
        trees = self._forest.trees
        return sum(map(len, trees)), max((max(tree.depths, default=0) for tree in trees), default=0)

    def _chance(self, purpose: str) -> Any:
        return self.prompt.chance.at(len(self.prompt.tokens) + self._length, f"group {purpose}")


def grown_by(tree: TokenTree, heir: Heir) -> list[int]:
    """The tokens that an heir has more than its ancestor."""
    return [*(tree.tokens[node] for node in heir.path), heir.token]


def check_group(request: Request, population: Population, target: Target) -> None:
    """Raise BadInput for a request that no group can honour, and for one whose group would not fit into memory."""
    called, params = population.called, request.params
    refused = {
        f"a grammar holds one answer, and this request has {population.size} {called}; leave out the grammar, or the "
        f"{called}": params.constraint is not None,
        f"log-probabilities of tokens are not recorded for {called}, whose scores are; leave out logprobs": bool(
            params.logprobs
        ),
        f"--explain and traces show the tree of one sequence, not those of {called}": request.trace or request.sources,
        f"a conversation continues one answer, not {population.size} {called}": request.keep
        or request.kept is not None,
    }
    for why, so in refused.items():
        if so:
            raise BadInput(why)
    population.rule.check(params, most_tokens(request, target) - len(request.prompt))
    check_memory([(request, population)], target)


def check_memory(groups: Seq[tuple[Request, Population]], target: Target) -> None:
    """Raise BadInput for groups that would not fit into memory together: their K/V, that of their draft models, and
    the logits of a round."""
    needed, free = sum(_bytes(request, population, target) for request, population in groups), free_memory(target)
    if needed > free:
        request, population = groups[0]
        together = "" if len(groups) == 1 else f", {len(groups)} times at once,"
        raise BadInput(
            f"{population.size} {population.called} of {most_tokens(request, target):,} tokens{together} need "
            f"{needed / 2**20:,.0f} MiB of K/V and logits, and {free / 2**20:,.0f} MiB are free; lower their number, "
            "or max_new_tokens"
        )


def _bytes(request: Request, population: Population, target: Target) -> int:
    tokens, size, drafter = most_tokens(request, target), population.size, population.drafter
    rows = size + drafter.most_nodes(size)
    kept = target.kv_bytes(None, tokens) * (size + 1) + drafter.kv_bytes(tokens) * size
    return kept + rows * target.vocab_size * _LOGIT_BYTES


def most_tokens(request: Request, target: Target) -> int:
    """Tokens of the longest answer that a request may have, prompt included."""
    return min(target.context_length, len(request.prompt) + request.max_new_tokens)


def free_memory(target: Target) -> int:
    """Bytes that K/V of a target could have now."""
    if target.device.type != "cuda":
        return machine.free_memory()
    import torch

    return int(torch.cuda.mem_get_info(target.device)[0])
