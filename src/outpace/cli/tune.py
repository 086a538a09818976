"""``outpace tune``: fit a method to a model and to your prompts, and keep the result in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import options as opt
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import Interrupted
from outpace.cli.options import option
from outpace.cli.output import check_writable, out, print_json, to_json, write_whole
from outpace.cli.session import Machine
from outpace.core.errors import BadInput
from outpace.core.progress import stage

if TYPE_CHECKING:
    from outpace.drafting.skip_tuning import Tuning
    from outpace.model import Model


@grouped(limit=8)
def tune(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="Method to tune: draft-verify.")],
    output: Annotated[Path, option("--out", "-o", value="FILE", text="File for the result.")],
    machine: Machine,
    *,
    prompts: opt.PromptFile,
    max_new_tokens: opt.MaxNewTokens = 64,
    length: Annotated[
        int, option("--num-draft-tokens", "--length", value="N", text="Maximum number of draft tokens per round.")
    ] = 8,
    trials: Annotated[int, option(value="N", text="Number of sets to try, including those of a resumed run.")] = 100,
    resume: opt.Resume = False,
    json: opt.Json = False,
    seed: opt.Seed = 0,
) -> None:
    """Search for the best sublayers to skip while drafting. Ctrl-C keeps the results; --resume continues the search."""
    from outpace.methods.registry import find, methods

    info = find(method)
    if "skips" not in info.setting_names():
        tuned = ", ".join(one.name for one in methods() if "skips" in one.setting_names())
        raise BadInput(f"method '{info.name}' cannot be tuned; methods that can: {tuned}")
    opt.check_length(max_new_tokens)
    for flag, value in (("trials", trials), ("num-draft-tokens", length)):
        if value < 1:
            raise BadInput(f"--{flag} must be at least 1, not {value}")
    check_writable(output)
    from outpace.drafting.layer_skips import read_record

    record = read_record(output) if output.exists() and output.stat().st_size else None
    if record is not None and not resume:
        raise BadInput(f"{output} holds a search already; continue it with --resume, or choose another file")
    texts = [prompt.turns[0] for prompt in prompts.read_unconstrained("tune")]
    machine.check()
    tuning = _tuning(machine.load(), texts, max_new_tokens, length, seed, record)
    try:
        _search(tuning, trials, output)
    finally:
        tuning.beginnings.close()
    found = {key: value for key, value in tuning.record.items() if key not in ("trials", "costs")}
    if json:
        print_json(found | {"trials": tuning.done, "file": str(output)})
    else:
        _show(info.name, found, tuning.done, output)


def _tuning(
    model: Model, texts: list[str], max_new_tokens: int, length: int, seed: int, record: dict[str, Any] | None
) -> Tuning:
    """The prompts answered greedily, and the search over them."""
    from outpace.bench.records import answer_together
    from outpace.drafting.skip_tuning import Beginnings, Tuning
    from outpace.engine.request import Request

    answers = []
    with stage("answering prompts", len(texts), "prompts") as at:
        for text in texts:
            prompt = model.tokenizer.chat([{"role": "user", "content": text}])
            request = Request(
                tuple(prompt), model.method("none"), max_new_tokens=max_new_tokens, stop_ids=model.eos_ids
            )
            answers.append((prompt, answer_together(model.target, [request])[0].tokens))
            at.move(len(answers))
    return Tuning(Beginnings(model.target, answers, length), model.name, seed=seed, record=record)


def _search(tuning: Tuning, trials: int, output: Path) -> None:
    with stage("trying sets", trials, "sets") as at:
        at.move(tuning.done)
        try:
            while tuning.done < trials:
                tuning.step()
                write_whole(output, lambda path: path.write_text(to_json(tuning.record) + "\n", encoding="utf-8"))
                best = tuning.record["tokens_per_second"] / tuning.plain
                at.move(tuning.done, detail=f"best so far {best:.2f}x autoregressive decoding")
        except KeyboardInterrupt:
            raise Interrupted.kept(f"{at.done:.0f} of {trials} sets", output) from None


def _show(method: str, found: dict[str, Any], trials: int, output: Path) -> None:
    console = out()
    ratio = found["tokens_per_second"] / found["plain_tokens_per_second"]
    console.print(
        f"[bold cyan]{method}[/]  {ratio:.2f}x the speed of autoregressive decoding expected, after {trials} sets"
    )
    console.print(f"  attention skipped in layers {found['attention']}, MLP in layers {found['mlp']}", soft_wrap=True)
    console.print(f"  best number of draft tokens per round: {found['length']}")
    if ratio < 1.0:
        console.print("  [yellow]no set was faster than autoregressive decoding on this model and machine[/]")
    settings = f"--param skips={output} --param num_draft_tokens={found['length']}"
    console.print(f"  [dim]to use it: outpace generate ... --method {method} {settings}", soft_wrap=True)
