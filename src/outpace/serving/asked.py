"""What a call asks for: from the fields of its body to options of outpace's own API."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from outpace.constraints.compiler import compiled
from outpace.constraints.grammar import Grammar, GrammarLimits
from outpace.core.errors import BadInput
from outpace.core.future_validity import ConstraintWeighting
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.model import Model
from outpace.serving.constrained import grammar_of
from outpace.serving.errors import ApiError
from outpace.serving.offered import Offered
from outpace.serving.schemas import ChatRequest, Common
from outpace.serving.tenants import Tenant

_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop")
_ALSO = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,8})")
_LIMITS = ("max_tokens", "max_completion_tokens")
_BEAMS = ("num_beams", "length_penalty", "early_stopping")
_MOST_TOPK = 64
"""Tokens behind each node that a request's weights may look at: every round scores them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What all requests of a call have in common. ``length``: most new tokens; None: as many as fit.

    ``ends_with``: a stop text beside the caller's own ("": none). ``grammar``: of the answers, where tools demand one.
    """

    tenant: Tenant
    body: Common
    length: int | None
    logprobs: int | None = None
    references: tuple[str, ...] = ()
    ends_with: str = ""
    grammar: Grammar | None = None


def options_of(asked: Asked, most_nodes: int) -> dict[str, Any]:
    """Options of outpace's own API. Sampling is OpenAI's where a request says nothing: temperature 1.

    ``most_nodes``: what a request may score for the weights of its tokens. Raises ApiError for what is out of range.
    """
    body = asked.body
    options = {name: getattr(body, name) for name in (*_OPENAI, *_ALSO, *_BEAMS) if getattr(body, name) is not None}
    options.setdefault("temperature", 1.0)
    if options["temperature"] > 0:  # one for all prompts; the answer reports it
        options.setdefault("seed", secrets.randbits(32))
    if isinstance(body.stop, str) and not body.stop:
        del options["stop"]
    if asked.ends_with:
        own = options.get("stop", [])
        options["stop"] = [*([own] if isinstance(own, str) else own), asked.ends_with]
    if body.constraint_weighting is not None:
        options["constraint_weighting"] = _weighting(body.constraint_weighting, most_nodes)
    if body.logit_bias:
        if not all(_TOKEN_ID.fullmatch(token) for token in body.logit_bias):
            raise ApiError("'logit_bias': its keys must be token ids, such as \"42\"", param="logit_bias")
        options["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if asked.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": asked.logprobs}
    if asked.references:
        options["references"] = asked.references
    return options


def _weighting(given: str, most_nodes: int) -> ConstraintWeighting:
    name = "constraint_weighting"
    try:
        found = ConstraintWeighting.read(given)
    except BadInput as error:
        raise ApiError(f"'{name}': {error}", param=name) from error
    if found.max_nodes > most_nodes:
        raise ApiError(
            f"'{name}': max_nodes is {found.max_nodes:,}, and this server scores {most_nodes:,} for a request at most; "
            "lower it",
            param=name,
        )
    if found.topk > _MOST_TOPK:
        raise ApiError(
            f"'{name}': topk is {found.topk:,}, and this server looks at {_MOST_TOPK} tokens behind another at most; "
            "lower it",
            param=name,
        )
    return found


def grammar_options(model: Model, asked: Asked, limits: GrammarLimits) -> dict[str, Any]:
    """The grammar of the answers, compiled. Raises ApiError for one that cannot be used, and for two."""
    given = grammar_of(asked.body)
    if given is None and asked.grammar is None:
        return {}
    if given is not None and asked.grammar is not None:
        raise ApiError(f"'{given[1]}' and tools with a grammar contradict each other; give one", param=given[1])
    grammar, name = given or (asked.grammar, "tools")
    assert grammar is not None
    try:
        compiled(grammar, model.tokenizer, limits)
    except BadInput as error:
        raise ApiError(f"'{name}': {error}", param=name, code="invalid_value") from error
    return {"grammar": grammar, "grammar_limits": limits}


def length_of(offered: Offered, prompt: int, asked: Asked) -> int:
    """New tokens of an answer to a prompt of so many tokens. Raises ApiError where they do not fit the context."""
    context = offered.model.target.context_length
    room = context - prompt
    has = f"the context of model '{offered.id}' has {context} tokens, and the prompt has {prompt}"
    body, code = asked.body, "context_length_exceeded"
    if room < 1:
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise ApiError(f"{has}, which leaves no room for an answer. Shorten the prompt", param=param, code=code)
    limit = limit_given(body)
    if limit is not None and asked.length is not None and asked.length > room:
        raise ApiError(
            f"{has}. '{limit}' asks for {asked.length} new ones, of which {room} fit: lower it, or shorten the prompt",
            param=limit,
            code=code,
        )
    return room if asked.length is None else min(asked.length, room)


def limit_given(body: Common) -> str | None:
    """The field by which a call limits the new tokens, if it does."""
    return next((one for one in _LIMITS if getattr(body, one, None) is not None), None)


def priority_of(asked: Asked) -> int:
    """The priority of a call. Raises ApiError for one above the tenant's."""
    own = asked.tenant.priority
    given = own if asked.body.priority is None else asked.body.priority
    if given > own:
        raise ApiError(f"'priority' may be {own} at most for this API key", param="priority", code="invalid_value")
    return given


def check_best_of(method: Method, count: int, body: Common) -> None:
    """Raise ApiError where ``count`` answers cannot be decoded for the best ``n`` of them."""
    if count <= (body.n or 1):
        return
    if method.population is not None:
        raise ApiError(
            f"'best_of' chooses among samples, and method '{method.name}' decodes a group of sequences: leave it out",
            param="best_of",
        )
    if body.temperature == 0:
        raise ApiError(
            f"'best_of' at temperature 0 would decode one answer {count} times: give a temperature, or leave it out",
            param="best_of",
        )


def check_population(one: Request, body: Common) -> None:
    """Raise ApiError for a group of sequences that cannot be answered in the form that is asked for."""
    if (population := one.population) is None:
        return
    name = "speculation" if body.num_beams is None else "num_beams"
    if body.stream:
        raise ApiError(
            f"which of the {population.called} is the answer is known at the end: '{name}' cannot be streamed",
            param=name,
        )
    if one.beams is not None and (body.n or 1) > one.beams.num_beams:
        raise ApiError(f"'n' must be at most num_beams, {one.beams.num_beams}: a beam gives one choice", param="n")
