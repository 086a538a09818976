"""Conversation: turn by turn with a model, keeping the K/V of earlier turns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from outpace.api.chosen import choose
from outpace.api.options import GenerateOptions, with_options
from outpace.api.requests import LoadedModel, build_method, build_request, read_references
from outpace.api.result import Result
from outpace.api.streams import Stream
from outpace.constraints.compiler import compiled
from outpace.core.errors import BadInput, shown
from outpace.core.text import check_text
from outpace.core.turns import ROUNDS
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.engine.shared_decoder import Ticket
from outpace.models.transcript import NEXT_TURN, transcript
from outpace.targets.base import Sequence

_NUMBERS = itertools.count()


class Conversation:
    """A conversation with a model. Made by :func:`chat`; also a context manager, which closes it.

    One answer at a time: a turn that begins while another is being streamed is refused.

    >>> import outpace
    >>> with outpace.load("smollm2").chat() as talk:  # doctest: +SKIP
    ...     for piece in talk.stream("Tell me a story."):
    ...         print(piece, end="", flush=True)
    ...     print(talk.say("What happens next?").text)
    """

    def __init__(self, model: LoadedModel, system: str | None, options: Mapping[str, Any]) -> None:
        if system is not None and not isinstance(system, str):
            raise BadInput(f"system must be a text, not {shown(system)}")
        chosen = choose(options)
        if chosen.raw:
            raise BadInput("raw continues a text; a conversation needs the chat template: leave out raw")
        if chosen.beams is not None or chosen.best_of is not None:
            name = "num_beams" if chosen.beams is not None else "best_of"
            raise BadInput(f"a conversation continues one answer: leave out {name}, or use generate")
        if chosen.grammar is not None:  # refused before the first turn; compiled grammars are kept
            compiled(chosen.grammar, model.tokenizer, chosen.grammar_limits)
        self._model = model
        self._own_namespace = "namespace" not in options or options["namespace"] is None
        self._chosen = chosen
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)
        self._method = build_method(model, chosen)
        if self._method.population is not None:
            raise BadInput(
                f"a conversation continues one answer, and method '{self._method.name}' decodes several; choose "
                "another method, or use generate"
            )
        self._references = read_references(model, chosen)
        self._kept: Sequence | None = None
        self._answering = False
        self._number = next(_NUMBERS)

    @property
    def history(self) -> list[dict[str, str]]:
        """The messages so far: dicts with "role" (system, user or assistant) and "content"."""
        return [dict(message) for message in self._messages]

    @property
    def method(self) -> Method:
        """The method that drafts in it."""
        return self._method

    @property
    def kept_tokens(self) -> int:
        """How many tokens' K/V are kept of the turns so far."""
        return 0 if self._kept is None else self._model.target.length(self._kept.kv)

    def say(self, text: str) -> Result:
        """The answer to one more turn.

        text: the user's turn. Returns the :class:`Result`; turn and answer are then part of the history. Raises
        BadInput for a turn that does not fit into the context, or while another answer is being streamed; the
        conversation then stays as it was.

        >>> import outpace
        >>> outpace.load("smollm2").chat().say("Hello!").text  # doctest: +SKIP
        """
        pieces = self.stream(text)
        for _ in pieces:
            pass
        return pieces.result

    def stream(self, text: str) -> Stream:
        """As :meth:`say`, piece by piece.

        text: the user's turn. Returns a :class:`Stream`. What was said before it was closed stays in the history;
        where nothing was, the turn is forgotten. Raises BadInput as :meth:`say` does.

        >>> import outpace
        >>> for piece in outpace.load("smollm2").chat().stream("Hello!"):  # doctest: +SKIP
        ...     print(piece, end="", flush=True)
        """
        if self._answering:
            raise BadInput("the last answer is still being streamed; read it to its end, or close the stream")
        asked = self.request(text)
        self._answering = True
        return Stream(self._model.shared, asked, partial(self._ended, text))

    def request(self, text: str) -> Request:
        """The request for the answer to one more turn, for those who run a Decoder themselves.

        text: the user's turn. Give the finished generation to :meth:`answered`. Raises BadInput for what is no text.
        """
        if not isinstance(text, str):
            raise BadInput(f"a turn must be a text, not {shown(text)}")
        check_text(text, "the turn")
        messages = [*self._messages, {"role": "user", "content": text}]
        words = self._model.tokenizer
        chosen = self._chosen
        if self._own_namespace:  # what is learned in one conversation is not drafted in the next
            chosen = replace(chosen, namespace=f"conversation {self._number}")
        if words.has_chat_template:
            ids = words.chat(messages)
        else:
            ids = words.encode(transcript(messages))
            chosen = replace(chosen, stop=(*chosen.stop, NEXT_TURN))
        made = build_request(self._model, chosen, self._method, self._references, ids)
        return replace(made, keep=True, kept=self._kept)

    def answered(self, text: str, generation: Generation) -> None:
        """Take a turn and its finished answer into the history, and keep its K/V. Raises the error that ended it.

        text: the user's turn. generation: of the request that :meth:`request` made for it.
        """
        generation.raise_error()
        self._keep(generation.sequence)
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": generation.text}]

    def reset(self) -> None:
        """Forget all turns but the system message, and what was learned in them."""
        self._keep(None)
        self._number = next(_NUMBERS)
        self._messages = list(self._system)

    def close(self) -> None:
        """Release the K/V. The conversation may go on, and computes its turns again."""
        self._keep(None)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Conversation({len(self._messages)} messages, {self.kept_tokens} tokens kept)"

    def _ended(self, text: str, ticket: Ticket) -> None:
        """What the decoding thread calls when an answer has ended."""
        self._answering = False
        generation = ticket.generation
        if generation is None:
            return
        failed = ticket.error is not None or generation.error is not None
        if not failed and (generation.tokens or generation.finish_reason != "cancelled"):
            self.answered(text, generation)
        elif generation.keeps:
            with ROUNDS:
                self._model.target.close(generation.sequence.kv)

    def _keep(self, sequence: Sequence | None) -> None:
        """Hold on to this sequence's K/V instead of the last one's."""
        kept, self._kept = self._kept, sequence
        if kept is not None:
            with ROUNDS:
                self._model.target.close(kept.kv)


@with_options
def chat(model: LoadedModel, *, system: str | None = None, **options: Unpack[GenerateOptions]) -> Conversation:
    """Begin a conversation that remembers its turns, and does not compute earlier ones again.

    model: what :func:`outpace.load` returned.
    system: a system message before the first turn.

    Returns a :class:`Conversation`; the options hold for all its turns. What the method learns is kept for the
    conversation alone, unless ``namespace`` names another place. Raises BadInput for options that cannot be honoured.

    >>> import outpace
    >>> talk = outpace.load("smollm2").chat(system="Be brief.")  # doctest: +SKIP
    >>> print(talk.say("Why is the sky blue?"))                  # doctest: +SKIP
    >>> print(talk.say("And at night?"))                         # doctest: +SKIP
    """
    return Conversation(model, system, options)
