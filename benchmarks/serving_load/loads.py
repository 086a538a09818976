"""Loads: closed loops, where each user waits for an answer before the next question, and Poisson arrivals.

In an open load latencies begin when a request was due, not when it could be sent: a server that stalls is charged for
all requests that came meanwhile (coordinated omission).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving_load.client import Reply, Rounds
from serving_load.conversations import Conversation

_SOON = 0.002
"""Seconds after which a clock that may stand still is looked at again."""

Body = Callable[[list[dict[str, str]], str], dict[str, Any]]
"""From the messages so far and a name for this run of the conversation to a request's body."""


class Asks(Protocol):
    """A client. ``clock``: its seconds, which all times are in; it may stand still while its server does."""

    @property
    def clock(self) -> Callable[[], float]: ...

    def ask(self, body: dict[str, Any], scheduled: float | None = None) -> Reply: ...


@dataclass(slots=True)
class Block:
    """What one server answered in one turn.

    ``began``, ``ended``: the stretch in which its rate is measured. In a closed load it ends when the first user has
    nothing left to ask, because fewer users than were asked for are active after that.
    """

    began: float
    ended: float
    whole: float
    """Seconds to the last answer."""
    replies: list[Reply] = field(default_factory=list)
    client_cpu: float = 0.0
    """CPU seconds of the threads that asked."""
    rounds: Rounds | None = None
    """Rounds that the server has counted meanwhile; None: it counts none."""

    @property
    def tokens(self) -> float:
        """Output tokens that arrived in the stretch."""
        return sum(one.tokens_before(self.ended) for one in self.replies if one.error is None)

    @property
    def seconds(self) -> float:
        """The stretch's length."""
        return self.ended - self.began


def closed(client: Asks, conversations: Seq[Conversation], body: Body, users: int, name: str) -> Block:
    """``users`` threads play the conversations, each the next that nobody has begun."""
    left = deque(enumerate(conversations))
    began = client.clock()
    replies: list[Reply] = []
    idle: list[float] = []

    def user() -> None:
        while True:
            try:
                number, one = left.popleft()
            except IndexError:
                idle.append(client.clock())
                return
            replies.extend(play(client, one, body, f"{name}/{number}"))

    cpu = _together([user] * users)
    return Block(began, min(idle), client.clock() - began, replies, cpu)


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the beginning at which ``count`` arrivals of a Poisson process fall."""
    chance = random.Random(seed)
    now, found = 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        found.append(now)
    return found


def open_loop(client: Asks, conversations: Seq[Conversation], body: Body, times: Seq[float], name: str) -> Block:
    """Begin each conversation at its time, whatever has been answered. Later turns are due when the one before ends."""
    began = client.clock()
    replies: list[Reply] = []
    users = []
    for number, (one, at) in enumerate(zip(conversations, times, strict=True)):

        def user(one: Conversation = one, number: int = number, due: float = began + at) -> None:
            while (early := due - client.clock()) > 0.0:  # a clock that stands still while others have their turn
                time.sleep(max(early, _SOON))
            replies.extend(play(client, one, body, f"{name}/{number}", due))

        users.append(user)
    cpu = _together(users)
    ended = client.clock()
    return Block(began, ended, ended - began, replies, cpu)


def play(client: Asks, one: Conversation, body: Body, name: str, due: float | None = None) -> list[Reply]:
    """All turns of a conversation, each with the answers that came before. It ends early with an error."""
    messages, found = list(one.opening), []
    for turn, said in enumerate(one.turns):
        messages.append({"role": "user", "content": said})
        reply = client.ask(body(messages, name), due)
        reply.turn = turn
        found.append(reply)
        if reply.error is not None:
            break
        messages.append({"role": "assistant", "content": reply.text})
        due = None
    return found


def _together(users: Seq[Callable[[], None]]) -> float:
    """Run each on a thread of its own, to the end; the CPU seconds of all."""
    spent: list[float] = []

    def timed(work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            spent.append(time.thread_time())

    # Daemons: Ctrl-C does not wait for them.
    threads = [threading.Thread(target=timed, args=(user,), daemon=True) for user in users]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return sum(spent)
