"""A short soak of the command itself; benchmarks/soak.py runs the long one, with the same checks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from soak import prepared
from soaking.caller import Answer
from soaking.load import slope
from soaking.traffic import CHAT, COMPLETE, Traffic, Wish
from soaking.verdicts import judged


def test_a_short_soak(tmp_path: Path) -> None:
    soak = prepared(None, 220, 60, 3, tmp_path)
    soak.pairs, soak.callers = 4, 12
    fine = asyncio.run(soak.run())
    assert fine, json.dumps(soak.report["problems"], indent=1)
    assert soak.tally.sent > 150
    assert soak.tally.compared > 20


def wish(path: str = COMPLETE, **asked: object) -> Wish:
    return Wish("usual", path, json.dumps(asked).encode(), None, asked=asked)


def answer(body: object, status: int = 200, complete: bool = True, **headers: str) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    return Answer(status, headers, text.encode(), complete)


def events(*parts: object) -> str:
    return "".join(f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in parts)


ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": None}}


def test_what_must_not_be_is_found() -> None:
    """The checks themselves: each answer is wrong in one way."""
    counts = {"accepted": 0, "drafted": 0}
    usage = {"completion_tokens": 2, "speculation": counts}
    choice = {"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": None}
    good = {"choices": [choice], "usage": usage}
    assert judged(wish(max_tokens=2), answer(good))[0] == ""
    assert "tokens" in judged(wish(max_tokens=1), answer(good))[0]
    assert "1 choices, 2" in judged(wish(n=2), answer(good))[0]
    assert "stop word" in judged(wish(stop=["b"]), answer(good))[0]
    assert "finish_reason error" in judged(wish(), answer(good | {"choices": [choice | {"finish_reason": "error"}]}))[0]
    assert (
        "accepted"
        in judged(wish(), answer(good | {"usage": usage | {"speculation": {"accepted": 2, "drafted": 1}}}))[0]
    )
    assert "status 500" in judged(wish(), answer(ERROR, 500))[0]
    assert "OpenAI" in judged(wish(), answer({"detail": "no"}, 429))[0]
    assert "Retry-After" in judged(wish(), answer(ERROR, 429))[0]
    assert judged(wish(), Answer(429, {"retry-after": "3"}, json.dumps(ERROR).encode(), True))[0] == ""
    assert "then" in judged(wish(), answer(good, complete=False))[0]
    assert "no end" in judged(wish(), Answer(hung=True))[0]
    assert "no answer" in judged(wish(), Answer(failure="reset"))[0]
    assert judged(wish(), Answer(failure="reset"), ending=True)[0] == ""
    assert judged(Wish("about", "/ready", None, None, (200,)), answer({"status": "shutting down"}, 503), True)[0] == ""
    begun = {"choices": [choice | {"finish_reason": None}]}
    streamed = wish(stream=True)
    assert judged(streamed, answer(events(begun, good, "[DONE]")))[0] == ""
    assert "[DONE]" in judged(streamed, answer(events(begun, good)))[0]
    assert "without an end" in judged(streamed, answer(events(begun, "[DONE]")))[0]
    assert "after its end" in judged(streamed, answer(events(good, good, "[DONE]")))[0]
    assert judged(streamed, answer(events(begun, ERROR, "[DONE]")))[0] == ""
    assert "no known form" in judged(streamed, answer(events(begun, {"error": "x"}, "[DONE]")))[0]


def test_the_slope_of_the_second_half() -> None:
    assert slope([(at, 5_000 - 10 * at if at < 50 else 3 * at) for at in range(101)]) == 3.0
    assert slope([]) == 0.0


def test_a_seed_repeats_the_traffic() -> None:
    drawn = [[(one.kind, one.path, one.body, one.key, one.manners) for one in
              (traffic.draw() for _ in range(300))]
             for traffic in (Traffic("m", seed, True, 1024, 65536) for seed in (1, 1, 2))]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]
    assert {path for _, path, *_ in drawn[0]} >= {CHAT, COMPLETE}
    assert len({kind for kind, *_ in drawn[0]}) == 13
