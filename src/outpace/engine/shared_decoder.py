"""SharedDecoder: one decoder for all threads and event loops that ask a model at the same time.

While there is anything to decode, one thread runs the rounds; it starts with the first request and ends with the last.
Requests of all callers join its decoder, so that they share the target's forwards. Callers wait elsewhere: their
listeners are called after every round, on that thread, and must not block.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from outpace.core.text import Tokenizer
from outpace.core.turns import ROUNDS
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.targets.base import Target

MOST_ACTIVE = 8
"""Requests that are decoded at once; the others wait for their turn."""


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


@dataclass(eq=False, slots=True, weakref_slot=True)
class SharedDecoder:
    """Runs the requests of all threads, at most ``most_active`` at once, in the order in which they came."""

    target: Target
    tokenizer: Tokenizer | None = None
    most_active: int = MOST_ACTIVE
    _changing: threading.Lock = field(default_factory=threading.Lock, init=False)
    _waiting: deque[Ticket] = field(default_factory=deque, init=False)
    _running: list[Ticket] = field(default_factory=list, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _torch_threads: int = field(default_factory=torch.get_num_threads, init=False)

    def __post_init__(self) -> None:
        _KNOWN.add(self)

    def submit(self, requests: Seq[tuple[Request, Listener]]) -> list[Ticket]:
        """Enqueue requests, each with its listener. What cannot be honoured ends with an error of its own."""
        tickets = [Ticket(request, listen) for request, listen in requests]
        if ROUNDS.held:  # asked from within a round, by a user's processor: the decoding thread waits for this one
            inner = SharedDecoder(self.target, self.tokenizer, self.most_active)
            inner._waiting.extend(tickets)
            inner._work()
            return tickets
        with self._changing:
            self._waiting.extend(tickets)
            if threading.current_thread() is threading.main_thread():
                # As many threads as torch is set to use there; in others the setting may not have arrived.
                self._torch_threads = torch.get_num_threads()
            if tickets and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="outpace", daemon=True)
                self._thread.start()
        return tickets

    def stop(self) -> None:
        """Cancel everything and wait until the round under way has ended."""
        with self._changing:
            for ticket in (*self._waiting, *self._running):
                ticket.cancel()
            thread = self._thread
        if thread is not None:
            thread.join()

    def forget(self) -> None:
        """Begin with nothing: in a forked process nobody runs the parent's requests."""
        self._changing = threading.Lock()
        self._waiting.clear()
        self._running.clear()
        self._thread = None

    def _work(self) -> None:
        decoder = Decoder(self.target, self.tokenizer)
        while True:
            with self._changing:
                room = min(len(self._waiting), self.most_active - len(self._running))
                admitted = [self._waiting.popleft() for _ in range(room)]
                self._running += admitted
                if not self._running:
                    self._thread = None
                    return
            if not ROUNDS.held and torch.get_num_threads() != self._torch_threads:
                torch.set_num_threads(self._torch_threads)
            for ticket in admitted:
                self._admit(decoder, ticket)
            for ticket in self._running:
                if ticket.cancelled and ticket.generation is not None:
                    ticket.generation.cancel()
            try:
                decoder.step()
            except BaseException as error:
                decoder = self._broken(decoder, error)
            for ticket in tuple(self._running):
                self._tell(ticket)

    @staticmethod
    def _admit(decoder: Decoder, ticket: Ticket) -> None:
        try:
            ticket.generation = decoder.submit(ticket.request)
        except BaseException as error:
            ticket.error = error

    def _broken(self, decoder: Decoder, error: BaseException) -> Decoder:
        """A round failed, so that no request in it can go on. Returns another decoder."""
        with ROUNDS:
            for ticket in self._running:
                ticket.error = ticket.error or error
                if ticket.generation is not None:
                    with contextlib.suppress(Exception):
                        self.target.close(ticket.generation.sequence.kv)
        return Decoder(self.target, self.tokenizer)

    def _tell(self, ticket: Ticket) -> None:
        """Tell a listener what the round released, and the end; a listener that fails is told no more."""
        generation = ticket.generation
        ended = ticket.error is not None or (generation is not None and generation.finish_reason is not None)
        try:
            if ticket.error is None and generation is not None:
                ticket.listen(ticket, generation.take_text())
            if ended:
                ticket.listen(ticket, None)
        except Exception:  # an event loop that was closed meanwhile
            ticket.cancel()
        if ended:
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
