"""SharedDecoder: one decoder for all threads and event loops that ask a model at the same time.

While there is anything to decode, one thread runs the steps that the scheduler plans; it starts with the first request
and ends with the last. Requests of all callers join its decoder, so that they share the target's forwards. Callers
wait elsewhere: their listeners are called after every step, on that thread, and must not block.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from weakref import WeakSet

import torch

from outpace.core.errors import BadInput
from outpace.core.text import Tokenizer
from outpace.core.turns import ROUNDS
from outpace.engine.decoder import Decoder
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.request import Generation, Request
from outpace.engine.scheduler import NOBODY, WHOLE_CHUNK, Closed, DeadlineExceeded, Limits, Plan, Scheduler
from outpace.targets.base import Target


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way through a shared decoder.

    ``listen`` is called on the decoding thread with the ticket and, after every round, the text that it released
    (often ""); with None at the end.
    """

    request: Request
    listen: Callable[[Ticket, str | None], None]
    generation: Generation | None = None
    """Set when its turn has come."""
    error: BaseException | None = None
    cancelled: bool = False
    arrived: float = 0.0
    """When it began to wait, by the scheduler's clock."""
    timeline: list[tuple[str, float]] = field(default_factory=list)
    """What happened to it, and how many seconds after its arrival: waiting, admitted, preempted, decoding, ended."""

    def cancel(self) -> None:
        """Let it leave before the next round. May be called from any thread, also after the end."""
        self.cancelled = True

    def finished(self) -> Generation:
        """The finished generation. Raises what ended it, if that was an error."""
        if self.error is not None:
            raise self.error
        assert self.generation is not None
        self.generation.raise_error()
        return self.generation


Listener = Callable[[Ticket, str | None], None]


class SharedDecoder:
    """Runs the requests of all threads within ``limits``, in the order that its scheduler gives them.

    ``prefixes``: a cache of prompts' beginnings, for requests that name a ``prefix_owner``; within the bound on K/V it
    takes what running requests leave.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer | None = None,
        limits: Limits | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.target, self.tokenizer, self.prefixes = target, tokenizer, prefixes
        self.scheduler = Scheduler(target, limits)
        self.steps = 0
        self.kv_bytes = 0
        """Bytes of K/V that running requests may hold in the step under way."""
        self._most_cached = 0 if prefixes is None else prefixes.most_bytes
        self._closed = False
        self._running: list[Ticket] = []
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()
        self._torch_threads = torch.get_num_threads()
        _KNOWN.add(self)

    @property
    def limits(self) -> Limits:
        """The bounds in force; may be replaced at any time."""
        return self.scheduler.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        with self._changing:
            self.scheduler.limits = limits

    @property
    def running(self) -> list[Ticket]:
        """Requests that were admitted and have not ended."""
        return list(self._running)

    @property
    def waiting(self) -> list[Ticket]:
        """Requests that wait for their turn."""
        return list(self.scheduler.waiting)

    def submit(self, requests: Seq[tuple[Request, Listener]]) -> list[Ticket]:
        """Enqueue requests, each with its listener. What cannot be honoured ends with an error of its own.

        Raises QueueFull where there is no room for all of them, and Closed after :meth:`drain`.
        """
        tickets = [Ticket(request, listen) for request, listen in requests]
        if ROUNDS.held:  # asked from within a round, by a user's processor: the decoding thread waits for this one
            inner = SharedDecoder(self.target, self.tokenizer, replace(self.limits, max_queue=None))
            inner.scheduler.add(tickets, ())
            inner._work()
            return tickets
        with self._changing:
            self._check_open()
            self.scheduler.add(tickets, self._running)
            for ticket in tickets:
                ticket.timeline.append(("waiting", 0.0))
            if threading.current_thread() is threading.main_thread():
                # As many threads as torch is set to use there; in others the setting may not have arrived.
                self._torch_threads = torch.get_num_threads()
            if tickets and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="outpace", daemon=True)
                self._thread.start()
        return tickets

    def check_room(self, tenant: str = "", preparing: Mapping[str, int] = NOBODY) -> None:
        """Raise QueueFull or Closed where :meth:`submit` would refuse any request of ``tenant`` now, or will once the
        calls that are ``preparing`` (by tenant) have come."""
        with self._changing:
            self._check_open()
            self.scheduler.check_room(1, self._running, tenant, preparing)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("no more requests are taken: this process is shutting down")

    def stop(self) -> None:
        """Cancel everything and wait until the step under way has ended."""
        with self._changing:
            for ticket in (*self.scheduler.waiting, *self._running):
                ticket.cancel()
            thread = self._thread
        if thread is not None:
            thread.join()

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests and wait until those that there are have ended, at most ``seconds``. Whether they
        have; if not, :meth:`stop` ends them."""
        with self._changing:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def forget(self) -> None:
        """Begin with nothing: in a forked process nobody runs the parent's requests."""
        self._changing = threading.Lock()
        self.scheduler.waiting.clear()
        self._running.clear()
        self._thread = None

    # -------------------------------------------------------------------------------------- the decoding thread

    def _work(self) -> None:
        decoder: Decoder | None = Decoder(self.target, self.tokenizer, self.prefixes)
        while decoder is not None:
            decoder = self._advance(decoder)

    def _advance(self, decoder: Decoder) -> Decoder | None:
        """One step. Returns the decoder of the next one; None where there is nothing to do."""
        with self._changing:
            if not self._running and not self.scheduler.waiting:
                self._thread = None
                self.kv_bytes = 0
                return None
            gone = [ticket for ticket in self.scheduler.waiting if ticket.cancelled]
            for ticket in gone:
                self.scheduler.withdraw(ticket)
            plan, defect = self._plan()
            gone += plan.overdue
            self.kv_bytes = plan.kv_bytes
            self._running += plan.admit
        if not ROUNDS.held and torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)
        try:
            self._step(decoder, plan, gone, defect)
        except BaseException as error:
            decoder = self._broken(decoder, dict.fromkeys((*gone, *self._running)), error)
        self.steps += 1
        for ticket in dict.fromkeys((*gone, *self._running)):
            self._tell(ticket)
        return decoder

    def _step(self, decoder: Decoder, plan: Plan, gone: Seq[Ticket], defect: BaseException | None) -> None:
        """Do what is planned. Raises ``defect``, which is of the plan itself, and what fails in the step."""
        if defect is not None:
            raise defect
        for ticket in gone:
            self._withdrawn(decoder, ticket)
        self._follow(decoder, plan)
        before = [self._progress(ticket) for ticket in self._running]
        with ROUNDS:
            rows = self.scheduler.rows_beside() if plan.decoding else WHOLE_CHUNK
        decoder.step(rows)
        self._charge(before)

    def _plan(self) -> tuple[Plan, BaseException | None]:
        """The next step; where planning fails, its error, which ends everything that runs or waits."""
        try:
            return self.scheduler.plan(self._running), None
        except BaseException as error:
            everything, self.scheduler.waiting = self.scheduler.waiting, []
            return Plan(overdue=everything), error

    def _withdrawn(self, decoder: Decoder, ticket: Ticket) -> None:
        """A request was cancelled while it waited, or takes too long: it ends without having run, or run on."""
        if ticket.cancelled and ticket.generation is None:
            self._open(decoder, ticket)
        elif not ticket.cancelled:
            self._overdue(ticket)
        if ticket.generation is not None:
            ticket.generation.cancel()  # unless it has ended
            decoder.drop(ticket.generation)

    def _follow(self, decoder: Decoder, plan: Plan) -> None:
        """Do what the plan says of requests that leave and join; those that were cancelled leave in this step, too."""
        for ticket in self._running:
            if ticket.cancelled and ticket.generation is not None:
                ticket.generation.cancel()
        for ticket in plan.full:
            if ticket.generation is not None:
                self._full(ticket.generation)
        for ticket in plan.preempt:
            assert ticket.generation is not None
            decoder.preempt(ticket.generation)
            ticket.generation.metrics.preemptions += 1
            self._mark(ticket, "preempted")
            with self._changing:
                self._running.remove(ticket)
                self.scheduler.again(ticket)
        self._share_memory(plan.kv_bytes)
        for ticket in plan.admit:
            self._admit(decoder, ticket)

    @staticmethod
    def _full(one: Generation) -> None:
        """There is no room for another token: an answer ends. A group, which has none yet, fails; those that may grow
        so large are refused before, unless a target's K/V takes more than it says."""
        if one.group is None:
            one.finish("length")
        else:
            one.fail(BadInput("its sequences have outgrown the bound on K/V; lower their number or max_tokens"))

    def _share_memory(self, planned: int) -> None:
        """Cached beginnings get what running requests leave of the bound on K/V; idle memory what both leave."""
        bound, cached = self.limits.kv_bytes, 0
        if bound is not None and self.prefixes is not None:
            cached = self.prefixes.most_bytes = min(self._most_cached, max(0, bound - planned))
            self.prefixes.shrink(cached)
        self.target.limit_kv(None if bound is None else bound - cached, planned)

    def _overdue(self, ticket: Ticket) -> None:
        assert ticket.request.time_limit is not None
        error = DeadlineExceeded(ticket.request.time_limit)
        if ticket.generation is None:
            ticket.error = error
        else:
            ticket.generation.fail(error)

    def _admit(self, decoder: Decoder, ticket: Ticket) -> None:
        self._mark(ticket, "admitted")
        if ticket.generation is None:
            self._open(decoder, ticket)
        else:
            decoder.resume(ticket.generation)

    def _open(self, decoder: Decoder, ticket: Ticket) -> None:
        try:
            self.scheduler.check(ticket.request)
            ticket.generation = decoder.submit(ticket.request)
        except BaseException as error:
            ticket.error = error

    @staticmethod
    def _mark(ticket: Ticket, event: str) -> None:
        ticket.timeline.append((event, perf_counter() - ticket.arrived))

    def _progress(self, ticket: Ticket) -> tuple[Ticket, int, int]:
        """A request, the rows of K/V that it has of its prompt, and its output tokens."""
        one = ticket.generation
        if one is None or one.sequence.kv is None:
            return ticket, 0, 0
        output = len(one.tokens) if one.group is None else one.group.written
        if one.left and one.prompt_read:  # whose K/V is gone
            return ticket, one.sequence.prompt_length, output
        return ticket, min(self.target.length(one.sequence.kv), one.sequence.prompt_length), output

    def _charge(self, before: Seq[tuple[Ticket, int, int]]) -> None:
        """Count what the step has done for every tenant."""
        for ticket, prompt, output in before:
            _, now, tokens = self._progress(ticket)
            self.scheduler.served(ticket.request.tenant, max(0, now - prompt), tokens - output)
            if tokens and not output:
                self._mark(ticket, "decoding")

    def _broken(self, decoder: Decoder, concerned: Iterable[Ticket], error: BaseException) -> Decoder:
        """A step failed, so that no request in it can go on. Returns another decoder."""
        for ticket in concerned:
            ticket.error = ticket.error or error
            if ticket.generation is not None:
                with contextlib.suppress(Exception):
                    decoder.drop(ticket.generation)
        return Decoder(self.target, self.tokenizer, self.prefixes)

    def _tell(self, ticket: Ticket) -> None:
        """Tell a listener what the round released, and the end; a listener that fails is told no more."""
        generation = ticket.generation
        ended = ticket.error is not None or (generation is not None and generation.finish_reason is not None)
        if ended:
            self._mark(ticket, "ended")
        try:
            if ticket.error is None and generation is not None:
                ticket.listen(ticket, generation.take_text())
        except Exception as error:  # an event loop that was closed meanwhile, or a defect
            ticket.error = error if ended else None
            ticket.cancel()
        if ended:
            with contextlib.suppress(Exception):
                ticket.listen(ticket, None)
            with self._changing:
                self.scheduler.ended(ticket)
                if ticket in self._running:
                    self._running.remove(ticket)


_KNOWN: WeakSet[SharedDecoder] = WeakSet()


def _stop_all() -> None:
    for one in list(_KNOWN):
        one.stop()


def _forget_all() -> None:
    ROUNDS.forget()
    for one in list(_KNOWN):
        one.forget()


atexit.register(_stop_all)  # the kernels must not run while the process is taken down
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
