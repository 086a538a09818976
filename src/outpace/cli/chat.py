"""``outpace chat``: a conversation that keeps the K/V of its earlier turns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape

from outpace.cli import options as opt
from outpace.cli.answer_report import status
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import Interrupted, interruptible
from outpace.cli.output import err
from outpace.cli.session import Drafting, Machine, read_texts
from outpace.cli.several import remark_on_cut
from outpace.core.errors import BadInput
from outpace.methods.default_method import DEFAULT_METHOD

if TYPE_CHECKING:
    from outpace.api.conversation import Conversation
    from outpace.model import Model

_HELP = "/exit quits, /reset starts a new conversation, Ctrl-C stops an answer"


@grouped()
def chat(
    machine: Machine,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 512,
    stop: opt.Stop = None,
    method: opt.MethodName = DEFAULT_METHOD,
    *,
    drafting: Drafting,
    reference: opt.Reference = None,
    namespace: opt.Namespace = None,
    sampling: opt.Sampling,
    constrained: opt.Constrained,
) -> None:
    """Chat with the model. The K/V of earlier turns is reused. If input is piped, each line is one turn."""
    opt.check_texts(system, stop)
    opt.check_length(max_new_tokens)
    machine.check()
    drafting.check()
    texts = read_texts(reference)
    params = sampling.params(constraint_weighting=constrained.weighting)
    loaded, [built] = drafting.build(machine, drafting.settings([method], params))
    talk = loaded.chat(
        system=system,
        method=built,
        params=params,
        max_new_tokens=max_new_tokens,
        stop=stop or (),
        references=texts,
        namespace=namespace,
        grammar=constrained.read(),
        grammar_limits=constrained.limits,
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
            _turn(loaded, talk, line, interactive)
    except EOFError:
        return
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise Interrupted("the conversation is over") from None


def _turn(model: Model, talk: Conversation, line: str, interactive: bool) -> None:
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
            _answer(model, talk, line, interactive)
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


def _answer(model: Model, talk: Conversation, question: str, interactive: bool) -> None:
    """Print the answer to one more turn. A turn that fails leaves the conversation as it was."""
    from outpace.engine.decoder import Decoder

    decoder = Decoder(model.target, model.tokenizer)
    before = talk.kept_tokens
    try:
        generation = decoder.submit(talk.request(question))
        reused = model.target.length(generation.sequence.kv)
        with interruptible(generation) as interrupt:
            for piece in decoder.stream(generation):
                print(piece, end="", flush=True)
            decoder.run()
    except KeyboardInterrupt:
        talk.close()  # what was broken off in the middle is not to be trusted
        if not interactive:
            raise
        print(flush=True)
        err().print("[dim]interrupted before the first token; the question is dropped")
        return
    print(flush=True)
    talk.answered(question, generation)
    kept = f", {reused} of {generation.metrics.prompt_tokens} prompt tokens reused" if before and reused else ""
    err().print(f"[dim]{status(generation)}{kept}", soft_wrap=True)
    remark_on_cut(complete=generation.grammar_complete, finish_reason=generation.finish_reason)
    if interrupt.pressed and not interactive:
        raise KeyboardInterrupt
