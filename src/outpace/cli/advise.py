"""``outpace advise``: which method to decode with, before anything is decoded with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outpace.cli import options as opt
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.output import check_writable, err, out, print_json, write_whole
from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput
from outpace.core.names import unknown

if TYPE_CHECKING:
    from outpace.advice.round_costs import RoundCosts


@grouped()
def advise(
    machine: Machine,
    engine: Annotated[
        str, option(value="NAME", text="Engine that will decode: outpace, vllm, sglang or llama.cpp.")
    ] = "outpace",
    prompts: Annotated[
        Path | None,
        option(
            value="FILE",
            text="Prompts like yours: Spec-Bench questions, JSONL, JSON or plain text. "
            "[dim]\\[default: embedded set][/]",
        ),
    ] = None,
    batch: Annotated[str, option(value="A,B,C", text="Numbers of requests that are decoded at once.")] = "1,4,16",
    temperature: Annotated[
        float, option("--temperature", "-t", value="X", text="Sampling temperature; 0 is greedy decoding.")
    ] = 0.0,
    head: opt.Head = None,
    draft_model: opt.DraftModel = None,
    minutes: Annotated[float, option(value="M", text="Time limit in minutes, without loading.")] = 5.0,
    max_new_tokens: opt.MaxNewTokens = 64,
    vllm_python: Annotated[
        str | None, option(value="PATH", text="Interpreter that has vLLM. [dim]\\[default: that of make vllm][/]")
    ] = None,
    json: opt.Json = False,
    html: Annotated[Path | None, option(value="FILE", text="Write the table behind the advice as a page.")] = None,
) -> None:
    """Recommend the method that is fastest on this machine, or none, with the expected speed-up at each batch size.

    Measures costs, and the acceptance of every candidate on the model's own answers to the prompts, in a few minutes.
    """
    from outpace.advice.candidates import ENGINES

    opt.check_length(max_new_tokens)
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if vllm_python is not None and engine != "vllm":
        raise BadInput("--vllm-python is for another engine; add --engine vllm")
    batches = _batches(batch)
    if not 0 < minutes < float("inf"):
        raise BadInput(f"--minutes must be above 0, not {minutes:g}")
    if html is not None:
        check_writable(html)
    machine.check()
    drafting = Drafting(head=head, draft_model=draft_model)
    drafting.check()
    questions = opt.PromptFile(prompts).read_unconstrained("advise")
    if engine == "vllm":
        from outpace.integrations.vllm.interpreter import find_interpreter

        _check_vllm(machine)
        find_interpreter(vllm_python)

    from outpace.advice.advising import advise as advised
    from outpace.advice.engine_commands import Typed
    from outpace.core.sampling import SamplingParams

    params, dtype = SamplingParams(temperature=temperature), _engine_dtype(machine, engine)
    model = machine.load()
    loaded = drafting.load(machine)

    def measured(sizes: Sequence[int]) -> Mapping[int, RoundCosts]:
        from outpace.advice.vllm_rounds import measure_vllm_rounds

        return measure_vllm_rounds(
            machine.model, sizes, params, python=vllm_python, threads=machine.threads, dtype=dtype
        )

    found = advised(
        model,
        questions,
        batches=batches,
        params=params,
        head=loaded["head"],
        draft_model=loaded["draft_model"],
        engine=engine,
        minutes=minutes,
        max_new_tokens=max_new_tokens,
        engine_costs=measured if engine == "vllm" else None,
        typed=Typed(
            machine.model, head or (), drafting.draft_places(), machine.words(), dtype=dtype, threads=machine.threads
        ),
    )
    if html is not None:
        write_whole(html, found.write_html)
        err().print(f"[dim]report: {html}", soft_wrap=True)
    if json:
        print_json(found.result)
    else:
        found.print(out())


def _engine_dtype(machine: Machine, engine: str) -> str:
    """The precision that other engines are told: the one that was named, or that vLLM is measured in; "": their own."""
    from outpace.bench.peers.weights import FLOATS

    if machine.dtype in FLOATS:
        return str(machine.dtype)
    return "bfloat16" if engine == "vllm" else ""


def _check_vllm(machine: Machine) -> None:
    """Raise BadInput for options of outpace under which vLLM's rounds cannot be measured."""
    from outpace.bench.peers.weights import FLOATS

    if machine.dtype is not None and machine.dtype not in FLOATS:
        raise BadInput(f"--dtype {machine.dtype}: rounds of vLLM are measured in {', '.join(FLOATS)}; name one of them")
    if machine.device is not None:
        raise BadInput("--device is for outpace alone: vLLM runs on the device that it was built for; leave it out")


def _batches(text: str) -> list[int]:
    try:
        found = [int(one) for one in opt.names(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise BadInput(f"--batch takes numbers of requests of at least 1, such as 1,4,16, not '{text}'")
    return found
