"""Conversations in Python: history, kept K/V, streams that are closed, and what is learned."""

from __future__ import annotations

import pytest

import outpace
from cli_support import Failing, toy
from outpace.core.errors import BadInput
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from test_shared_decoder import counting, idle

OPTIONS = {"max_new_tokens": 12, "ignore_eos": True}


def test_turns_are_what_the_whole_history_would_be_answered_with() -> None:
    model = toy()
    talk = model.chat(system="be kind", max_new_tokens=12)
    first, second = talk.say("one"), talk.say("two")
    history = talk.history
    assert [message["role"] for message in history] == ["system", "user", "assistant", "user", "assistant"]
    assert [first.text, second.text] == [history[2]["content"], history[4]["content"]]
    assert second.text == model.generate(history[:4], method="none", max_new_tokens=12).text
    history.clear()
    assert len(talk.history) == 5, "a copy"
    assert repr(talk).startswith("Conversation(5 messages, ")


def test_earlier_turns_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    honest = Decoder.submit

    def spy(self: Decoder, request: Request) -> Generation:
        generation = honest(self, request)
        kept.append(self.target.length(generation.sequence.kv))
        return generation

    monkeypatch.setattr(Decoder, "submit", spy)
    talk = toy().chat(max_new_tokens=12)
    talk.say("one")
    assert talk.kept_tokens > 0
    second = talk.say("two")
    assert kept[0] == 0
    assert 0 < second.prompt_tokens - kept[1] <= len("u two\na ") + 2


def test_closing_releases_the_kv_and_the_talk_goes_on() -> None:
    model, target = counting()
    with model.chat(max_new_tokens=12) as talk:
        said = [talk.say("one").text, talk.say("two").text]
        idle(model)
        assert target.open_kv > 0
        talk.close()
        assert target.open_kv == 0
        talk.say("three")
    assert talk.kept_tokens == target.open_kv == 0
    again = model.chat(max_new_tokens=12)
    assert [again.say("one").text, again.say("two").text] == said
    again.reset()
    assert again.history == []
    assert again.say("one").text == said[0]
    again.close()


def test_a_stream_of_a_turn() -> None:
    model = toy()
    talk = model.chat(max_new_tokens=40, ignore_eos=True)
    pieces = talk.stream("one")
    with pytest.raises(BadInput, match="still being streamed"):
        talk.say("two")
    text = "".join(pieces)
    assert text == pieces.result.text == talk.history[-1]["content"]
    assert talk.say("two").text


def test_what_was_said_before_a_stream_is_closed_stays() -> None:
    model, _ = counting()
    talk = model.chat(max_new_tokens=3000, ignore_eos=True)
    pieces = talk.stream("one")
    next(pieces)
    pieces.close()
    assert talk.history[-1]["role"] == "assistant"
    assert talk.history[-1]["content"] == pieces.result.text != ""
    dropped = talk.stream("two")
    next(dropped)
    del dropped
    idle(model)
    assert len(talk.history) == 4
    assert not talk._answering


def test_a_turn_that_fails_leaves_the_conversation_as_it_was() -> None:
    model = toy()
    talk = model.chat(max_new_tokens=5)
    talk.say("one")
    before, kept = talk.history, talk.kept_tokens
    with pytest.raises(BadInput, match="the prompt has"):
        talk.say("abc " * 200)
    for wrong in (5, None, "\ud800"):
        with pytest.raises(BadInput, match="turn"):
            talk.say(wrong)  # type: ignore[arg-type]
    assert (talk.history, talk.kept_tokens) == (before, kept)
    assert talk.say("two").text
    with pytest.raises(BadInput, match="Failing"):
        model.chat(max_new_tokens=9, processors=Failing()).say("one")


def test_a_turn_whose_step_breaks_keeps_no_kv_and_the_talk_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = counting()
    with model.chat(max_new_tokens=12) as talk:
        talk.say("one")
        idle(model)
        before, held = talk.history, target.open_kv
        with monkeypatch.context() as patch:
            patch.setattr(type(target), "score", broken)
            with pytest.raises(RuntimeError, match="out of memory"):
                talk.say("two")
        idle(model)
        assert (talk.history, target.open_kv) == (before, held)
        assert talk.say("two").text
    assert target.open_kv == 0


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def test_options_are_checked_when_it_begins() -> None:
    model = toy()
    with pytest.raises(BadInput, match="leave out raw"):
        model.chat(raw=True)
    with pytest.raises(BadInput, match="system must be a text"):
        model.chat(system=5)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="did you mean 'temperature'"):
        model.chat(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="unknown method"):
        outpace.chat(model, method="nosuch")


def test_every_conversation_learns_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    honest = Decoder.submit

    def spy(self: Decoder, request: Request) -> Generation:
        names.append(request.namespace)
        return honest(self, request)

    monkeypatch.setattr(Decoder, "submit", spy)
    model = toy()
    one, two = model.chat(max_new_tokens=2), model.chat(max_new_tokens=2)
    for talk in (one, one, two):
        talk.say("x")
    one.reset()
    one.say("x")
    assert names[0] == names[1] != ""
    assert len(set(names)) == 3
    model.chat(max_new_tokens=2, namespace="mine").say("x")
    assert names[-1] == "mine"
