"""``copy-decode``: an edited text as a program of copied and new lines (Copy-as-Decode).

The answer is held to the programs of :mod:`outpace.constraints.copy_program` over the text that is edited: the
references, or the last fenced block of the prompt. The model chooses lines and writes new ones. What a program copies
is committed by one forward pass over the span, whatever the target's probabilities. The answer that is shown is the
edited text, without directives.

Lossy: a model under the automaton answers otherwise than without it, and nothing bounds by how much.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.core.validation import StrictModel
from outpace.drafting.base import Drafter, DraftState
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence

if TYPE_CHECKING:
    from outpace.engine.request import Request
    from outpace.models.base import ChatTokenizer

_DEPARTS = "copy-decode (answers are programs of copied and new lines; no bound)"
_FENCED = re.compile(r"^(`{3,})[^\n`]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_TOLD = (
    "The lines of the text, with their numbers:\n"
    "{lines}"
    'The edited text as a program. "@@ copy(2-5)" stands for lines 2 to 5 of the text, unchanged. Changed and new '
    'lines stand behind "@@ generate". Nothing else is written.\n'
)


class CopyDecodeSettings(StrictModel):
    """Settings of ``copy-decode``."""

    max_span: int = Field(512, ge=1, le=2048, description="tokens of a copied span that one forward pass commits")
    numbered: bool = Field(
        True, description="append the text's lines with their numbers, and how programs are written, to the prompt"
    )


class ForcedSpans(Drafter[DraftState]):
    """Drafts the whole of what every answer goes on with under the request's constraint; nothing where they differ."""

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        place = state.sequence.sampler.place
        if place is None or isinstance(place, BadInput):
            return TokenTree()
        return TokenTree.chain(place.forced()[: min(budget.depth, budget.max_nodes)])

    def observe(self, state: DraftState, verdict: Verdict) -> None:
        """Nothing is learned: the automaton knows."""


def edited_text(request: Request, tokenizer: ChatTokenizer) -> str:
    """The text that a request is to edit: its references, or the last fenced block of its prompt.

    Raises BadInput where there is neither.
    """
    if request.references:
        return "".join(tokenizer.decode(one) for one in request.references)
    blocks = _FENCED.findall(tokenizer.decode(request.prompt))
    if not blocks:
        raise BadInput(
            "copy-decode edits a text: give it with --reference FILE (references= in Python), or in the prompt between "
            "lines of ```"
        )
    return str(blocks[-1][1])


def _preparation(tokenizer: ChatTokenizer, *, numbered: bool) -> Callable[[Request], Request]:
    def prepare(request: Request) -> Request:
        from outpace.constraints.copy_program import CopyProgram

        if request.params.constraint is not None:
            raise BadInput("copy-decode holds answers to a grammar of its own; leave out the grammar, or the method")
        program = CopyProgram(edited_text(request, tokenizer), tokenizer)
        told = program.spelled(_TOLD.format(lines=program.numbered())) if numbered else ()
        return replace(request, prompt=(*request.prompt, *told), params=replace(request.params, constraint=program))

    return prepare


@register(
    "copy-decode",
    family="model-free",
    paper="Copy-as-Decode: Grammar-Constrained Parallel Prefill for LLM Editing",
    lossless=False,
    summary="Writes an edited text as a program: copied spans cost one forward pass each.",
    when_to_use="Edits that leave most of a text as it is, by a model that writes such programs; small ones do not.",
    aliases=("copydec", "copy-as-decode"),
    needs=("reference",),
)
def build(context: Context, settings: CopyDecodeSettings) -> Parts:
    """Chains of what the program forces."""
    if context.tokenizer is None:
        raise BadInput("method 'copy-decode' needs the target's tokenizer")
    prepare = _preparation(context.tokenizer, numbered=settings.numbered)
    return Parts(ForcedSpans(), Fixed(settings.max_span, max_nodes=settings.max_span), None, prepare, _DEPARTS)
