"""What ``auto`` keeps of a request: what its namespace knows, how it gets on, and the round under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.controllers.yields import Yield
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.merged import NO_DRAFT, MergeState
from outpace.methods.combination.learned_record import Asked
from outpace.methods.combination.learned_times import BatchRest, BatchRests

HORIZON = 32.0
"""Rounds to come, where a request's answer may be longer."""
OF_A_ROUND = 2.0
"""Tokens that a round commits, about."""
BESIDE = 4
"""Tokens of a text that the learned part reads beside a draft: those of the last round. Reading more takes time that is
not that of a draft. Where a part is asked now and then, it would seem slow, and would not be asked any more."""
KNOWN, FADE = 6.0, 0.97
"""The pace of other requests counts as that of so many autoregressive steps; what a round weighs after the next one."""
COPIED = 0.5
"""A request that is quiet does not ask the learned part beside copies either, where one of their first tokens is
accepted at this probability or more: it adds less there."""


@dataclass(slots=True)
class AutoState(MergeState):
    """What the namespace knows, and the round under way."""

    known: Yield = field(kw_only=True)
    free: TokenTree = field(default_factory=lambda: NO_DRAFT)
    asked: Asked | None = None
    spent: float = 0.0
    """What the learned draft has taken, in autoregressive steps of the round."""
    read: int = 0
    """Tokens there were when the learned part drafted last: it reads those that came since before its next draft."""

    began: int = 0
    """Tokens there were at first."""
    drafted: tuple[float, float, bool] | None = None
    """When the draft of the round under way was made, what the round costs without it, and whether the learned part was
    asked; None where no clock is read."""
    most_read: int | None = None
    """Tokens of a text that the learned part reads before a draft, at most; None: all."""
    quiet: int | None = None
    """Rounds to come that need not decide again whether to ask the learned part; None: each decides."""
    rounds_together: BatchRests | None = None
    """Rounds since its batch began, where an answer of the batch must repeat."""
    batch_rest: BatchRest | None = None
    """That of the batch which the round under way was decided in; None: it had none."""
    steps: float | None = None
    """What the round under way takes, in autoregressive steps, as far as costs tell."""
    seen: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Tokens and steps of its last rounds."""
    rest: tuple[float, bool] | None = None
    """What the round before took after its draft, over what it costs, and whether the learned part was asked."""

    @property
    def written(self) -> int:
        return len(self.sequence.tokens) - self.began

    @property
    def pace(self) -> float:
        """Tokens per autoregressive step of its last rounds; at first that of other requests."""
        tokens, steps = self.seen
        return (KNOWN * self.known.pace + tokens) / (KNOWN + steps)

    def paced(self, tokens: int) -> None:
        """The round has committed so many tokens."""
        if self.steps is not None:
            self.seen = [FADE * known + new for known, new in zip(self.seen, (tokens, self.steps), strict=True)]
            self.known.paced(tokens, self.steps)
            self.steps = None  # a round that rests has none of its own

    @property
    def drafts_to_come(self) -> float:
        """Drafts over which the time counts that the learned part takes to read the text before its first."""
        most = self.sequence.most_tokens
        left = HORIZON if most is None else min(HORIZON, (most - len(self.sequence.tokens)) / OF_A_ROUND)
        return max(1.0, left * self.known.often)

    def undecided(self) -> bool:
        """Whether this round decides if the learned part is asked, the free part having drafted."""
        return self.quiet is None or self.known.due() or (self.quiet == 0 and first_chance(self.free) < COPIED)

    @property
    def unread(self) -> int:
        """Tokens that the learned part has yet to read, where they are more than it reads beside a draft."""
        count = len(self.sequence.tokens) - self.read
        if count <= BESIDE:
            return 0
        return count if self.most_read is None else min(count, self.most_read)


def first_chance(tree: TokenTree) -> float:
    """How likely one of the first draft tokens is accepted."""
    if not tree.tokens:
        return 0.0
    return min(1.0, sum(tree.path_acceptance_probs[node] for node in tree.children(ROOT)))
