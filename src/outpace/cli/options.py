"""The options that several commands share, and the reading of their values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.core.errors import BadInput
from outpace.core.machine import usable_cpus

_SAMPLING = "Sampling"
_DRAFTING = "Drafting"
_MACHINE = "Machine"

ModelName = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME", help="Hub id, folder, GGUF file, or 'smollm2' (embedded)."),
]
MethodName = Annotated[
    str, typer.Option("--method", metavar="NAME", rich_help_panel=_DRAFTING, help="How to draft; see: outpace methods.")
]
DraftModel = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-model",
        metavar="NAME",
        rich_help_panel=_DRAFTING,
        help="Smaller model, for methods that draft with one; may be repeated for those that take several.",
    ),
]
Head = Annotated[
    list[Path] | None,
    typer.Option(
        "--head",
        metavar="DIR",
        rich_help_panel=_DRAFTING,
        help="Trained head, for methods that draft with one; may be repeated. [dim]\\[default: shipped ones][/]",
    ),
]
Datastore = Annotated[
    Path | None,
    typer.Option(
        "--datastore",
        metavar="PATH",
        rich_help_panel=_DRAFTING,
        help="Corpus to copy from, for methods that do; built by: outpace datastore build.",
    ),
]
Reference = Annotated[
    list[Path] | None,
    typer.Option(
        "--reference",
        metavar="FILE",
        rich_help_panel=_DRAFTING,
        help="Text that drafters may copy from; may be repeated.",
    ),
]
Param = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="KEY=VALUE",
        rich_help_panel=_DRAFTING,
        help="A method's setting, or METHOD.KEY=VALUE for one method; may be repeated. See: outpace methods NAME.",
    ),
]
Rule = Annotated[
    str | None,
    typer.Option("--rule", metavar="NAME", rich_help_panel=_DRAFTING, help="Acceptance rule, instead of the method's."),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAME",
        rich_help_panel=_DRAFTING,
        help="Keep what methods learn from one prompt for the next, under this name.",
    ),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the conversation.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text; may be repeated.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", metavar="N", help="Length limit of an answer.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on to the length limit.")]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", metavar="X", rich_help_panel=_SAMPLING, help="0 is greedy.")
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="N", rich_help_panel=_SAMPLING, help="Keep the N likeliest tokens; 0 is off.")
]
TopP = Annotated[
    float,
    typer.Option("--top-p", metavar="X", rich_help_panel=_SAMPLING, help="Keep the smallest set of mass X; 1 is off."),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", metavar="X", rich_help_panel=_SAMPLING, help="Keep tokens of at least X times the top probability."
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", metavar="X", rich_help_panel=_SAMPLING, help="Above 1 discourages repeats; 1 is off."
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", metavar="X", rich_help_panel=_SAMPLING, help="Off every token already used."),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option("--frequency-penalty", metavar="X", rich_help_panel=_SAMPLING, help="Off a token for each use of it."),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="TOKEN=BIAS",
        rich_help_panel=_SAMPLING,
        help="Add BIAS to a token id's logit; may be repeated.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", rich_help_panel=_SAMPLING, help="Same seed, same answer.")]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", rich_help_panel=_MACHINE, help="CPU threads to compute with.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        rich_help_panel=_MACHINE,
        help="float32, bfloat16, float16, int8, int4 (a GGUF file's own blocks) or auto (as stored); default: int4 for "
        "such a file on a CPU, otherwise the device's quickest.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        rich_help_panel=_MACHINE,
        help="cpu, cuda, ...; default: a GPU, if there is one.",
    ),
]


def check_length(max_new_tokens: int) -> None:
    """Raise BadInput for a length that leaves nothing to generate."""
    if max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens must be at least 1, not {max_new_tokens}")


def check_threads(threads: int | None) -> None:
    """Raise BadInput for a number of threads that this machine does not have."""
    have = usable_cpus()
    if threads is not None and not 1 <= threads <= have:
        raise BadInput(f"--threads must be between 1 and {have} (this machine's), not {threads}")


def logit_bias(pairs: Sequence[str] | None) -> dict[int, float]:
    """``TOKEN=BIAS`` pairs. Raises BadInput for what is not a token id and a number."""
    biases: dict[int, float] = {}
    for pair in pairs or ():
        token, sign, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise BadInput(f"--logit-bias takes TOKEN=BIAS, a token id and a number, not '{pair}'") from None
        if not sign or math.isnan(biases[int(token)]):
            raise BadInput(f"--logit-bias takes TOKEN=BIAS, a token id and a number, not '{pair}'")
    return biases


def settings_by_method(pairs: Sequence[str] | None, known: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Any]]:
    """``--param`` values for each chosen method. ``known``: the settings that each of them has.

    ``key=value`` goes to every method that has the key, ``method.key=value`` to that one. Raises BadInput for a key
    that no chosen method has.
    """
    settings: dict[str, dict[str, Any]] = {name: {} for name in known}
    for pair in pairs or ():
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise BadInput(f"--param takes KEY=VALUE or METHOD.KEY=VALUE, not '{pair}'")
        method, dot, inner = key.partition(".")
        wanted = [method] if dot else list(known)
        if dot and method not in known:
            raise BadInput(f"--param {pair}: method '{method}' is not among those chosen ({', '.join(known)})")
        setting = inner if dot else key
        takers = [name for name in wanted if setting in known[name]]
        if not takers:
            have = "; ".join(f"{name}: {', '.join(known[name]) or 'none'}" for name in wanted)
            raise BadInput(f"--param {pair}: no chosen method has the setting '{setting}' (settings of {have})")
        for name in takers:
            settings[name][setting] = _value(pair, text)
    return settings


def _value(pair: str, text: str) -> Any:
    """Numbers and words are read by the setting's own type; lists and objects are JSON."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise BadInput(f"--param {pair}: the value is not valid JSON") from None
