"""Options that more than one command has, declared once; groups that load models are in :mod:`outpace.cli.session`.

To add a sampling parameter, add a field to SamplingParams and one of that name to Sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.machine import usable_cpus
from outpace.core.names import did_you_mean, split_outside_brackets
from outpace.core.text import check_text
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts

if TYPE_CHECKING:
    from outpace.constraints.grammar import Grammar, GrammarLimits
    from outpace.core.future_validity import ConstraintWeighting
    from outpace.core.sampling import SamplingParams

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def option(*flags: str, value: str | None = None, panel: str | None = None, text: str) -> Any:
    """An option's declaration. ``value``: what stands for its value in the help; flags have none. ``panel``: group."""
    return typer.Option(*flags, metavar=value or "", rich_help_panel=panel, help=text)


DRAFTING, SAMPLING, GRAMMAR, MACHINE = "Drafting", "Sampling", "Grammar", "Machine"

ModelName = Annotated[
    str, option("--model", "-m", value="NAME", text="Hub id, folder, GGUF file, or 'smollm2' (embedded).")
]
DraftModel = Annotated[
    list[str] | None,
    option(
        value="MODEL",
        panel=DRAFTING,
        text="Draft model, or folder of a draft-lm head, for methods that use one. NAME=MODEL names it for "
        "METHOD#NAME. May be repeated. [dim]\\[default: the shipped draft-lm, if any][/]",
    ),
]
Head = Annotated[
    list[str] | None,
    option(
        value="DIR",
        panel=DRAFTING,
        text="Trained head, for methods that use one. NAME=DIR names it for METHOD#NAME. May be repeated. "
        "[dim]\\[default: the shipped heads][/]",
    ),
]
MethodName = Annotated[
    str, option("--method", value="NAME", panel=DRAFTING, text="Speculation method; see: outpace methods.")
]
Reference = Annotated[
    list[Path] | None,
    option(value="FILE", panel=DRAFTING, text="Text file that drafters may copy from; may be repeated."),
]
Namespace = Annotated[
    str | None,
    option(
        value="NAME",
        panel=DRAFTING,
        text="Keep what a method learns across requests, under this name. [dim]\\[default: nothing is kept; in chat, "
        "as long as the conversation lasts][/]",
    ),
]
Param = Annotated[
    list[str] | None,
    option(
        value="KEY=VALUE",
        panel=DRAFTING,
        text="Setting of the methods (num_draft_tokens, topk, depth, max_nodes, ...); METHOD.KEY=VALUE for one method. "
        "May be repeated. See: outpace methods NAME.",
    ),
]
RuleParam = Annotated[
    list[str] | None,
    option(
        "--rule-param",
        value="KEY=VALUE",
        panel=DRAFTING,
        text="Setting of the rule that --rule names. May be repeated. See: outpace rules NAME.",
    ),
]
ControllerName = Annotated[
    str | None,
    option(
        value="NAME",
        panel=DRAFTING,
        text="Decides how much is drafted, in place of the method's own; see: outpace controllers.",
    ),
]
ControllerParam = Annotated[
    list[str] | None, option(value="KEY=VALUE", panel=DRAFTING, text="Setting of the controller; may be repeated.")
]
System = Annotated[str | None, option(value="TEXT", text="System message.")]
Stop = Annotated[list[str] | None, option(value="TEXT", text="Stop before this text; may be repeated.")]
MaxNewTokens = Annotated[
    int, option("--max-new-tokens", "-n", value="N", text="Maximum number of tokens in an answer.")
]
IgnoreEos = Annotated[
    bool, option("--ignore-eos", text="Ignore end-of-sequence tokens: every answer has --max-new-tokens tokens.")
]


def resume_option(panel: str | None = None) -> Any:
    """The option --resume, which means the same for every command that has it."""
    return option("--resume", panel=panel, text="Continue the interrupted run in --out.")


Resume = Annotated[bool, resume_option()]
TraceFile = Annotated[
    Path | None,
    option(
        value="FILE",
        text="Write what every round drafted, committed and took as JSON lines, without text, for outpace simulate.",
    ),
]
TraceTexts = Annotated[bool, option("--trace-texts", text="Include prompts and answers in the file of --trace.")]
Json = Annotated[bool, option("--json", text="Print JSON instead of text.")]
Seed = Annotated[int, option(value="N", panel=SAMPLING, text="Same seed, same answer.")]
FixedCosts = Annotated[
    bool,
    option(
        "--fixed-costs",
        panel=MACHINE,
        text="Choose draft lengths by nominal costs instead of measured ones, so that a seed gives the same sampled "
        "answer on every machine. [dim]\\[default: costs measured once on this machine][/]",
    ),
]
KvDtype = Annotated[
    str,
    option(
        "--kv-dtype",
        value="NAME",
        panel=MACHINE,
        text="Format of the context's keys and values: auto (16 bits; 32 in float32) or int8 (half the memory, rounds "
        "more; on a CPU).",
    ),
]
Threads = Annotated[int | None, option(value="N", panel=MACHINE, text="Number of CPU threads.")]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: the fields of SamplingParams that a command line can give."""

    temperature: Annotated[
        float,
        option("--temperature", "-t", value="X", panel=SAMPLING, text="Sampling temperature; 0 is greedy decoding."),
    ] = 0.0
    top_k: Annotated[int, option(value="N", panel=SAMPLING, text="Keep the N most likely tokens; 0 is off.")] = 0
    top_p: Annotated[
        float, option(value="X", panel=SAMPLING, text="Keep the smallest set of total probability X; 1 is off.")
    ] = 1.0
    min_p: Annotated[
        float,
        option(value="X", panel=SAMPLING, text="Keep tokens with at least X times the highest probability; 0 is off."),
    ] = 0.0
    repetition_penalty: Annotated[
        float, option(value="X", panel=SAMPLING, text="Values above 1 discourage repetition; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, option(value="X", panel=SAMPLING, text="Subtracted from the logit of every token that has occurred.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, option(value="X", panel=SAMPLING, text="Subtracted from a token's logit for each occurrence.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        option(value="TOKEN=BIAS", panel=SAMPLING, text="Add BIAS to a token id's logit; may be repeated."),
    ] = None
    seed: Annotated[
        int | None,
        option(
            value="N",
            panel=SAMPLING,
            text="Repeat a sampled answer. [dim]\\[default: drawn and shown; 0 for bench, certify][/]",
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether anything but the seed was asked for; a command's own default temperature is None."""
        own = [one for one in fields(self) if one.name not in ("seed", "temperature")]
        return self.temperature is not None or any(getattr(self, one.name) != one.default for one in own)

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters, with ``more`` of their fields. Raises BadInput for values out of range."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["logit_bias"] = logit_bias(self.logit_bias)
        from outpace.core.sampling import SamplingParams  # imports torch

        return SamplingParams(**given | more)


@dataclass(frozen=True, slots=True)
class GrammarBounds:
    """Bounds on the grammars that are compiled."""

    grammar_bytes: Annotated[
        int, option(value="N", panel=GRAMMAR, text="Refuse grammars and schemas with more bytes.")
    ] = 1_000_000
    grammar_seconds: Annotated[
        float, option(value="X", panel=GRAMMAR, text="Refuse grammars that take longer to compile.")
    ] = 5.0

    @property
    def limits(self) -> GrammarLimits:
        """The bounds. Raises BadInput for values out of range."""
        from outpace.constraints.grammar import GrammarLimits

        return GrammarLimits(self.grammar_bytes, self.grammar_seconds)


@dataclass(frozen=True, slots=True)
class Constrained(GrammarBounds):
    """What answers must look like: one of a schema, a regular expression, a grammar and choices."""

    schema: Annotated[
        str | None, option(value="FILE_OR_JSON", panel=GRAMMAR, text="Answer in JSON that this schema describes.")
    ] = None
    regex: Annotated[
        str | None, option(value="R", panel=GRAMMAR, text="Answer in text that matches this regular expression.")
    ] = None
    grammar: Annotated[
        Path | None,
        option(
            value="FILE", panel=GRAMMAR, text="Answer in text of this grammar: Lark syntax, or GBNF (root ::= ...)."
        ),
    ] = None
    choice: Annotated[
        list[str] | None,
        option(value="TEXT", panel=GRAMMAR, text="Answer with one of these texts; given once for each."),
    ] = None
    constraint_weighting: Annotated[
        str,
        option(
            value="NAME",
            panel=GRAMMAR,
            text="How allowed tokens are weighted: masked (not at all); fvo (by the probability that the model goes on "
            "validly: exact where the answers can be enumerated, else estimated one step ahead); fvo-exact; "
            "fvo-one-step. With settings: fvo(max_nodes=4096).",
        ),
    ] = "masked"

    @property
    def weighting(self) -> ConstraintWeighting:
        """How allowed tokens are weighted. Raises BadInput for what does not exist."""
        from outpace.core.future_validity import ConstraintWeighting

        return ConstraintWeighting.read(self.constraint_weighting)

    def read(self) -> Grammar | None:
        """The grammar; None where none is given. Raises BadInput for several, and for what cannot be read."""
        from outpace.constraints.grammar import Grammar

        given = {
            name: value
            for name in ("schema", "regex", "grammar", "choice")
            if (value := getattr(self, name)) not in (None, [])
        }
        if len(given) > 1:
            raise BadInput(f"{' and '.join(f'--{name}' for name in given)} contradict each other; give one of them")
        if self.schema is not None:
            text = self.schema.strip()
            written = text[:1] in ("{", "[") or text in ("true", "false")
            return Grammar.schema(text if written else _file(Path(self.schema), "--schema"))
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.grammar is not None:
            return Grammar.lark(_file(self.grammar, "--grammar"))
        return Grammar.choice(self.choice) if self.choice else None


def _file(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} {path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise BadInput(f"cannot read {name} {path}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts that a command decodes."""

    prompts: Annotated[
        Path | None,
        option(
            value="FILE",
            text="Prompts: Spec-Bench questions, JSONL, JSON or plain text; or a name: structured (60 prompts with "
            "grammars), software (18 about code), code-editing, ... [dim]\\[default: embedded set][/]",
        ),
    ] = None
    limit: Annotated[int | None, option(value="N", text="Use only N prompts, taken from all categories in turn.")] = (
        None
    )

    def read(self, default: str | None = None) -> list[Prompt]:
        """The prompts, where none are named those of the set ``default``. Raises BadInput for a file that holds none,
        and a limit below 1."""
        return load_prompts(self.prompts or default, self.limit)


def check_length(max_new_tokens: int) -> None:
    """Raise BadInput for a length that leaves nothing to generate."""
    if max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens must be at least 1, not {max_new_tokens}")


def check_trace(trace: Path | None, texts: bool) -> None:
    """Raise BadInput for texts of a trace that is not written."""
    if texts and trace is None:
        raise BadInput("--trace-texts adds to the lines of --trace; give that too")


def check_texts(system: str | None, stop: Sequence[str] | None) -> None:
    """Raise BadInput for a system message or a stop string that is not valid text."""
    check_text(system or "", "--system")
    for one in stop or ():
        check_text(one, "--stop")


def check_threads(threads: int | None) -> None:
    """Raise BadInput for a number of threads that this machine does not have."""
    have = usable_cpus()
    if threads is not None and not 1 <= threads <= have:
        raise BadInput(f"--threads must be between 1 and {have} (this machine's), not {threads}")


def names(text: str | None) -> list[str]:
    """The names in a list with commas; those in brackets belong to one name."""
    return split_outside_brackets(text or "")


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


def settings_by_method(
    pairs: Sequence[str] | None, known: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, Any]]:
    """``--param`` values for each chosen method.

    ``known``: for each method, what may be written and the setting that it means. ``key=value`` goes to every method
    that has the key, ``method.key=value`` to that one. Raises BadInput for a key that no chosen method has.
    """
    settings: dict[str, dict[str, Any]] = {name: {} for name in known}
    for pair in pairs or ():
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise BadInput(f"--param takes KEY=VALUE or METHOD.KEY=VALUE, not '{pair}'")
        method, dot, setting = key.rpartition(".")
        wanted = [method] if dot else list(known)
        if dot and method not in known:
            near = did_you_mean(method, known) or f"chosen: {', '.join(known)}"
            raise BadInput(f"--param {pair}: method '{method}' is not among the chosen ones; {near}")
        takers = [name for name in wanted if setting in known[name]]
        if not takers:
            have = "; ".join(f"{name}: {', '.join(dict.fromkeys(known[name].values())) or 'none'}" for name in wanted)
            near = did_you_mean(setting, {one: meant for name in wanted for one, meant in known[name].items()})
            hint = f"; {near}" if near else ""
            raise BadInput(f"--param {pair}: no chosen method has the setting '{setting}'{hint} (settings of {have})")
        for name in takers:
            settings[name][known[name][setting]] = _value(pair, text)
    return settings


def key_values(flag: str, pairs: Sequence[str] | None) -> dict[str, str]:
    """KEY=VALUE pairs of ``flag``. Raises BadInput for what has another form, and for a key that is given twice."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise BadInput(f"{flag} takes KEY=VALUE, not '{pair}'")
        if key in found:
            raise BadInput(f"{flag} gives '{key}' twice; give it once")
        found[key] = text
    return found


def rule_settings(pairs: Sequence[str] | None) -> dict[str, Any]:
    """``--rule-param`` values by key. Raises BadInput as :func:`key_values`, and for invalid JSON."""
    return {key: _value(f"{key}={text}", text) for key, text in key_values("--rule-param", pairs).items()}


def sweeps(given: Sequence[str]) -> dict[str, list[Any]]:
    """``--sweep KEY=V1,V2,...`` by KEY, which may be METHOD.KEY; values that hold commas as a JSON list.

    Raises BadInput for what has another form, and for a key that is given twice.
    """
    found: dict[str, list[Any]] = {}
    for pair in given:
        key, sign, text = pair.partition("=")
        values = _value(pair, text) if text.startswith("[") else names(text)
        if not sign or not key or not values:
            raise BadInput(f"--sweep takes KEY=V1,V2,... or METHOD.KEY=V1,V2,..., not '{pair}'")
        if key in found:
            raise BadInput(f"--sweep gives '{key}' twice; list all its values once")
        found[key] = values
    return found


def _value(pair: str, text: str) -> Any:
    """Numbers and words are read by the setting's own type; lists and objects are JSON."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        key = pair.partition("=")[0]  # the value may be long
        raise BadInput(f"--param {key}: the value is not valid JSON: {error}") from None
