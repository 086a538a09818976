"""``outpace chat``: a conversation that keeps the K/V of its earlier turns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.markup import escape

from outpace.cli import options as opt
from outpace.cli.generate import status
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import Interrupted, interruptible
from outpace.cli.output import err
from outpace.cli.session import Drafting, Machine, read_texts
from outpace.core.errors import BadInput
from outpace.models.transcript import NEXT_TURN, transcript

if TYPE_CHECKING:
    from outpace.core.sampling import SamplingParams
    from outpace.engine.method import Method
    from outpace.engine.request import Request
    from outpace.model import Model
    from outpace.targets.base import Sequence

_HELP = "/exit quits, /reset starts a new conversation, Ctrl-C stops an answer"


@grouped()
def chat(
    machine: Machine,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 512,
    stop: opt.Stop = None,
    method: opt.MethodName = "auto",
    *,
    drafting: Drafting,
    reference: opt.Reference = None,
    namespace: opt.Namespace = None,
    sampling: opt.Sampling,
) -> None:
    """Chat with the model. The K/V of earlier turns is reused. If input is piped, each line is one turn."""
    opt.check_texts(system, stop)
    opt.check_length(max_new_tokens)
    machine.check()
    drafting.check()
    texts = read_texts(reference)
    params = sampling.params()
    loaded, [built] = drafting.build(machine, drafting.settings([method], params))
    talk = _Conversation(
        model=loaded,
        method=built,
        params=params,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        references=tuple(tuple(loaded.tokenizer.encode(text)) for text in texts),
        messages=[{"role": "system", "content": system}] if system else [],
        named=namespace,
    )
    if not loaded.tokenizer.has_chat_template:
        err().print(
            f"[yellow]warning[/]: '{escape(loaded.name)}' has no chat template and may not be a chat model: "
            "turns are joined as lines of 'User: ...' and 'Assistant: ...'",
            soft_wrap=True,
        )
    interactive = sys.stdin.isatty()
    if interactive:
        err().print(f"[dim]{loaded.name}, {talk.method.name}. {_HELP}.")
    try:
        for line in _lines(interactive):
            _turn(talk, line, interactive)
    except EOFError:
        return
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise Interrupted("the conversation is over") from None


def _turn(talk: _Conversation, line: str, interactive: bool) -> None:
    """One line of the user's: a command, or something to answer."""
    command = line.strip()
    if not command:
        return
    if command == "/exit":
        raise EOFError
    if command == "/reset":
        talk.reset()
        err().print("[dim]new conversation")
    elif command.startswith("/") and interactive:
        err().print(f"[dim]unknown command. {_HELP}.")
    else:
        try:
            talk.answer(line, interactive)
        except BadInput as error:
            if not interactive:
                raise
            err().print(f"[red]error:[/] {escape(str(error))} [dim](/reset starts a new conversation)")


def _lines(interactive: bool) -> Iterator[str]:
    """The user's lines, one turn each, until the input ends."""
    if not interactive:
        for number, raw in enumerate(sys.stdin.buffer, start=1):
            try:
                yield raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise BadInput(f"line {number} of standard input is not UTF-8 text") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and line editing
    while True:
        if sys.stdout.isatty():
            yield input("\n> ")
        else:  # standard output holds the answers alone
            print("\n> ", end="", file=sys.stderr, flush=True)
            yield input()


@dataclass(slots=True)
class _Conversation:
    """The messages so far, and the sequence that holds their K/V."""

    model: Model
    method: Method
    params: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...]
    references: tuple[tuple[int, ...], ...]
    messages: list[dict[str, str]]
    named: str | None = None
    kept: Sequence | None = None
    _number: int = 0
    _system: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self._system = list(self.messages)

    @property
    def namespace(self) -> str:
        """What is learned in one conversation is not drafted in the next, unless the user named a place for it."""
        return f"conversation {self._number}" if self.named is None else self.named

    def reset(self) -> None:
        """Forget all turns, release their K/V, and begin another conversation."""
        self._keep(None)
        self._number += 1
        self.messages = list(self._system)

    def answer(self, question: str, interactive: bool) -> None:
        """Print the answer to one more turn. A turn that fails leaves the conversation as it was."""
        from outpace.engine.decoder import Decoder

        decoder = Decoder(self.model.target, self.model.tokenizer)
        messages = [*self.messages, {"role": "user", "content": question}]
        before = self.model.target.length(self.kept.kv) if self.kept is not None else 0
        try:
            generation = decoder.submit(self._request(messages))
            reused = self.model.target.length(generation.sequence.kv)
            with interruptible(generation) as interrupt:
                for piece in decoder.stream(generation):
                    print(piece, end="", flush=True)
                decoder.run()
        except KeyboardInterrupt:
            self._keep(None)  # begin afresh: what was broken off in the middle is not to be trusted
            if not interactive:
                raise
            print(flush=True)
            err().print("[dim]interrupted before the first token; the question is dropped")
            return
        print(flush=True)
        generation.raise_error()
        self._keep(generation.sequence)
        self.messages = [*messages, {"role": "assistant", "content": generation.text}]
        kept = f", {reused} of {generation.metrics.prompt_tokens} prompt tokens reused" if before and reused else ""
        err().print(f"[dim]{status(generation)}{kept}", soft_wrap=True)
        if interrupt.pressed and not interactive:
            raise KeyboardInterrupt

    def _request(self, messages: list[dict[str, str]]) -> Request:
        from outpace.engine.request import Request

        words, stop = self.model.tokenizer, self.stop
        if words.has_chat_template:
            prompt = words.chat(messages)
        else:
            prompt, stop = words.encode(transcript(messages)), (*stop, NEXT_TURN)
        return Request(
            prompt=tuple(prompt),
            method=self.method,
            params=self.params,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.model.eos_ids,
            stop_strings=stop,
            references=self.references,
            namespace=self.namespace,
            keep=True,
            kept=self.kept,
        )

    def _keep(self, sequence: Sequence | None) -> None:
        """Hold on to this sequence's K/V instead of the last one's."""
        if self.kept is not None:
            self.model.target.close(self.kept.kv)
        self.kept = sequence
