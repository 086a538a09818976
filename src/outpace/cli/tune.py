"""``outpace tune``: fit a method to a model and to your prompts, once, and keep what was found in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outpace.cli.options as opt
from outpace.cli.output import check_writable, err, out, print_json, to_json, write_whole
from outpace.cli.session import Machine
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.drafting.skip_tuning import Tuning
    from outpace.model import Model

TUNED = ("dv",)


def tune(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="The method to tune: dv.")],
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to keep what is found.")],
    model: opt.ModelName = "smollm2",
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts like those to come; default: embedded.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Prompts to take, spread over the tasks.")] = 8,
    max_new_tokens: opt.MaxNewTokens = 64,
    length: Annotated[int, typer.Option("--length", metavar="N", help="Most draft tokens a round.")] = 8,
    trials: Annotated[int, typer.Option("--trials", metavar="N", help="Sets to try, those of a file included.")] = 100,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: opt.Seed = 0,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Search for the sublayers that a method skips; Ctrl-C keeps what was found, the same command goes on."""
    if method not in TUNED:
        raise BadInput(f"method '{method}' is not tuned beforehand; this is for {', '.join(TUNED)}")
    opt.check_length(max_new_tokens)
    for name, value in (("trials", trials), ("length", length), ("limit", limit)):
        if value < 1:
            raise BadInput(f"--{name} must be at least 1, not {value}")
    check_writable(output)
    from outpace.drafting.layer_skips import read_record
    from outpace.prompts.questions import load_prompts

    record = read_record(output) if output.exists() and output.stat().st_size else None
    texts = [prompt.turns[0] for prompt in load_prompts(prompts, limit)]
    machine = Machine(model, None, dtype, device, threads)
    machine.check()
    loaded, _ = machine.load()
    tuning = _tuning(loaded, texts, max_new_tokens, length, seed, record)
    try:
        _search(tuning, trials, output)
    except KeyboardInterrupt:
        err().print(f"[dim]stopped after {tuning.done} sets, kept in {output}; the same command goes on")
        raise
    finally:
        tuning.beginnings.close()
    found = {key: value for key, value in tuning.record.items() if key not in ("trials", "costs")}
    if json:
        print_json(found | {"trials": tuning.done, "file": str(output)})
    else:
        _show(found, tuning.done, output)


def _tuning(
    model: Model, texts: list[str], max_new_tokens: int, length: int, seed: int, record: dict[str, Any] | None
) -> Tuning:
    """The prompts answered greedily, and the search over them."""
    from outpace.drafting.skip_tuning import Beginnings, Tuning
    from outpace.engine.decoder import Decoder
    from outpace.engine.request import Request

    answers = []
    with _bar() as progress:
        task = progress.add_task("answering prompts", total=len(texts))
        for text in texts:
            prompt = model.tokenizer.chat([{"role": "user", "content": text}])
            decoder = Decoder(model.target)
            request = Request(
                tuple(prompt), model.method("none"), max_new_tokens=max_new_tokens, stop_ids=model.eos_ids
            )
            generation = decoder.submit(request)
            decoder.run()
            answers.append((prompt, generation.tokens))
            progress.advance(task)
    return Tuning(Beginnings(model.target, answers, length), model.name, seed=seed, record=record)


def _search(tuning: Tuning, trials: int, output: Path) -> None:
    with _bar() as progress:
        task = progress.add_task("", total=trials, completed=tuning.done)
        while tuning.done < trials:
            tuning.step()
            write_whole(output, lambda path: _write(path, to_json(tuning.record) + "\n"))
            best = tuning.record["tokens_per_second"] / tuning.plain
            progress.update(task, completed=tuning.done, description=f"best so far {best:.2f}x plain decoding")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _bar() -> Progress:
    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _show(found: dict[str, Any], trials: int, output: Path) -> None:
    console = out()
    ratio = found["tokens_per_second"] / found["plain_tokens_per_second"]
    console.print(f"[bold cyan]dv[/]  {ratio:.2f}x plain decoding expected, after {trials} sets")
    console.print(f"  attention skipped in layers {found['attention']}, MLP in layers {found['mlp']}", soft_wrap=True)
    console.print(f"  best with {found['length']} draft tokens a round")
    if ratio < 1.0:
        console.print("  [yellow]no set that was tried pays on this model and machine: plain decoding is faster[/]")
    settings = f"--param skips={output} --param num_draft_tokens={found['length']}"
    console.print(f"  [dim]use it: outpace generate ... --method dv {settings}", soft_wrap=True)
