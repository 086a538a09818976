"""``outpace generate``: one answer, streamed; with --ray, the answers to a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli import options as opt
from outpace.cli.answer_report import print_logprobs, report, status
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import Interrupted, interruptible
from outpace.cli.options import option
from outpace.cli.output import err, out, print_json
from outpace.cli.session import Drafting, Machine, read_texts
from outpace.cli.several import Several, print_several, remark_on_cut
from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.text import check_text
from outpace.methods.default_method import DEFAULT_METHOD

if TYPE_CHECKING:
    from outpace.engine.decoder import Decoder
    from outpace.engine.request import Generation, Request
    from outpace.model import Model


BATCH = "Offline batch"
_MOST_WORKERS = 10_000


@grouped()
def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help="The prompt; - reads it from standard input. With --ray: a file of rows."
        ),
    ],
    output: Annotated[
        Path | None, typer.Argument(metavar="OUT.jsonl", help="With --ray: the file of answers.", show_default=False)
    ] = None,
    *,
    machine: Machine,
    system: opt.System = None,
    raw: Annotated[bool, option("--raw", text="Continue the text as is, without the chat template.")] = False,
    max_new_tokens: opt.MaxNewTokens = 256,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    explain: Annotated[
        bool, option("--explain", text="Show drafted, accepted and rejected tokens, round by round.")
    ] = False,
    json: Annotated[bool, option("--json", text="Print one JSON object instead of the text.")] = False,
    ray: Annotated[
        bool,
        option(
            "--ray",
            panel=BATCH,
            text="Answer the rows of IN.jsonl with workers on Ray (docs/scaling.md): outpace generate --ray IN.jsonl "
            "OUT.jsonl. Needs outpace\\[ray]. Exit code 1: rows without an answer.",
        ),
    ] = False,
    replicas: Annotated[
        int | None, option(value="N", panel=BATCH, text="With --ray: number of workers. [dim]\\[default: 1][/]")
    ] = None,
    resume: Annotated[bool, option("--resume", panel=BATCH, text="With --ray: continue an interrupted batch.")] = False,
    method: opt.MethodName = DEFAULT_METHOD,
    drafting: Drafting,
    reference: opt.Reference = None,
    sampling: opt.Sampling,
    several: Several,
    constrained: opt.Constrained,
    logprobs: Annotated[
        int | None,
        option(value="N", panel=opt.SAMPLING, text="Print log-probabilities, with the N most likely alternatives."),
    ] = None,
) -> None:
    """Generate one answer by speculative decoding: faster, with the model's own output distribution."""
    if system is not None and raw:
        raise BadInput("--system is part of the chat template; leave out --raw or --system")
    opt.check_texts(system, stop)
    opt.check_length(max_new_tokens)
    _check_batch(ray, output, replicas, resume, {"--explain": explain, "--json": json, "--logprobs": logprobs})
    more_answers = several.options()
    if several.given and (explain or ray or logprobs is not None):
        shown = "--explain" if explain else "--ray" if ray else "--logprobs"
        other = next(iter(more_answers)).replace("_", "-")
        raise BadInput(f"{shown} is for single answers; leave it out, or --{other}")
    question = "" if ray else read_prompt(prompt, raw)
    machine.check()
    drafting.check()
    texts = read_texts(reference)
    grammar, limits = constrained.read(), constrained.limits
    if ray:
        from outpace.cli.generate_ray import Batch, generate_batch

        params = sampling.params(constraint_weighting=constrained.weighting)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop": list(stop or ()),
            "ignore_eos": ignore_eos,
            "references": list(texts),
            "params": params,
            **({} if grammar is None else {"grammar": grammar, "grammar_limits": limits}),
        }
        batch = Batch(machine, drafting, drafting.settings([method], params), options, system, raw)
        assert output is not None
        if generate_batch(batch, Path(prompt), output, replicas or 1, resume=resume):
            raise typer.Exit(1)
        return
    try:
        more = {"logprobs": logprobs is not None, "top_logprobs": logprobs or 0}
        params = sampling.params(**more, constraint_weighting=constrained.weighting)
        if several.beams and method == DEFAULT_METHOD:
            method = "none"  # drafts for beams come from methods that are named
        settings = drafting.settings([method], params)
        model, [built] = drafting.build(machine, settings)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        from outpace.api.requests import request

        asking: dict[str, Any] = {
            "method": built,
            "raw": raw,
            "max_new_tokens": max_new_tokens,
            "stop": stop or (),
            "references": texts,
            "ignore_eos": ignore_eos,
            "params": params,
            "grammar": grammar,
            "grammar_limits": limits,
        }
        text: Any = question if raw else messages
        if several.given:
            found = model.generate(text, **asking, **more_answers)
            print_several(found if isinstance(found, list) else [found], method=built.name, json=json)
            return
        asked = request(model, text, **asking)
        asked = replace(asked, trace=explain)
        complete = _answer(model, asked, explain=explain, json=json)
    except KeyboardInterrupt:
        if json:  # interrupted before the first token
            from outpace.core.metrics import RequestMetrics

            print_json({"text": "", "tokens": [], "metrics": RequestMetrics().figures(), "complete": False})
        raise Interrupted("before the first token") from None
    if not complete:
        raise typer.Exit(opt.INTERRUPTED)


def _check_batch(
    ray: bool, output: Path | None, replicas: int | None, resume: bool, single: Mapping[str, object]
) -> None:
    """Raise BadInput where options of a batch and of a single answer are mixed."""
    if not ray:
        for name, given in (("--replicas", replicas is not None), ("--resume", resume)):
            if given:
                raise BadInput(f"{name} needs --ray, which answers a file of prompts")
        if output is not None:
            raise BadInput(f"one prompt is answered, and '{output}' is another argument; put the prompt in quotes")
        return
    if output is None:
        raise BadInput("--ray takes two files: outpace generate --ray IN.jsonl OUT.jsonl")
    for name, value in single.items():
        if value is not None and value is not False:
            raise BadInput(f"{name} shows one answer; leave it out, or --ray")
    if replicas is not None and not 1 <= replicas <= _MOST_WORKERS:
        raise BadInput(f"--replicas must be between 1 and {_MOST_WORKERS}, not {replicas}")


def _answer(model: Model, request: Request, *, explain: bool, json: bool) -> bool:
    """Generate and print. False when Ctrl-C cut the answer short."""
    from outpace.engine.decoder import Decoder

    decoder = Decoder(model.target, model.tokenizer)
    generation = decoder.submit(request)
    with interruptible(generation) as interrupt:
        if explain:
            _explained(model, decoder, generation, err() if json else out())
        else:
            pieces = decoder.stream(generation)
            with stage("reading the prompt", brief=True):
                first = list(islice(pieces, 1))
            for piece in chain(first, pieces):
                if not json:
                    print(piece, end="", flush=True)
        decoder.run()  # lets a cancelled request leave
    if generation.error is not None and generation.text and not json and not explain:
        print(flush=True)  # the answer so far stays a line of its own
    generation.raise_error()
    if generation.stream is not None and interrupt.pressed:
        rest = generation.stream.finish()
        if not json and not explain:
            print(rest, end="")
    if json:
        print_json(report(model, generation, interrupt.pressed))
    else:
        if not explain:
            print(flush=True)
        if generation.logprobs:
            print_logprobs(model, generation)
        remark = "interrupted: " if interrupt.pressed else ""
        err().print(f"[dim]{remark}{status(generation)}", soft_wrap=True)
    remark_on_cut(complete=generation.grammar_complete, finish_reason=generation.finish_reason)
    return not interrupt.pressed


def _explained(model: Model, decoder: Decoder, generation: Generation, console: Console) -> None:
    from outpace.cli.explain import Explainer

    explainer = Explainer(console, model.tokenizer)
    explainer.legend()
    while generation.finish_reason is None:
        decoder.step()
        explainer.update(generation)
    explainer.answer(generation)
    explainer.summary(generation)


def read_prompt(prompt: str, raw: bool) -> str:
    """The prompt itself, or standard input for ``-``. Raises BadInput for one that is empty or no text."""
    if prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"standard input is not UTF-8 text (byte {error.start})") from None
        prompt = text if raw else text.removesuffix("\n")  # the newline is the shell's, not the question's
    check_text(prompt, "the prompt")
    if not prompt.strip():
        raise BadInput("the prompt is empty; give a text, or - to read it from standard input")
    return prompt
