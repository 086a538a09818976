"""``outpace generate``: one answer, streamed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outpace.cli import options as opt
from outpace.cli.interrupt import interruptible
from outpace.cli.output import err, out, print_json
from outpace.cli.session import Machine, MethodChoice, choose_methods, read_texts
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.core.sampling import SamplingParams
    from outpace.engine.decoder import Decoder
    from outpace.engine.method import Method
    from outpace.engine.request import Generation, Request
    from outpace.model import Model

_INTERRUPTED = 130


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to say to the model; - reads standard input.")],
    model: opt.ModelName = "smollm2",
    system: opt.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_new_tokens: opt.MaxNewTokens = 256,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what was drafted, accepted and rejected, round by round.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    method: opt.MethodName = "auto",
    param: opt.Param = None,
    rule: opt.Rule = None,
    draft_model: opt.DraftModel = None,
    head: opt.Head = None,
    datastore: opt.Datastore = None,
    reference: opt.Reference = None,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            rich_help_panel="Sampling",
            help="Log-probabilities, and those of the N likeliest.",
        ),
    ] = None,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Generate one answer. Speculation makes it faster, and changes nothing else."""
    question = read_prompt(prompt, raw)
    if system is not None and raw:
        raise BadInput("--system is part of the chat template; leave out --raw or --system")
    opt.check_length(max_new_tokens)
    machine = Machine(model, draft_model, dtype, device, threads, datastore, head)
    machine.check()
    texts = read_texts(reference)
    biases = opt.logit_bias(logit_bias)
    try:
        from outpace.core.sampling import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=biases,
            seed=seed,
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
        )
        job = _Job(
            question=question,
            system=system,
            raw=raw,
            choice=choose_methods([method], param, rule, params),
            params=params,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop or ()),
            references=texts,
            ignore_eos=ignore_eos,
            explain=explain,
        )
        complete = job.run(machine, json)
    except KeyboardInterrupt:
        if json:
            _print_nothing()
        raise typer.Exit(_INTERRUPTED) from None
    if not complete:
        raise typer.Exit(_INTERRUPTED)


def read_prompt(prompt: str, raw: bool) -> str:
    """The prompt itself, or standard input for ``-``. Raises BadInput for one that is empty or no text."""
    if prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"standard input is not UTF-8 text (byte {error.start})") from None
        prompt = text if raw else text.removesuffix("\n")  # the newline is the shell's, not the question's
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput("the prompt is not UTF-8 text") from None
    if not prompt.strip():
        raise BadInput("the prompt is empty; write one, or give - and pipe it in")
    return prompt


@dataclass(frozen=True, slots=True)
class _Job:
    """One generation, checked and not yet begun."""

    question: str
    system: str | None
    raw: bool
    choice: MethodChoice
    params: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...]
    references: tuple[str, ...]
    ignore_eos: bool
    explain: bool

    def run(self, machine: Machine, json: bool) -> bool:
        """Load, generate and print. False when Ctrl-C cut the answer short."""
        from outpace.engine.decoder import Decoder

        model, drafts = machine.load()
        method = self.choice.build(model, drafts, machine.datastore, machine.heads or ())[0]
        decoder = Decoder(model.target, model.tokenizer)
        generation = decoder.submit(self._request(model, method))
        with interruptible(generation) as interrupt:
            if self.explain:
                self._explained(model, decoder, generation, err() if json else out())
            else:
                for piece in decoder.stream(generation):
                    if not json:
                        print(piece, end="", flush=True)
            decoder.run()  # lets a cancelled request leave
        if generation.stream is not None and interrupt.pressed:
            rest = generation.stream.finish()
            if not json and not self.explain:
                print(rest, end="")
        if json:
            print_json(report(model, method, generation, interrupt.pressed))
        else:
            if not self.explain:
                print(flush=True)
            if generation.logprobs:
                _print_logprobs(model, generation)
            remark = "interrupted: " if interrupt.pressed else ""
            err().print(f"[dim]{remark}{status(method, generation)}", soft_wrap=True)
        return not interrupt.pressed

    def _request(self, model: Model, method: Method) -> Request:
        from outpace import api

        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.question})
        return api.request(
            model,
            self.question if self.raw else messages,
            method=method,
            raw=self.raw,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            references=self.references,
            ignore_eos=self.ignore_eos,
            trace=self.explain,
            **{name: getattr(self.params, name) for name in self.params.__dataclass_fields__},
        )

    @staticmethod
    def _explained(model: Model, decoder: Decoder, generation: Generation, console: Console) -> None:
        from outpace.cli.explain import Explainer

        explainer = Explainer(console, model.tokenizer)
        explainer.legend()
        while generation.finish_reason is None:
            decoder.step()
            explainer.update(generation)
        explainer.answer(generation)
        explainer.summary(generation)


def report(model: Model, method: Method, generation: Generation, interrupted: bool) -> dict[str, Any]:
    """The object that ``--json`` prints; metrics have the names of the bench's rows."""
    figures = {"method": method.name, "lossless": method.lossless, **generation.metrics.figures()}
    value: dict[str, Any] = {"text": generation.text, "tokens": list(generation.tokens), "metrics": figures}
    if generation.request.params.logprobs:
        show = model.tokenizer.token_text
        value["logprobs"] = [
            {
                "token": one.token,
                "text": show(one.token),
                "logprob": one.logprob,
                "top": [{"token": token, "text": show(token), "logprob": logprob} for token, logprob in one.top],
            }
            for one in generation.logprobs
        ]
    if interrupted:
        value["complete"] = False
    return value


def status(method: Method, generation: Generation) -> str:
    """The line under an answer."""
    figures = generation.metrics.figures()
    parts = [f"{method.name}: {figures['tokens']} tokens"]
    if figures["decode_tokens_per_second"]:
        parts.append(f"{figures['decode_tokens_per_second']:.1f} tokens/s")
    if figures["mean_acceptance_length"]:
        parts.append(f"{figures['mean_acceptance_length']:.2f} tokens a round")
    if figures["ttft_ms"]:
        parts.append(f"first after {figures['ttft_ms']:.0f} ms")
    return ", ".join(parts)


def _print_logprobs(model: Model, generation: Generation) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("token", "logprob", "likeliest"):
        table.add_column(heading, no_wrap=heading != "likeliest")
    show = model.tokenizer.token_text
    for one in generation.logprobs:
        top = "  ".join(f"{show(token)!r} {logprob:.2f}" for token, logprob in one.top)
        table.add_row(escape(repr(show(one.token))), f"{one.logprob:.3f}", escape(top))
    out().print()
    out().print(table)


def _print_nothing() -> None:
    """The JSON of an answer that was interrupted before its first token."""
    from outpace.core.metrics import RequestMetrics

    print_json({"text": "", "tokens": [], "metrics": RequestMetrics().figures(), "complete": False})
