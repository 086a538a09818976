"""``outpace generate --explain``: which tokens were drafted, accepted and rejected, round by round."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text

from outpace.core.text import TextStream
from outpace.engine.request import Generation, RoundTrace as Round
from outpace.models.base import ChatTokenizer

ACCEPTED, BONUS, CORRECTION, PLAIN, REJECTED = "accepted", "bonus", "recovered", "plain", "rejected"
STYLE = {ACCEPTED: "green", BONUS: "bold cyan", CORRECTION: "yellow", PLAIN: "", REJECTED: "red"}
# Signs beside the colours: the same picture without a colour terminal, and for eyes that do not tell red from green.
SIGN = {ACCEPTED: "✓", BONUS: "+", CORRECTION: "→", PLAIN: "·", REJECTED: "✗"}
_MEANING = {
    ACCEPTED: "drafted, and accepted by the target",
    BONUS: "the target's token after a fully accepted draft",
    CORRECTION: "the target's token in place of a rejected one",
    PLAIN: "the target's token in a round without a draft",
    REJECTED: "drafted, and rejected",
}


def kinds(turn: Round) -> list[str]:
    """What each committed token of a round was, in order."""
    if not len(turn.tree):
        own = PLAIN
    else:
        leaf = not turn.tree.children(turn.path[-1] if turn.path else -1)
        own = BONUS if leaf else CORRECTION
    return [ACCEPTED if depth < len(turn.path) else own for depth in range(len(turn.committed))]


class Explainer:
    """Prints the rounds of one generation as they happen, then the coloured answer and a summary."""

    def __init__(self, console: Console, tokenizer: ChatTokenizer) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._shown = 0

    def legend(self) -> None:
        for kind, meaning in _MEANING.items():
            line = Text().append(f"{SIGN[kind]} {kind:<12}", style=STYLE[kind])
            self._console.print(line.append(meaning, style="dim"))
        self._console.print("\n[dim]round  accepted")

    def update(self, generation: Generation) -> None:
        for turn in generation.rounds[self._shown :]:
            self._shown += 1
            self._console.print(self._line(turn), no_wrap=True, overflow="ellipsis", crop=True)

    def _line(self, turn: Round) -> Text:
        accepted = min(len(turn.path), len(turn.committed))
        count = f"{accepted:>2} of {len(turn.tree):<2}" if len(turn.tree) else "   -   "
        line = Text().append(f"{self._shown:>5}  {count}   ", style="dim")
        spans: list[tuple[str, list[int]]] = [(ACCEPTED, [turn.tree.tokens[node] for node in turn.path[:accepted]])]
        for kind, token in zip(kinds(turn), turn.committed, strict=True):
            if kind != ACCEPTED:
                spans.append((kind, [token]))
        path = set(turn.path)
        spans.append((REJECTED, [token for node, token in enumerate(turn.tree.tokens) if node not in path]))
        for kind, tokens in spans:
            if tokens:
                line.append(f"{SIGN[kind]} ", style="dim")
                for number, token in enumerate(tokens):
                    line.append("│" if number else "", style="dim")
                    line.append(self._show(token), style=STYLE[kind])
                line.append("  ")
        line.rstrip()
        return line

    def _show(self, token: int) -> str:
        """A token on one line of a terminal."""
        text = self._tokenizer.token_text(token).replace("\n", "↵").replace("\t", "⇥")
        return "".join(char if char.isprintable() else "�" for char in text) or "�"

    def answer(self, generation: Generation) -> None:
        """The answer, each token in the colour of what it was."""
        stops = generation.request.stop_strings
        stream = TextStream(self._tokenizer, stops)
        answer, kind, left = Text(), PLAIN, len(generation.tokens)
        for turn in generation.rounds:
            for kind, token in zip(kinds(turn), turn.committed, strict=True):
                if left > 0:  # a stop token is committed, but no part of the answer
                    left -= 1
                    answer.append(stream.push(token), style=STYLE[kind])
        answer.append(stream.finish(), style=STYLE[kind])
        self._console.print()
        self._console.print(answer)
        self._console.print()

    def summary(self, generation: Generation) -> None:
        metrics = generation.metrics
        if not metrics.rounds:
            return
        own = Counter(kind for turn in generation.rounds for kind in kinds(turn) if kind != ACCEPTED)
        ending = " (the end included)" if metrics.committed > metrics.tokens else ""
        text = Text(f"{metrics.committed} tokens{ending} in {metrics.rounds} rounds, ")
        text.append(f"{metrics.committed / metrics.rounds:.2f} per round", style="bold").append(". ")
        if metrics.drafted:
            share = metrics.accepted / metrics.drafted
            text.append(f"{metrics.accepted} of {metrics.drafted} drafted tokens accepted ({share:.0%}). ")
        owned = [f"{own[kind]} {kind}" for kind in (BONUS, CORRECTION, PLAIN) if own[kind]]
        text.append(f"From the target itself: {', '.join(owned)}.")
        self._console.print(text)
        if metrics.parts:
            shown = ", ".join(f"{name} in {count}" for name, count in metrics.parts.items())
            self._console.print(Text(f"Drafted by: {shown} of {metrics.rounds} rounds.", style="dim"))
        depths = metrics.figures()["per_position_acceptance"]
        if depths:
            shown = "  ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(depths[:10], start=1))
            self._console.print(
                Text(f"Share of rounds in which the draft token was accepted, by depth:  {shown}", style="dim")
            )
