"""Endpoint: a server with what it was found to offer, and the three questions that a certificate asks of it.

Servers with OpenAI's API differ in their extensions, so each is tried once: token ids, log-probabilities and how many,
whether an answer can be kept from ending early, and whether log-probabilities are *raw* (of the model's logits) or
*processed* (after temperature and truncation).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.certify.server_client import Answer, Prompt, Refused, Server, Token
from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean
from outpace.core.sampling import SamplingParams

_NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Some servers take other defaults from the model's files; these values switch each of them off."""
_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_LOGPROBS = (20, 5, 2)
_PROBE = "The quick brown fox jumps over the lazy dog. The quick brown"
_BEYOND_OPENAI = ("top_k", "min_p", "repetition_penalty")
_CHOICES = 16
"""Answers that are asked for at once."""
_TRIES = 5
_COUNTER = re.compile(r"^\S*spec_decode_num_(draft|accepted)_tokens_total\S*\s+(\S+)$", re.MULTILINE)
_OF_VLLM = "vllm:"

Top = Mapping[Token, float]
"""The most likely tokens of one position with their log-probabilities."""


@dataclass(slots=True)
class Endpoint:
    """``top_logprobs``: how many a position has, 0 for none; ``raw``: None where it is unknown. ``choices``: answers
    that one request can have. ``outpace``: whether it is outpace's own server."""

    server: Server
    top_logprobs: int = 0
    raw: bool | None = None
    has_ids: bool = False
    choices: int = 1
    outpace: bool = False
    never_ends: bool = False
    _fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def probe(cls, server: Server) -> Endpoint:
        """Find out what it offers. Raises BadInput for a server that does not answer, or has not that model."""
        models = server.models()
        if server.model not in models:
            hint = did_you_mean(server.model, models) or f"it has: {', '.join(models) or 'none'}"
            raise BadInput(f"{server.where} has no model '{server.model}'; {hint}")
        found = cls(server)
        fingerprint = str(server.raw(_PROBE, 1, temperature=0.0).get("system_fingerprint") or "")
        found.outpace = fingerprint.startswith("outpace-")
        if found._takes(_NEUTRAL) is not None:
            found._fields |= _NEUTRAL
        answer = found._takes({"ignore_eos": True})
        found.never_ends = answer is not None
        if (answer := found._takes(_IDS)) is not None and answer.prompt is not None:
            found.has_ids = True
            found._fields |= _IDS
        for number in _LOGPROBS:
            answer = found._takes({"logprobs": number})
            if answer is not None and answer.top:
                found.top_logprobs = number
                break
        found.raw = found._is_raw() if found.top_logprobs else None
        try:
            found.choices = len(server.complete(_PROBE, 1, _CHOICES, temperature=1.0, **found._fields))
        except Refused:
            found.choices = 1
        return found

    def _takes(self, more: Mapping[str, Any]) -> Answer | None:
        try:
            return self.server.complete(_PROBE, 1, **{"temperature": 0.0, **self._fields, **more})[0]
        except Refused as error:
            if error.status >= 500:
                raise
            return None

    def _is_raw(self) -> bool | None:
        """Whether log-probabilities stay as they are at another temperature. None for a single possible token."""
        spreads = []
        for temperature in (1.0, 0.5):
            top = self.next_token(_PROBE, temperature)
            spreads.append(max(top.values()) - min(top.values()))
        if not 0.01 < spreads[0] < 100.0:
            return None
        return abs(spreads[1] / spreads[0] - 1.0) < 0.5

    def greedy(self, prompt: Prompt, length: int) -> Answer:
        """The answer at temperature 0, where processed log-probabilities show nothing: only raw ones are asked for."""
        return self.server.complete(prompt, length, **self._all({"temperature": 0.0}, logprobs=self.raw is not False))[
            0
        ]

    def sample(
        self, prompt: Prompt, length: int, count: int, params: SamplingParams, seed: int | None, *, logprobs: bool
    ) -> list[Answer]:
        """At least ``count`` sampled answers. ``seed``: of the first request; None sends none."""
        found: list[Answer] = []
        fields = self._all(_sampling(params), logprobs=logprobs or not self.has_ids)
        while len(found) < count:
            more = {} if seed is None else {"seed": seed + len(found)}
            wanted = min(self.choices, count - len(found))
            got = self.server.complete(prompt, length, wanted, **{**fields, **more})
            if not got:
                raise BadInput(f"{self.server.where} sent an answer without choices")
            found += got
        return found

    def formatted(
        self, prompt: Prompt, length: int, count: int, form: dict[str, Any], params: SamplingParams, seed: int | None
    ) -> list[str]:
        """Sampled answers under a ``response_format``, of those that ended."""
        found: list[Answer] = []
        fields = {**self._fields, **_sampling(params), "response_format": form}
        while len(found) < count:
            more = {} if seed is None else {"seed": seed + len(found)}
            found += self.server.complete(prompt, length, min(self.choices, count - len(found)), **fields, **more)
        return [one.text for one in found if one.ended]

    def next_token(self, prompt: Prompt, temperature: float = 1.0) -> Top:
        """Log-probabilities of the token after ``prompt``, from a request for one token: nothing is drafted there.

        ``temperature``: that processed ones are of.
        """
        for _ in range(_TRIES):
            answer = self.server.complete(prompt, 1, **self._all({"temperature": temperature}, logprobs=True))[0]
            if answer.top:  # some servers have none for a token that ends the answer
                return answer.top[0]
        raise BadInput(f"{self.server.where} left out the log-probabilities of an answer")

    def _all(self, chosen: Mapping[str, Any], *, logprobs: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"top_p": 1.0, **self._fields, **chosen}
        if self.never_ends:
            fields["ignore_eos"] = True
        if logprobs and self.top_logprobs:
            fields["logprobs"] = self.top_logprobs
        return fields

    @property
    def names_tokens(self) -> type[int] | type[str] | None:
        """How answers name tokens: by id, by text (in log-probabilities), or not at all."""
        return int if self.has_ids else str if self.top_logprobs else None

    def speculated(self) -> tuple[int, int] | None:
        """Draft tokens, and those accepted, since the server began; None where it does not count them.

        vLLM has these counters only where it speculates.
        """
        counts = {"draft": 0.0, "accepted": 0.0}
        text = self.server.counters()
        lines = _COUNTER.findall(text)
        if not lines and _OF_VLLM in text:
            return 0, 0
        for name, number in lines:
            counts[name] += float(number)
        return (int(counts["draft"]), int(counts["accepted"])) if lines else None


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The fields of a request; those beyond OpenAI's only where they change anything."""
    default = SamplingParams()
    names = ("presence_penalty", "frequency_penalty", *_BEYOND_OPENAI)
    found: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    found |= {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return found


def distance(one: Top, other: Top, temperature: float = 1.0) -> float:
    """Total variation distance of two distributions that are known at their most likely tokens.

    Tokens that only one of them lists, and the rest, count as one outcome. At another temperature than 1, which the
    rest is not known at, the tokens that both list are compared among themselves.
    """
    common = [token for token in one if token in other]
    if not common:
        return 1.0
    rows = []
    for row in (one, other):
        known = [math.exp(row[token] / temperature) for token in common]
        if temperature != 1.0:
            total = sum(known)
            rows.append([value / total if total else 0.0 for value in known])
        else:
            rows.append([*known, max(0.0, 1.0 - sum(known))])
    found = 0.5 * sum(abs(mine - theirs) for mine, theirs in zip(*rows, strict=True))
    return 1.0 if math.isnan(found) else found


def likeliest(top: Top, count: int) -> list[Token]:
    """The ``count`` most likely tokens, the best first."""
    return sorted(top, key=lambda token: -top[token])[:count]


def units(answers: Sequence[Answer], *, by_text: bool) -> list[list[Token]]:
    """What an answer is compared by: its tokens, or the characters of its text; then whether it ended."""
    found: list[list[Token]] = []
    for one in answers:
        own: list[Token] = list(one.text) if by_text else list(one.tokens)
        found.append([*own, "<end>"] if one.ended else own)
    return found
