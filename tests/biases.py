"""Biases that the field has seen, each planted in an otherwise honest method. ``outpace certify`` must catch them all.

A bias is a factory of Methods: drafters are real draft models over the tiny (or any) context, with one thing wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.acceptance.block import Block
from outpace.acceptance.draws import acceptance_probability, left_by, proposal_distribution
from outpace.acceptance.gumbel_coupling import GumbelCoupling
from outpace.acceptance.k_sequential import KSequential, division_factor
from outpace.acceptance.rejection import RecursiveRejection
from outpace.acceptance.traversal import Traversal, _Visit
from outpace.acceptance.univer import UniVer, _Plan
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.tree import DETERMINISTIC, Draw, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.model_drafter import BuilderFactory, DraftModel
from outpace.drafting.sampled_trees import (
    GreedyPlusOne,
    SampledTreeBuilder,
    StochasticBeam,
    WithoutReplacement,
    WithReplacement,
)
from outpace.drafting.tree_builder import TreeBuilder
from outpace.engine.method import Method
from outpace.methods.registry import Context
from outpace.targets.base import Sequence, TreeScores
from outpace.targets.table import TableTarget
from test_acceptance import Biased, BlindToPath, NoResidual, Stale, Unnormalised

CHAIN = Proposal(sampled=True)
TREE = Proposal(tree=True, sampled=True)
ONE_SAMPLED = Proposal(tree=True, sampled=True, one_sampled_sibling=True)
DISTINCT = Proposal(tree=True, sampled=True, replacement=False)
Make = Callable[[Context], Method]


# ------------------------------------------------------------------------------------------------------ drafters


class Chain(TreeBuilder):
    """A sampled chain with a seam for every lie. Without overrides it is honest."""

    def __init__(self, sequence: Sequence, budget: Budget, chance: Chance) -> None:
        super().__init__(sequence, budget, self.numbers(sequence, chance))
        self._chain = TokenTree()

    def numbers(self, sequence: Sequence, chance: Chance) -> Chance:
        return chance

    def grow(self, logits: Tensor) -> bool:
        distribution, node = self._distribution(logits), len(self._drafted) - 1
        if self.sequence.params.greedy or not self.budget.wants(self._depth + 1):
            return False
        token, said = self.draw(distribution, node)
        if not self.keeps(token, said):
            return False
        self._chain.add(node, token, QRow(said))
        self._run_after(node, token)
        self._depth += 1
        return True

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        """A token, and the row it is said to come from."""
        q = distribution.p(node)
        return self.chance.categorical(q), q

    def keeps(self, token: int, q: Tensor) -> bool:
        return True

    def proposal(self) -> TokenTree:
        return self._chain


class AnotherTemperature(Chain):
    """Sampled at the request's temperature, tested at 0.6 of it."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        q = distribution.p(node)
        said = q ** (1 / 0.6)
        return self.chance.categorical(q), said / said.sum()


class RoundedDraw(Chain):
    """Sampled from the bf16 row, tested with its fp32 twin."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        q = distribution.p(node)
        return self.chance.categorical(q.bfloat16()), q


class RoundedHonestly(Chain):
    """Sampled from the bf16 row and tested with that very row: no bias."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        q = distribution.p(node).bfloat16()
        return self.chance.categorical(q), q


class PrunedByQ(Chain):
    """The draw is dropped when its own q is small."""

    def keeps(self, token: int, q: Tensor) -> bool:
        return float(q[token]) > float(q.max()) / 2


class PrunedByToken(Chain):
    """The draw is dropped for being an odd token."""

    def keeps(self, token: int, q: Tensor) -> bool:
        return token % 2 == 0


class PrunedByDescendant(Chain):
    """The last draw is dropped with all before it when it is an odd token."""

    def proposal(self) -> TokenTree:
        return TokenTree() if len(self._chain) and self._chain.tokens[-1] % 2 else self._chain


class TopPUnsaid(Chain):
    """Sampled with the request's top-p, said to be sampled without."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        raw = (distribution.processed([node])[0] / self.sequence.params.temperature).softmax(-1)
        return self.chance.categorical(distribution.p(node)), raw


class TopPAfterSampling(Chain):
    """Sampled without the request's top-p; what falls outside it is not proposed. No bias: the draws that are left
    have the law that they say, whether or not there is one does not depend on which one it is."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        raw = (distribution.processed([node])[0] / self.sequence.params.temperature).softmax(-1)
        return self.chance.categorical(raw), distribution.p(node)

    def keeps(self, token: int, q: Tensor) -> bool:
        return float(q[token]) > 0


class MaskAfterSampling(Chain):
    """Sampled from the unmasked row; the allowed-token mask is applied to q afterwards."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        raw = (distribution.logits[node + 1] / self.sequence.params.temperature).softmax(-1)
        allowed = distribution.p(node) > 0
        return self.chance.categorical(raw), raw * allowed / (raw * allowed).sum()


class SharedNumbers(Chain):
    """The drafter reads the random numbers of the rule."""

    def numbers(self, sequence: Sequence, chance: Chance) -> Chance:
        return sequence.chance.at(len(sequence.tokens), "accept")


class DistinctSaidIndependent(WithoutReplacement):
    """Drawn without replacement, tested as with."""

    replacement = True


class Sorted(WithReplacement):
    """A tree whose siblings are put in the order of their probability after they were sampled."""

    def proposal(self) -> TokenTree:
        tree = TokenTree(replacement=self._tree.replacement, q_rows=self._tree.q_rows)
        where = {-1: -1}
        ranked = sorted(self._tree.draws, key=lambda one: -self._tree.q_rows[one.q_row].prob(one.token))
        for one in sorted(ranked, key=lambda one: self._tree.depths[one.node]):
            where[one.node] = tree.add(where[one.parent], one.token, one.q_row)
        return tree


class OnlyTheBest(WithReplacement):
    """Of all that was sampled the nodes with the largest probability are kept, and claimed as sampled."""

    def proposal(self) -> TokenTree:
        whole, tree, where = self._tree, TokenTree(), {-1: -1}
        best = sorted(whole.draws, key=lambda one: -whole.q_rows[one.q_row].prob(one.token))[:2]
        for one in whole.draws:
            if one in best and one.parent in where:
                where[one.node] = tree.add(where[one.parent], one.token, whole.q_rows[one.q_row])
        return tree


class BeamByToken(StochasticBeam):
    """A stochastic beam whose siblings are handed over in the order of their ids."""

    def proposal(self) -> TokenTree:
        whole, where = self._tree, {-1: -1}
        tree = TokenTree(replacement=False, q_rows=whole.q_rows)
        for one in sorted(whole.draws, key=lambda one: (whole.depths[one.node], one.token)):
            where[one.node] = tree.add(where[one.parent], one.token, one.q_row)
        return tree


# --------------------------------------------------------------------------------------------------------- rules


class BonusFromDraft(Biased):
    """The token after a fully accepted path comes from the draft model."""

    def __init__(self, draft: TableTarget) -> None:
        self.draft = draft

    def last(self, p: Tensor, scores: TreeScores, node: int, tried: list[Draw]) -> Tensor:
        path = (*scores.sequence.tokens, *scores.tree.path_tokens(node))
        return p if tried else self.draft.table(path).softmax(-1)


class TopPOnTheBonusAlone(Biased):
    """Draft tokens are tested without top-p."""

    def target(self, scores: TreeScores, node: int) -> Tensor:
        params = replace(scores.sequence.params, top_p=1.0)
        return without(scores, node, params)

    def last(self, p: Tensor, scores: TreeScores, node: int, tried: list[Draw]) -> Tensor:
        return p if tried else scores.p(node)


class NoMask(Biased):
    """The user's mask is missing from p wherever draft tokens are tested."""

    def target(self, scores: TreeScores, node: int) -> Tensor:
        return without(scores, node, replace(scores.sequence.params, processors=()))


class NoGrammar(Biased):
    """The grammar is missing from p wherever draft tokens are tested."""

    def target(self, scores: TreeScores, node: int) -> Tensor:
        sampler = scores.sequence.sampler.fork()
        sampler.grammar = None
        sampler.extend(scores.tree.path_tokens(node))
        return TreeDistribution(sampler, TokenTree(), scores.logits[node + 1][None]).p(-1)


class NoTemperature(Biased):
    """p is taken at temperature 1."""

    def target(self, scores: TreeScores, node: int) -> Tensor:
        return without(scores, node, replace(scores.sequence.params, temperature=1.0))


def without(scores: TreeScores, node: int, params: object) -> Tensor:
    """p after ``node`` under other sampling parameters, penalties as they were."""
    sampler = scores.sequence.sampler.fork()
    sampler.extend(scores.tree.path_tokens(node))
    sampler.params = params  # type: ignore[assignment]
    return TreeDistribution(sampler, TokenTree(), scores.logits[node + 1][None]).p(-1)


class RowBefore(Biased):
    """Every draft token is tested with the row of its parent's parent: scores are off by one."""

    def target(self, scores: TreeScores, node: int) -> Tensor:
        return scores.p(node if node < 0 else scores.tree.parents[node])


class ScaledByAnother(KSequential):
    """k-SEQ with a division factor for one draw fewer than there are."""

    def rho(self, p: Tensor, q: Tensor, draws: int) -> float:
        return division_factor(p, q, max(1, draws - 1))

    def rest(self, p: Tensor, q: Tensor, rho: float, draws: int) -> Tensor:
        moved = torch.minimum(q, p / rho)
        beta = float(moved.sum())
        return (p - (1.0 - (1.0 - beta) ** draws) / beta * moved).clamp_(min=0.0)

    def select(self, tree: TokenTree, draws: Seq[Draw], p: Tensor, chance: Chance) -> Draw | int:
        q = proposal_distribution(tree, (), draws[0], p)
        assert q is not None
        rho = self.rho(p, q, len(draws))
        for draw in draws:
            if chance.bernoulli(acceptance_probability(p, q, draw.token, 1.0 / rho)):
                return draw
        rest = self.rest(p, q, rho, len(draws))
        return chance.categorical(rest if float(rest.sum()) > 0.0 else p)


class UnscaledKSeq(ScaledByAnother):
    """k-SEQ that tests its draws with min(1, p / q): the division factor is forgotten."""

    def rho(self, p: Tensor, q: Tensor, draws: int) -> float:
        return 1.0


class RejectionsResidual(ScaledByAnother):
    """k-SEQ whose last token comes from max(0, p - q), as after a single rejection."""

    def rho(self, p: Tensor, q: Tensor, draws: int) -> float:
        return division_factor(p, q, draws)

    def rest(self, p: Tensor, q: Tensor, rho: float, draws: int) -> Tensor:
        return (p - q).clamp_(min=0.0)


class WrittenOut(RejectionsResidual):
    """k-SEQ as it is, of the parts above."""

    def rest(self, p: Tensor, q: Tensor, rho: float, draws: int) -> Tensor:
        return ScaledByAnother.rest(self, p, q, rho, draws)


@contextmanager
def replaced(owner: type, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``owner.name`` is ``wrong``, which is called with what it replaces before its arguments."""
    honest = getattr(owner, name)
    setattr(owner, name, lambda *given: wrong(honest, *given))
    try:
        yield
    finally:
        setattr(owner, name, honest)


class HeavyBlock(Block):
    """Block verification that forgets to lower the mass of a node whose draws were rejected."""

    @staticmethod
    def wrong(honest: Callable[[_Visit], None], visit: _Visit) -> None:
        mass = visit.mass()
        honest(visit)
        visit.mass()
        visit._mass = mass

    def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
        with replaced(_Visit, "reject", self.wrong):
            return super().accept(scores, states, chances)


class SiblingsOfFirstResidual(Traversal):
    """Traversal in which a rejected sibling leaves p as it was: the next is tested as if it were the first."""

    @staticmethod
    def wrong(honest: Callable[[_Visit], None], visit: _Visit) -> None:
        p = visit.p
        honest(visit)
        left = visit.p
        visit._p = left if visit.tried > 1 else p

    def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
        with replaced(_Visit, "reject", self.wrong):
            return super().accept(scores, states, chances)


class ResidualWithoutMass(Traversal):
    """Traversal whose residual is max(0, p - q) below the root too, where it is max(0, mass * p - q)."""

    @staticmethod
    def wrong(honest: Callable[[_Visit], None], visit: _Visit) -> None:
        rest, total = left_by(visit.p, visit._q, visit._draw.token)
        honest(visit)
        visit.mass()
        if total > 0.0:
            visit._p = rest

    def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
        with replaced(_Visit, "reject", self.wrong):
            return super().accept(scores, states, chances)


class MassOfLastSibling(Traversal):
    """Traversal with a wrong weight at a branch: a later sibling gets p / q without the mass that is left."""

    @staticmethod
    def wrong(honest: Callable[..., float], visit: _Visit, tree: TokenTree, draws: Seq[Draw]) -> float:
        share = honest(visit, tree, draws)
        return share if visit.tried == 1 else visit.p.acceptance(visit._q, visit._draw.token)

    def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
        with replaced(_Visit, "offer", self.wrong):
            return super().accept(scores, states, chances)


class WrongPlan(UniVer):
    """UniVer with a step behind each plan."""

    @staticmethod
    def wrong(plan: _Plan, scores: TreeScores, node: int, mass: float, draws: Seq[Draw]) -> None:
        pass

    def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
        def planned(honest: Callable[..., None], plan: _Plan, *given: Any) -> None:
            honest(plan, *given)
            self.wrong(plan, *given)

        with replaced(_Plan, "__init__", planned):
            return super().accept(scores, states, chances)


class UndividedShares(WrongPlan):
    """Deterministic siblings get (1 - own) * mass * p(t): the division by the supply that is left, L, is forgotten."""

    @staticmethod
    def wrong(plan: _Plan, scores: TreeScores, node: int, mass: float, draws: Seq[Draw]) -> None:
        p = scores.p(node)
        known = {draw.node: draw.token for draw in draws if draw.q_row == DETERMINISTIC}
        for draw in draws:
            if draw.q_row != DETERMINISTIC:
                moved = torch.minimum(mass * p, scores.tree.q_rows[draw.q_row].dense(len(p)))
                moved[list(known.values())] = 0.0
                supply = 1.0 - float(moved.sum())
                plan.shares = [(child, share * supply if child in known else share) for child, share in plan.shares]


class RestOfAll(WrongPlan):
    """After a rejection of all children the token comes from p, what the plan moved among it."""

    @staticmethod
    def wrong(plan: _Plan, scores: TreeScores, node: int, mass: float, draws: Seq[Draw]) -> None:
        plan.stop()
        plan._rest = scores.distribution.at(node)


class StopsWithItsMass(WrongPlan):
    """A node whose children are gone is kept with its whole mass, without regard to what they were given."""

    @staticmethod
    def wrong(plan: _Plan, scores: TreeScores, node: int, mass: float, draws: Seq[Draw]) -> None:
        plan.stop()
        plan._demand, plan._supply, plan._total = 0.0, 1.0, mass


class FreshNoise(GumbelCoupling):
    """After a mismatch the token is drawn again from p: what agreed is counted twice."""

    def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
        verdicts = super().accept(scores, states, chances)
        out: list[Verdict] = []
        for one, verdict, chance in zip(scores, verdicts, chances, strict=True):
            node = verdict.path[-1] if verdict.path else -1
            out.append(replace(verdict, token=chance.categorical(one.p(node))))
        return out


class NoiseOfBefore(GumbelCoupling):
    """A first token is drawn with the noise of the token before it, which that token has shown in part."""

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        if scores.length > scores.sequence.prompt_length:
            scores.length -= 1
            scores.sequence.noise = None
        return super().decide(scores, chance)


# ---------------------------------------------------------------------------------------------------- the planted


# ------------------------------------------------------------------------------------------------------ grammars


class Unmasked(Chain):
    """A draft model that knows nothing of the grammar: draws that it forbids stay in the tree. No bias."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        q = distribution.logits[node + 1].float().softmax(-1)
        return self.chance.categorical(q), q


class ForbiddenDropped(Unmasked):
    """Draws that the grammar forbids are left out, and the others are said to come from the same row."""

    def draw(self, distribution: TreeDistribution, node: int) -> tuple[int, Tensor]:
        self.allowed = distribution.p(node) > 0
        return super().draw(distribution, node)

    def keeps(self, token: int, q: Tensor) -> bool:
        return bool(self.allowed[token])


class UnmaskedTree(WithReplacement):
    """A sampled tree of a draft model that knows nothing of the grammar."""

    def _distribution(self, logits: Tensor) -> TreeDistribution:
        found = super()._distribution(logits)
        found.sampler = found.sampler.fork()
        found.sampler.grammar = None
        return found


class ForbiddenLast(UnmaskedTree):
    """Sibling draws that the grammar forbids are put behind those that it allows."""

    def proposal(self) -> TokenTree:
        honest, sampler = super().proposal(), self.sequence.sampler
        sorted_tree = TokenTree(q_rows=honest.q_rows)
        allowed = sampler.allowed(sampler.place)
        assert allowed is not None and not isinstance(allowed, BadInput)
        for draw in sorted(honest.draws, key=lambda one: not int(allowed[0]) >> one.token & 1):
            sorted_tree.add(draw.parent, draw.token, draw.q_row)
        return sorted_tree


@dataclass(frozen=True)
class Bias:
    """A planted bias: the method, and the sampling (of the certificate's matrix) and the tables in which it shows."""

    make: Make
    where: str = "temperature 1"
    tables: tuple[int, ...] = (8, 9)
    statistical: bool = True
    """Whether it is large enough for a few thousand tokens of a larger vocabulary, at temperature 1."""


def chain(
    builder: BuilderFactory = Chain, rule: Callable[[], AcceptanceRule] = RecursiveRejection, length: int = 2
) -> Make:
    return lambda context: Method("planted", DraftModel(context.draft(), builder, CHAIN), rule(), Fixed(length))


def tree(
    builder: type[SampledTreeBuilder] = WithReplacement,
    rule: Callable[[], AcceptanceRule] = RecursiveRejection,
    branching: tuple[int, ...] = (2,),
    proposal: Proposal = TREE,
    depth: int = 1,
) -> Make:
    return lambda context: Method(
        "planted", DraftModel(context.draft(), partial(builder, branching=branching), proposal), rule(), Fixed(depth)
    )


def wide(builder: type[SampledTreeBuilder]) -> Make:
    """Two sampled siblings."""
    return tree(builder, branching=(2,), proposal=TREE, depth=1)


def one_sampled(rule: Callable[[], AcceptanceRule], branching: tuple[int, ...] = (2,)) -> Make:
    """The likeliest tokens, and one that is drawn from the rest."""
    return tree(GreedyPlusOne, rule, branching, ONE_SAMPLED, len(branching))


def bonus(context: Context) -> Method:
    draft = context.draft()
    assert isinstance(draft, TableTarget)
    return Method("planted", DraftModel(draft, Chain, CHAIN), BonusFromDraft(draft), Fixed(1))


def coupled(rule: type[GumbelCoupling]) -> Make:
    return lambda context: Method("planted", DraftModel(context.draft()), rule(), Fixed(2))


BIASES: dict[str, Bias] = {
    "q of another temperature": Bias(chain(AnotherTemperature)),
    "bf16-sampled q tested in fp32": Bias(chain(RoundedDraw), statistical=False),
    "residual not renormalised": Bias(tree(rule=Unnormalised), statistical=False),
    "correction from p itself": Bias(chain(rule=NoResidual)),
    "bonus token from the draft": Bias(bonus),
    "siblings tested with a stale residual": Bias(tree(rule=Stale)),
    "draws without replacement tested as with": Bias(tree(DistinctSaidIndependent), statistical=False),
    "a sampled draw pruned afterwards by its q": Bias(chain(PrunedByQ)),
    "a sampled draw pruned afterwards by its token": Bias(chain(PrunedByToken)),
    "a sampled draw pruned afterwards by its descendant": Bias(chain(PrunedByDescendant), statistical=False),
    "top-p in the claimed q alone": Bias(chain(TopPUnsaid), "top-p 0.8", statistical=False),
    "top-p in the bonus alone": Bias(chain(rule=TopPOnTheBonusAlone), "top-p 0.8", statistical=False),
    "drafter and rule read the same random numbers": Bias(chain(SharedNumbers)),
    "off-by-one row of scores": Bias(chain(rule=RowBefore)),
    "mask applied to q after sampling": Bias(chain(MaskAfterSampling), "user's processor", statistical=False),
    "mask missing from p": Bias(chain(rule=NoMask), "user's processor", statistical=False),
    "penalties of the root's path at every node": Bias(chain(rule=BlindToPath), "penalties", statistical=False),
    "mask of the root's path at every node": Bias(chain(rule=BlindToPath), "user's processor", statistical=False),
    "grammar: forbidden draws are dropped": Bias(chain(ForbiddenDropped), "grammar", statistical=False),
    "grammar: forbidden draws are ranked last": Bias(wide(ForbiddenLast), "grammar", statistical=False),
    "grammar: mask of the root's path at every node": Bias(chain(rule=BlindToPath), "grammar", statistical=False),
    "grammar: mask missing from p": Bias(chain(Unmasked, NoGrammar), "grammar", statistical=False),
    "temperature missing from p": Bias(chain(rule=NoTemperature), "temperature 0.6", statistical=False),
    "a tree re-ranked after sampling": Bias(tree(Sorted)),
    "the best of a sampled tree, claimed as sampled": Bias(tree(OnlyTheBest, branching=(3,))),
    "block verification with the mass before rejections": Bias(chain(rule=HeavyBlock), statistical=False),
    "k-seq scaled for one draw fewer": Bias(tree(rule=ScaledByAnother)),
    "k-seq without its division factor": Bias(tree(rule=UnscaledKSeq)),
    "k-seq with the residual of a single rejection": Bias(tree(rule=RejectionsResidual), statistical=False),
    "traversal: a sibling tested before the residual": Bias(tree(rule=SiblingsOfFirstResidual)),
    "traversal: a residual without the mass": Bias(
        tree(rule=ResidualWithoutMass, branching=(2, 1), depth=2), tables=(3, 5), statistical=False
    ),
    "traversal: a later sibling without the mass left": Bias(
        tree(rule=MassOfLastSibling, branching=(1, 2), depth=2), tables=(3, 5)
    ),
    "univer: shares that are not divided by the supply": Bias(one_sampled(UndividedShares)),
    "univer: what was moved is not taken from the rest": Bias(one_sampled(RestOfAll)),
    "univer: a node kept with its whole mass": Bias(one_sampled(StopsWithItsMass, (2, 1))),
    "a coupled token drawn afresh": Bias(coupled(FreshNoise), statistical=False),
    "noise of the position before": Bias(coupled(NoiseOfBefore), statistical=False),
}

NOISY: dict[str, Bias] = {
    "a beam's siblings in the order of their ids": Bias(tree(BeamByToken, branching=(2,), proposal=DISTINCT))
}
"""Those with continuous noise, which the exact level samples."""


class Controls:
    """The same parts without their bias: certify must pass them, or it proves nothing by catching the others."""

    MAKES: ClassVar[dict[str, Make]] = {
        "chain": chain(),
        "chain, written out": chain(rule=Biased),
        "chain, a draft model that knows no grammar": chain(Unmasked),
        "tree, a draft model that knows no grammar": wide(UnmaskedTree),
        "chain, bf16 rows": chain(RoundedHonestly),
        "chain, block": chain(rule=Block),
        "chain, draws outside top-p dropped": chain(TopPAfterSampling),
        "tree": tree(),
        "tree, written out": tree(rule=Biased),
        "tree, k-seq written out": tree(rule=WrittenOut),
        "tree, traversal": tree(rule=Traversal, branching=(2, 1), depth=2),
        "one sampled sibling, univer": one_sampled(WrongPlan, (2, 1)),
        "tree without replacement": tree(WithoutReplacement, proposal=DISTINCT),
    }
