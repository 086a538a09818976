"""``copy-decode``: an edited text as a program of copied and new lines (Copy-as-Decode).

The answer is held to the programs of :mod:`outpace.constraints.copy_program` over the text that is edited: the
references, or the last fenced block of the prompt. The model chooses lines and writes new ones. What a program copies
is committed by one forward pass over the span, whatever the target's probabilities. Where the program leaves a choice,
in new lines above all, ``parts`` draft, and the target judges them as in any method. The answer that is shown is the
edited text, without directives.

Lossy: a model under the automaton answers otherwise than without it, and nothing bounds by how much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.methods.combination.cascade import Cascade
from outpace.methods.combination.parts import CombinationSettings, build_parts
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from outpace.constraints.copy_program import CopyProgram
    from outpace.engine.request import Request
    from outpace.models.base import ChatTokenizer

_DEPARTS = "copy-decode (answers are programs of copied and new lines; no bound)"
_FENCED = re.compile(r"^(`{3,})[^\n`]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_SPECIAL = "\ud800"
"""Marks special tokens: half of a surrogate pair, which no text holds."""
_CONFIDENCE = 0.15
"""Of several parts the first drafts whose likeliest token was accepted so often, as in ``cascade``."""
_TOLD = (
    "\n\nThe lines of the text, with their numbers:\n"
    "{lines}\n"
    'Write the edited text as steps, not as a whole. "@@ copy(FIRST-LAST)" takes lines FIRST to LAST of the text '
    'unchanged. "@@ generate" is followed by the new or changed lines. Lines that no step has are deleted. For '
    "example, steps that rename one variable in lines 8 and 9 of a text of 40 lines:\n"
    "@@ copy(1-7)\n(lines 1 to 7)\n@@ generate\n(the new lines 8 and 9)\n@@ copy(10-40)\n(lines 10 to 40)"
)


class CopyDecodeSettings(CombinationSettings):
    """Settings of ``copy-decode``."""

    parts: tuple[str, ...] = Field(
        ("sam",),
        max_length=16,
        description="methods that draft where the program leaves a choice, new lines above all; of several the first "
        "that is confident, [] for none",
    )
    max_span: int = Field(512, ge=1, le=2048, description="tokens of a copied span that one forward pass commits")
    ordered: bool = Field(
        True, description="copied spans follow each other in the text's order; false: lines may be moved and repeated"
    )
    numbered: bool = Field(
        True, description="append the text's lines with their numbers, and how programs are written, to the prompt"
    )


class ForcedSpans(Drafter[DraftState]):
    """Drafts the whole of what every answer goes on with under the request's constraint; nothing where they differ."""

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        sampler = state.sequence.sampler
        return TokenTree.chain(sampler.forced(sampler.place)[: min(budget.depth, budget.max_nodes)])

    def observe(self, state: DraftState, verdict: Verdict) -> None:
        """Nothing is learned: the automaton knows."""


class SpanLengths(Controller):
    """A span may have ``most`` tokens, in a batch too: none is drafted in vain. Parts have their own lengths."""

    def __init__(self, most: int, parts: Seq[Controller]) -> None:
        self.most, self.parts = most, tuple(parts)
        self._span = Budget(most, most)

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        parts = (part.budget(metrics, batch, repeatable) for part in self.parts)
        return Budget(self.most, self.most, parts=(self._span, *parts))


def edited_text(request: Request, tokenizer: ChatTokenizer) -> str:
    """The text that a request is to edit: its references, or the last fenced block of its prompt.

    Raises BadInput where there is neither, and for a block with a special token, of which no copy would have the text.
    """
    if request.reference_texts:
        *first, last = request.reference_texts
        return "".join(text if not text or text.endswith("\n") else f"{text}\n" for text in first) + last
    blocks = _FENCED.findall(_with_special_tokens(request.prompt, tokenizer))
    if not blocks:
        raise BadInput(
            "copy-decode edits a text: give it with --reference FILE (references= in Python), or in the prompt between "
            "lines of ```"
        )
    text = str(blocks[-1][1])
    if found := re.search(f"{_SPECIAL}(.*)", text):
        raise BadInput(
            f"the last block between lines of ``` in the prompt holds the special token {found[1]}, which cannot be "
            "copied; take it out, close the block before it, or give the text with --reference FILE (references= in "
            "Python)"
        )
    return text


def _with_special_tokens(tokens: Seq[int], tokenizer: ChatTokenizer) -> str:
    """The text of tokens, in which each special one stands in a line of its own, marked."""

    def shown(special: bool, run: list[int]) -> str:
        if not special:
            return tokenizer.decode(run)
        return "".join(f"\n{_SPECIAL}{tokenizer.token_text(token)}\n" for token in run)

    runs = groupby(tokens, lambda token: tokenizer.token_bytes(token) is None)
    return "".join(shown(special, list(run)) for special, run in runs)


def _preparation(tokenizer: ChatTokenizer, settings: CopyDecodeSettings) -> Callable[[Request], Request]:
    def prepare(request: Request) -> Request:
        from outpace.constraints.copy_program import CopyProgram

        if request.params.constraint is not None:
            raise BadInput("copy-decode holds answers to a grammar of its own; leave out the grammar, or the method")
        program = CopyProgram(edited_text(request, tokenizer), tokenizer, ordered=settings.ordered)
        prompt = request.prompt
        if settings.numbered:
            prompt = _with(prompt, _TOLD.format(lines=program.numbered()), program)
        return replace(request, prompt=prompt, params=replace(request.params, constraint=program))

    return prepare


def _with(prompt: tuple[int, ...], more: str, program: CopyProgram) -> tuple[int, ...]:
    """A prompt that says ``more``: at the end of the last message, or of a text that is no conversation."""
    end = _end_of_message(program.tokenizer)
    if not end or prompt[-len(end) :] != end:
        return (*prompt, *program.spelled(f"{more}\n"))
    return (*prompt[: -len(end)], *program.spelled(more), *end)


def _end_of_message(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The tokens that the chat template writes behind the last message; none where there is no template."""
    if not tokenizer.has_chat_template:
        return ()
    one, other = (tokenizer.chat([{"role": "user", "content": text}]) for text in ("a", "b"))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
    return tuple(token for token, _ in same)[::-1]


@register(
    "copy-decode",
    family="model-free",
    paper="Copy-as-Decode: Grammar-Constrained Parallel Prefill for LLM Editing",
    lossless=False,
    summary="Writes an edited text as a program: copied spans cost one forward pass each, new lines are drafted.",
    when_to_use="Edits that leave most of a text as it is, by a model that writes such programs; small ones do not.",
    aliases=("copydec", "copy-as-decode"),
    needs=("reference",),
)
def build(context: Context, settings: CopyDecodeSettings) -> Parts:
    """Chains of what the program forces; where it forces nothing, the drafts of the parts."""
    if context.tokenizer is None:
        raise BadInput("method 'copy-decode' needs the target's tokenizer")
    built = build_parts(context, settings)
    prepare = _preparation(context.tokenizer, settings)
    drafter = Cascade((ForcedSpans(), *built.drafters), ("copy-decode", *built.names), _CONFIDENCE)
    return Parts(drafter, SpanLengths(settings.max_span, built.controllers), None, prepare, _DEPARTS)
