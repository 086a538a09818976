"""Which requests a decoder can honour."""

from __future__ import annotations

from outpace.acceptance.base import AcceptanceRule
from outpace.core.constraint import ShowsText
from outpace.core.errors import BadInput
from outpace.core.future_validity import NO_GRAMMAR, ConstraintWeighting
from outpace.core.sampling import check_logit_bias
from outpace.core.text import Tokenizer
from outpace.engine.populations.group import check_group
from outpace.engine.request import Request, check_references
from outpace.targets.base import Target


def check_request(request: Request, target: Target, tokenizer: Tokenizer | None) -> AcceptanceRule:
    """The rule that will judge its drafts. Raises BadInput for a request that cannot be honoured.

    ``request``: as its method prepared it.
    """
    if request.max_new_tokens < 1:
        raise BadInput(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    if request.stop_strings and tokenizer is None:
        raise BadInput("stop strings need a tokenizer; load the model with one, or use stop_ids")
    if "" in request.stop_strings:
        raise BadInput("an empty stop string would stop everything; leave it out")
    target.check_prompt(request.prompt)
    check_logit_bias(request.params, target.vocab_size)
    check_references(request.references)
    _check_stops(request, tokenizer)
    if request.params.constraint is None and ConstraintWeighting.read(request.params.constraint_weighting).weighs:
        raise BadInput(NO_GRAMMAR)
    if (population := request.population) is not None:
        if request.beams is not None and request.method.population is None and request.method.may_draft:
            raise BadInput(
                f"method '{request.method.name}' drafts for one sequence, not for {population.size} beams; leave "
                "the method out, or take one of the family 'population' (outpace methods)"
            )
        if request.method.population is None and not request.method.rule.lossless:
            raise BadInput(
                f"rule '{request.method.rule.name}' judges draft tokens, and {population.called} without a draft have "
                "none; leave out rule"
            )
        check_group(request, population, target)
    return request.method.rule_for(request.params)


def _check_stops(request: Request, tokenizer: Tokenizer | None) -> None:
    """Raise BadInput for a stop string in the text that every answer under the grammar begins with."""
    constraint = request.params.constraint
    if constraint is None or isinstance(constraint, ShowsText) or not request.stop_strings or tokenizer is None:
        return  # what a method's own programs begin with is not shown
    beginning = tokenizer.decode(constraint.begin().forced())
    for stop in request.stop_strings:
        if stop in beginning:
            raise BadInput(
                f"the stop string {stop!r} is in the text that the grammar demands, so no answer could be "
                "complete; leave it out, or change the grammar"
            )
