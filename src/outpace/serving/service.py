"""Service: the models that a server offers, and the way from a request's body to a job."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import find_rule
from outpace.api.requests import ask, samples
from outpace.constraints.compiler import compiled
from outpace.constraints.grammar import DEFAULT_LIMITS, Grammar, GrammarLimits
from outpace.core.errors import BadInput
from outpace.core.future_validity import ConstraintWeighting
from outpace.core.lru import Lru
from outpace.core.names import did_you_mean
from outpace.core.turns import ROUNDS
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.engine.scheduler import Closed, QueueFull
from outpace.engine.shared_decoder import SharedDecoder
from outpace.engine.warm_up import warm_up
from outpace.methods.registry import MethodInfo, build, find, methods
from outpace.model import Model
from outpace.serving.constrained import grammar_of
from outpace.serving.errors import ApiError
from outpace.serving.fields import field_named
from outpace.serving.jobs import Job
from outpace.serving.logs import Log
from outpace.serving.metrics import LatencyBounds, Metrics
from outpace.serving.schemas import Common, Speculation
from outpace.serving.tenants import Tenant, Tenants
from outpace.traces.trace_writer import TraceLog

MOST_METHODS = 32
"""Methods that a model keeps beside the server's own; the least recently used leave first."""
MOST_TIMELINES = 2048
"""Requests whose timelines are kept."""
_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop")
_ALSO = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
_BEAMS = ("num_beams", "length_penalty", "early_stopping")


@dataclass(frozen=True, slots=True)
class Defaults:
    """How methods draft where a request does not say. ``named``: draft models, heads and a datastore, loaded.

    ``lossless``: requests that ask for a lossy rule are refused.
    """

    method: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = None
    lossless: bool = False
    named: Mapping[str, Any] = field(default_factory=dict)
    grammar_limits: GrammarLimits = DEFAULT_LIMITS
    time_limit: float | None = None


class Offered:
    """One model, and the methods that were built for it: each once for a name, its settings and a rule."""

    def __init__(self, model: Model, defaults: Defaults) -> None:
        self.model = model
        self._defaults = defaults
        with ROUNDS:
            self._context = model.context(**defaults.named)
            self._own = build(defaults.method, self._context, defaults.settings, defaults.rule)
        self._built: Lru[Any, Method] = Lru(MOST_METHODS)
        self._building = Lock()

    @property
    def id(self) -> str:
        """The name that was given for it."""
        return self.model.name

    @property
    def decoder(self) -> SharedDecoder:
        """The decoder that all its requests share."""
        return self.model.shared

    def warm_up(self) -> None:
        """Measure what the server's own method measures when it is first used."""
        warm_up(self.model.target, self._own, self.decoder.limits.max_batch)

    @property
    def default_method(self) -> str:
        """The method of requests that name none."""
        return self._own.name

    @cached_property
    def methods(self) -> list[str]:
        """Methods that have what they need: the draft models, heads and datastore that were named or are shipped."""
        return [info.name for info in methods() if self._supplied(info)]

    def _supplied(self, info: MethodInfo) -> bool:
        given = {"datastore": self._context.has_datastore, "reference": False, "gate": False}
        return all(given.get(need, True) for need in info.needs) and all(map(self._context.bindings.find, info.kinds))

    def method(self, wish: Speculation | None, *, beams: bool = False) -> Method:
        """The method of one request; for ``beams`` that names none, autoregressive decoding, as most methods draft for
        one sequence. Raises ApiError for one that cannot be built; may measure the target."""
        if beams and (wish is None or wish.method is None):
            return self._own if self._own.population is not None else self._remembered("none", {}, None)
        if wish is None:
            return self._own
        if wish.off:
            if wish.method is not None or wish.params or wish.rule is not None or wish.rule_params:
                raise ApiError("'speculation.off' and a method contradict each other", param="speculation")
            return self._remembered("none", {}, None)
        if wish.method is None and not wish.params and wish.rule is None and not wish.rule_params:
            return self._own
        name = self._defaults.method if wish.method is None else wish.method
        try:
            same = find(name) is find(self._defaults.method)
            _check_files(name, wish.params)
            settings = {**(self._defaults.settings if same else {}), **wish.params}
            found = self._remembered(name, settings, self._rule(wish))
            self._check_rule(found.rule)
            self._check_departure(found)
        except BadInput as error:
            raise ApiError(str(error), param="speculation", code="invalid_value") from error
        return found

    def _rule(self, wish: Speculation) -> AcceptanceRule | None:
        """The rule that a request names, else the server's. Raises BadInput."""
        name = self._defaults.rule if wish.rule is None else wish.rule
        if name is None:
            if wish.rule_params:
                raise BadInput("'speculation.rule_params' are settings of a rule; name it in 'speculation.rule'")
            return None
        rule = find_rule(name, wish.rule_params)
        self._check_rule(rule)
        return rule

    def _check_rule(self, rule: AcceptanceRule) -> None:
        """Raise BadInput for a lossy rule, however it was named, where the server answers losslessly only."""
        if self._defaults.lossless and not rule.lossless:
            raise BadInput(f"rule '{rule.name}' is lossy, and this server answers losslessly only; leave it out")

    def _check_departure(self, method: Method) -> None:
        """Raise BadInput for a method that is lossy whatever its rule, where the server answers losslessly only."""
        if self._defaults.lossless and method.departs:
            raise BadInput(
                f"method '{method.name}' is lossy ({method.departs}), and this server answers losslessly only"
            )

    def _remembered(self, name: str, settings: Mapping[str, Any], rule: AcceptanceRule | None) -> Method:
        key = (name, repr(sorted(settings.items())), None if rule is None else rule.described)
        with self._building:
            known = self._built.get(key)
            if known is None:
                with ROUNDS:
                    known = build(name, self._context, settings, rule)
                self._built.put(key, known)
        return known


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


class Service:
    """Everything that the routes need."""

    def __init__(
        self,
        models: Seq[Model],
        tenants: Tenants | None = None,
        defaults: Defaults | None = None,
        log: Log | None = None,
        bounds: LatencyBounds | None = None,
    ) -> None:
        self.defaults = defaults or Defaults()
        self.offered = {one.name: Offered(one, self.defaults) for one in models}
        self.tenants = tenants or Tenants()
        self.log = log or Log()
        self.metrics = Metrics({one.id: one.decoder for one in self.offered.values()}, bounds)
        self.trace: TraceLog | None = None
        """Where requests are written when they have ended, if anywhere."""
        self.ready = True
        self.started = int(time.time())
        self._jobs: Lru[str, tuple[str, Job | list[Any]]] = Lru(MOST_TIMELINES)

    def find(self, name: str) -> Offered:
        """The model of that id. Raises ApiError 404."""
        found = self.offered.get(name)
        if found is None:
            hint = did_you_mean(name, list(self.offered)) or f"this server has: {', '.join(self.offered)}"
            raise ApiError(f"there is no model '{name}'; {hint}", 404, param="model", code="model_not_found")
        return found

    def requests(self, offered: Offered, asked: Asked, prompts: Seq[Seq[int]], count: int) -> list[Request]:
        """``count`` requests for each prompt, checked, with consecutive seeds. May take a while: not for the event
        loop's thread."""
        body, model = asked.body, offered.model
        method = offered.method(body.speculation, beams=body.num_beams is not None and body.num_beams > 1)
        options = self._options(asked) | self._grammar(model, asked)
        found: list[Request] = []
        for at, ids in enumerate(prompts):
            try:
                length = self._length(offered, len(ids), asked.length)
                one = ask(model, list(ids), None, {**options, "max_new_tokens": length, "method": method}).requests[0]
                self._check_population(one, body)
                offered.decoder.scheduler.check(one)
            except BadInput as error:
                where = f"prompt {at + 1} of {len(prompts)}: " if len(prompts) > 1 else ""
                raise ApiError(f"{where}{error}", param=field_named(str(error), type(body).model_fields)) from error
            one = replace(
                one,
                tenant=asked.tenant.name,
                namespace=asked.tenant.namespace(body.speculation.namespace if body.speculation else None),
                priority=self._priority(asked),
                time_limit=self.defaults.time_limit,
                prefix_owner=asked.tenant.prefix_owner(body.shared_prefix),
                sources=body.speculation is not None and body.speculation.trace,
                repeats=body.seed is not None,
                counts=self.trace is not None,
            )
            found += samples(one, len(found), 1 if one.beams is not None else count)
        limits = offered.decoder.limits
        most = None if limits.max_queue is None else limits.max_queue + limits.max_batch
        if most is not None and len(found) > most:
            raise ApiError(
                f"the request asks for {len(found)} answers, and this server takes {most} at once; send fewer prompts, "
                "or lower n",
                param="n",
            )
        return found

    @staticmethod
    def _check_population(one: Request, body: Common) -> None:
        """Raise ApiError for a group of sequences that cannot be answered in the form that is asked for."""
        if (population := one.population) is None:
            return
        name = "speculation" if one.beams is None else "num_beams"
        if body.stream:
            raise ApiError(
                f"which of the {population.called} is the answer is known at the end: '{name}' cannot be streamed",
                param=name,
            )
        if one.beams is not None and (body.n or 1) > one.beams.num_beams:
            raise ApiError(f"'n' must be at most num_beams, {one.beams.num_beams}: a beam gives one choice", param="n")

    def admit(self, offered: Offered, tenant: Tenant, requests: Seq[Request], kind: str, n: int | None = None) -> Job:
        """Start a call; ``n``: choices of a prompt that has beams. On the event loop.

        Raises ApiError, QueueFull or Closed where it cannot be taken now.
        """
        job = Job(f"{kind}-{secrets.token_hex(12)}", offered.id, requests, offered.decoder, self.metrics, n or 1)
        tenant.admit(job.prompt_tokens)
        try:
            job.start()
        except (QueueFull, Closed):
            tenant.give_back(job.prompt_tokens)
            raise
        self._jobs.put(job.id, (tenant.name, job))
        return job

    def done(self, job: Job, tenant: Tenant, status: int) -> None:
        """A call has ended, or its caller has left: it is cancelled, counted and logged; its timeline stays."""
        job.cancel()
        generations, counted = job.generations, job.counted
        tenant.charge(sum(len(one.tokens) for one in generations))
        self._jobs.put(job.id, (tenant.name, job.timelines()))
        if self.trace is not None:
            for number, ticket in enumerate(job.tickets):
                self.trace.ended(f"{job.id}/{number}", ticket)
        texts = self.log.texts
        self.log.request(
            id=job.id,
            tenant=tenant.name or None,
            model=job.model,
            status=status,
            method=job.requests[0].method.name,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=counted.cached_tokens,
            completion_tokens=counted.tokens,
            finish_reasons=[one.finish_reason or "cancelled" for one in generations],
            ttft_ms=round(1e3 * counted.first_token_seconds / counted.answered, 3) if counted.answered else None,
            seconds=round(max((one.metrics.seconds for one in generations), default=0.0), 6),
            rounds=counted.rounds,
            drafted=counted.drafted,
            accepted=counted.accepted,
            preemptions=counted.preemptions,
            prompt=self.offered[job.model].model.tokenizer.decode(job.requests[0].prompt) if texts else None,
            answers=[one.text for one in generations] if texts else None,
        )

    def timelines(self, tenant: Tenant, job_id: str) -> list[Any]:
        """What has happened to each choice of one of the tenant's calls. Raises ApiError 404."""
        found = self._jobs.get(job_id)
        if found is None or found[0] != tenant.name:
            raise ApiError(f"there is no request '{job_id}', or it is no longer remembered", 404)
        return found[1].timelines() if isinstance(found[1], Job) else found[1]

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests and wait for those under way. Whether all have ended in time."""
        self.ready = False
        decoders = [one.decoder for one in self.offered.values()]
        for one in decoders:
            one.drain(0)  # none takes requests while another is waited for
        return min(one.drain(seconds) for one in decoders)

    def stop(self) -> None:
        """Cancel everything."""
        self.ready = False
        for one in self.offered.values():
            one.decoder.stop()

    def _grammar(self, model: Model, asked: Asked) -> dict[str, Any]:
        """The grammar of the answers, compiled. Raises ApiError for one that cannot be used, and for two."""
        given = grammar_of(asked.body)
        if given is None and asked.grammar is None:
            return {}
        if given is not None and asked.grammar is not None:
            raise ApiError(f"'{given[1]}' and tools with a grammar contradict each other; give one", param=given[1])
        grammar, name = given or (asked.grammar, "tools")
        assert grammar is not None
        limits = self.defaults.grammar_limits
        try:
            compiled(grammar, model.tokenizer, limits)
        except BadInput as error:
            raise ApiError(f"'{name}': {error}", param=name, code="invalid_value") from error
        return {"grammar": grammar, "grammar_limits": limits}

    @staticmethod
    def _options(asked: Asked) -> dict[str, Any]:
        """Options of outpace's own API. Sampling is OpenAI's where a request says nothing: temperature 1."""
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
            try:
                options["constraint_weighting"] = ConstraintWeighting.read(body.constraint_weighting)
            except BadInput as error:
                raise ApiError(f"'constraint_weighting': {error}", param="constraint_weighting") from error
        if body.logit_bias:
            try:
                options["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
            except ValueError:
                raise ApiError("'logit_bias': its keys must be token ids", param="logit_bias") from None
        if asked.logprobs is not None:
            options |= {"logprobs": True, "top_logprobs": asked.logprobs}
        if asked.references:
            options["references"] = asked.references
        return options

    @staticmethod
    def _length(offered: Offered, prompt: int, asked: int | None) -> int:
        context = offered.model.target.context_length
        room = context - prompt
        if room < 1 or (asked is not None and asked > room):
            more = f" and asks for {asked} new ones" if asked is not None else ""
            raise ApiError(
                f"the context of model '{offered.id}' has {context} tokens; the prompt has {prompt}{more}. Shorten the "
                "prompt, or ask for fewer tokens",
                param="messages" if asked is None else "max_tokens",
                code="context_length_exceeded",
            )
        return room if asked is None else asked

    @staticmethod
    def _priority(asked: Asked) -> int:
        own = asked.tenant.priority
        given = own if asked.body.priority is None else asked.body.priority
        if given > own:
            raise ApiError(f"'priority' may be {own} at most for this API key", param="priority", code="invalid_value")
        return given


def _check_files(method: str, params: Mapping[str, Any]) -> None:
    """Raise BadInput for a setting that names a file of the server: a client must not choose which are read."""
    fields = find(method).settings.model_fields
    for name in params:
        extra = fields[name].json_schema_extra if name in fields else None
        if isinstance(extra, dict) and extra.get("file"):
            raise BadInput(
                f"method '{method}', setting '{name}': it names a folder of the server, which requests do not choose"
            )
