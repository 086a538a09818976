"""Service: what the routes need: the models that are offered, the way from a call to a job, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from outpace.api.requests import ask, samples
from outpace.core.errors import BadInput, shortened
from outpace.core.lru import Lru
from outpace.core.names import LONGEST, did_you_mean
from outpace.engine.request import Request
from outpace.engine.scheduler import Closed, DeadlineExceeded, QueueFull
from outpace.model import Model
from outpace.serving.asked import (
    Asked,
    check_best_of,
    check_population,
    grammar_options,
    length_of,
    options_of,
    priority_of,
)
from outpace.serving.errors import ApiError
from outpace.serving.fields import field_named
from outpace.serving.jobs import Job, Timeline, shown
from outpace.serving.logs import Log
from outpace.serving.metrics import LatencyBounds, Metrics
from outpace.serving.offered import Defaults, Offered
from outpace.serving.tenants import Tenant, Tenants
from outpace.traces.trace_writer import TraceLog

MOST_TIMELINES, MOST_CHOICES = 2048, 8192
"""Calls, and their choices, whose timelines are kept."""


def _check_prediction(one: Request, model: Model) -> None:
    """Raise BadInput for a text to copy from that no answer could be: its index is made for each choice while others
    wait for their next token."""
    count, room = sum(map(len, one.references)), model.target.context_length
    if count > room:
        raise BadInput(f"'prediction' has {count:,} tokens, and no answer is longer than the context of {room:,}")


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
        self._jobs: Lru[str, tuple[str, Job | list[Timeline]]] = Lru(MOST_TIMELINES)

    def find(self, name: str) -> Offered:
        """The model of that id. Raises ApiError 404."""
        found = self.offered.get(name)
        if found is None:
            hint = did_you_mean(name, list(self.offered)) or f"this server has: {', '.join(self.offered)}"
            shown = shortened(name, LONGEST)
            raise ApiError(f"there is no model '{shown}'; {hint}", 404, param="model", code="model_not_found")
        return found

    @asynccontextmanager
    async def preparation(self, tenant: Tenant, model: str) -> AsyncIterator[None]:
        """While a call is prepared, on the event loop: it counts as one that waits, and its time limit runs.

        Raises ApiError, QueueFull or Closed for one that would be refused now whatever it asks for, before its prompt
        is read, and DeadlineExceeded.
        """
        tenant.check()
        preparing = Counter[str]()
        if (offered := self.offered.get(model)) is not None:
            preparing = offered.preparing
            offered.decoder.check_room(tenant.name, preparing)
        preparing[tenant.name] += 1
        limit = self.defaults.time_limit
        try:
            async with asyncio.timeout(limit) as timeout:
                yield
        except TimeoutError:
            if limit is None or not timeout.expired():
                raise
            raise DeadlineExceeded(limit) from None
        finally:
            preparing[tenant.name] -= 1
            if not preparing[tenant.name]:
                del preparing[tenant.name]

    def requests(self, offered: Offered, asked: Asked, prompts: Seq[Seq[int]], count: int) -> list[Request]:
        """``count`` requests for each prompt, checked, with consecutive seeds. May take a while: not for the event
        loop's thread."""
        body, model = asked.body, offered.model
        method = offered.method(body.speculation, beams=body.num_beams is not None and body.num_beams > 1)
        options = options_of(asked, self.defaults.max_validity_nodes)
        options |= grammar_options(model, asked, self.defaults.grammar_limits)
        check_best_of(method, count, body)
        found: list[Request] = []
        for at, ids in enumerate(prompts):
            try:
                length = length_of(offered, len(ids), asked)
                one = ask(model, list(ids), None, {**options, "max_new_tokens": length, "method": method}).requests[0]
                check_population(one, body)
                _check_prediction(one, model)
                offered.decoder.scheduler.check(one)
            except BadInput as error:
                where = f"prompt {at + 1} of {len(prompts)}: " if len(prompts) > 1 else ""
                raise ApiError(f"{where}{error}", param=field_named(str(error), type(body).model_fields)) from error
            one = replace(
                one,
                tenant=asked.tenant.name,
                namespace=asked.tenant.namespace(body.speculation.namespace if body.speculation else None),
                priority=priority_of(asked),
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
        tenant.charge(job.completion_tokens)
        self._jobs.put(job.id, (tenant.name, job.timelines()))
        self._forget_old()
        if self.trace is not None:
            try:
                for number, ticket in enumerate(job.tickets):
                    self.trace.ended(f"{job.id}/{number}", ticket)
            except OSError as error:  # the disk is full, say: answers are worth more than their trace
                self.log.failure("the trace ends here", error)
                trace, self.trace = self.trace, None
                with contextlib.suppress(OSError):
                    trace.close()
        texts = self.log.texts
        self.log.request(
            id=job.id,
            tenant=tenant.name or None,
            model=job.model,
            status=status,
            method=job.requests[0].method.name,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=counted.cached_tokens,
            completion_tokens=job.completion_tokens,
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
        return shown(found[1].timelines() if isinstance(found[1], Job) else found[1])

    def _forget_old(self) -> None:
        """Forget the timelines of the calls that ended first, where there are too many choices."""
        kept = [(name, len(one)) for name, (_, one) in self._jobs.items() if not isinstance(one, Job)]
        total = sum(count for _, count in kept)
        for name, count in kept[:-1]:
            if total <= MOST_CHOICES:
                return
            self._jobs.drop(name)
            total -= count

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
