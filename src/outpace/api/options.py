"""The options of generate, stream and chat: each name, its type, its default and its meaning, in one place.

Functions that take them are written with ``**options: Unpack[GenerateOptions]``, so that a type checker knows the
names, and decorated with :func:`with_options`, so that ``help()`` and ``inspect.signature`` show them. To add one, add
a field to :class:`Options` and to :class:`~outpace.api.chosen.Chosen`, which reads them.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

from outpace.acceptance.base import AcceptanceRule
from outpace.constraints.grammar import DEFAULT_LIMITS, Grammar, GrammarLimits
from outpace.controllers.registry import ControllerChoice
from outpace.core.future_validity import ConstraintWeighting
from outpace.core.processors import LogitsProcessor
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.named_weights import DraftModels, Heads

F = TypeVar("F", bound=Callable[..., Any])
ForeignProcessor = Callable[..., Any]
"""A transformers LogitsProcessor, or a plain callable: see :mod:`outpace.api.processor_forms`."""


@dataclass(frozen=True, slots=True)
class Option:
    """What an option is when it is not given, and what it means."""

    default: Any
    text: str


@dataclass(frozen=True, slots=True)
class OtherName:
    """Another name of an option, with the same meaning."""

    option: str


class Options(TypedDict, total=False):
    """What generate, stream and chat take."""

    max_new_tokens: Annotated[int, Option(256, "maximum number of new tokens.")]
    max_length: Annotated[
        int | None, Option(None, "maximum length of prompt and answer together, instead of max_new_tokens.")
    ]
    temperature: Annotated[float, Option(0.0, "0 takes the most likely token (greedy); 1 is the model's distribution.")]
    top_k: Annotated[int, Option(0, "keep the k most likely tokens; 0 or -1 is off.")]
    top_p: Annotated[float, Option(1.0, "keep the smallest set of tokens with this total probability; 1 is off.")]
    min_p: Annotated[float, Option(0.0, "keep tokens with at least this fraction of the top probability; 0 is off.")]
    do_sample: Annotated[
        bool | None, Option(None, "False is temperature 0; True samples, at temperature 1 unless one is given.")
    ]
    seed: Annotated[int | None, Option(None, "repeats a sampled answer; None draws one, and the result reports it.")]
    repetition_penalty: Annotated[float, Option(1.0, "above 1 discourages tokens of prompt and answer; 1 is off.")]
    presence_penalty: Annotated[float, Option(0.0, "subtracted from the logits of tokens that the answer contains.")]
    frequency_penalty: Annotated[
        float, Option(0.0, "subtracted from a token's logit once for each occurrence in the answer.")
    ]
    logit_bias: Annotated[Mapping[int, float], Option({}, "token id -> value added to its logit; -inf bans the token.")]
    processors: Annotated[
        LogitsProcessor | ForeignProcessor | Sequence[LogitsProcessor | ForeignProcessor],
        Option((), "logits processors: outpace's, those of transformers, or functions (token ids, logits) -> logits."),
    ]
    grammar: Annotated[
        Grammar | Mapping[str, Any] | Sequence[str] | str | None,
        Option(
            None,
            "what the answer must look like: an outpace.Grammar, a JSON schema (a dict or a pydantic model's class), a "
            "list of choices, or a Lark grammar (a text).",
        ),
    ]
    constraint_weighting: Annotated[
        ConstraintWeighting | str,
        Option(
            "masked",
            "how the tokens that the grammar allows are weighted: masked (not at all), fvo (by the probability that an "
            "answer goes on validly, exact where its answers can be enumerated), fvo-exact or fvo-one-step.",
        ),
    ]
    grammar_limits: Annotated[
        GrammarLimits, Option(DEFAULT_LIMITS, "bounds on the size of a grammar, and on the time to compile it.")
    ]
    stop: Annotated[
        str | Sequence[str], Option((), "one or more strings; the answer ends before the first that occurs.")
    ]
    ignore_eos: Annotated[bool, Option(False, "go on after the end-of-sequence token, to the length limit.")]
    eos_token_id: Annotated[
        int | Sequence[int] | None, Option(None, "ids that end an answer, instead of the model's own.")
    ]
    stop_token_ids: Annotated[Sequence[int], Option((), "ids that end an answer, in addition to the model's own.")]
    logprobs: Annotated[
        bool | int,
        Option(
            False, "return log-probabilities of the answer's tokens; an integer k adds the k most likely alternatives."
        ),
    ]
    top_logprobs: Annotated[int, Option(0, "the same k, as OpenAI's API names it.")]
    num_beams: Annotated[
        int,
        Option(
            1,
            "above 1: beam search with so many beams; at a temperature above 0 stochastic beams. n of them are "
            "returned.",
        ),
    ]
    length_penalty: Annotated[
        float, Option(1.0, "of beam search: a beam is ranked by its log-probability / its length ** length_penalty.")
    ]
    early_stopping: Annotated[
        bool | str,
        Option(
            False,
            'of beam search: True ends when num_beams answers have ended, False when none that runs is better, "never" '
            "when none could become better.",
        ),
    ]
    best_of: Annotated[
        int | None,
        Option(None, "decode so many samples, and return the n with the highest mean log-probability of a token."),
    ]
    method: Annotated[str | Method, Option(DEFAULT_METHOD, "how to draft; `outpace methods` lists the names.")]
    settings: Annotated[Mapping[str, Any], Option({}, "the method's settings; `outpace methods NAME` lists them.")]
    rule: Annotated[
        str | AcceptanceRule | None,
        Option(None, "acceptance rule, instead of the method's own; `outpace rules` lists the names."),
    ]
    rule_settings: Annotated[Mapping[str, Any], Option({}, "the rule's settings; `outpace rules NAME` lists them.")]
    controller: Annotated[
        str | ControllerChoice | None,
        Option(None, "decides how much is drafted, instead of the method's own; `outpace controllers` lists them."),
    ]
    controller_settings: Annotated[
        Mapping[str, Any], Option({}, "the controller's settings; `outpace controllers NAME` lists them.")
    ]
    draft_model: Annotated[
        DraftModels, Option(None, "a smaller model, or several by name, for methods that use a draft model.")
    ]
    head: Annotated[Heads, Option(None, "folder of a trained head, or several by name.")]
    datastore: Annotated[
        str | Path | None, Option(None, "a corpus that `outpace datastore build` made, for methods that copy from one.")
    ]
    references: Annotated[str | Sequence[str], Option((), "one or more texts that drafters may copy from.")]
    namespace: Annotated[str | None, Option(None, "keep what the method learns under this name, for later requests.")]
    raw: Annotated[bool, Option(False, "continue a text as it is, without the chat template.")]
    params: Annotated[
        SamplingParams | None, Option(None, "sampling parameters in one object; options that are given override it.")
    ]


class OtherNames(TypedDict, total=False):
    """Names that users of other libraries type."""

    max_tokens: Annotated[int, OtherName("max_new_tokens")]
    max_completion_tokens: Annotated[int, OtherName("max_new_tokens")]
    weighting: Annotated[ConstraintWeighting | str, OtherName("constraint_weighting")]
    stop_sequences: Annotated[str | Sequence[str], OtherName("stop")]
    stop_strings: Annotated[str | Sequence[str], OtherName("stop")]
    logits_processor: Annotated[Any, OtherName("processors")]
    logits_processors: Annotated[Any, OtherName("processors")]
    sampling_params: Annotated[SamplingParams, OtherName("params")]
    use_cache: Annotated[bool, Option(True, "")]
    pad_token_id: Annotated[int | None, Option(None, "")]


class GenerateOptions(Options, OtherNames, total=False):
    """All names that are accepted."""


@cache
def options() -> dict[str, tuple[Any, Option]]:
    """Every option's type and declaration, by name."""
    return {name: get_args(hint) for name, hint in get_type_hints(Options, include_extras=True).items()}


@cache
def other_names() -> dict[str, str]:
    """Other names, and the options that they mean."""
    hints = get_type_hints(OtherNames, include_extras=True)
    found = {name: get_args(hint)[-1] for name, hint in hints.items()}
    return {name: said.option for name, said in found.items() if isinstance(said, OtherName)}


def with_options(function: F) -> F:
    """Let the signature and the docstring of a function with ``**options`` name every option."""
    signature = inspect.signature(function, eval_str=False)
    hints = get_type_hints(function)
    own = [one.replace(annotation=hints.get(one.name, one.annotation)) for one in signature.parameters.values()]
    own = [one for one in own if one.kind is not one.VAR_KEYWORD]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind)
        for name, (kind, option) in options().items()
    ]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *named], return_annotation=hints.get("return", signature.return_annotation)
    )
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{_described()}"
    return function


@cache
def _described() -> str:
    """The options in words, for docstrings."""
    lines = ["Options:"]
    for name, (_, option) in options().items():
        lines += textwrap.wrap(f"{name}: {option.text}", 110, initial_indent="    ", subsequent_indent="        ")
    also = ", ".join(f"{name} ({option})" for name, option in other_names().items())
    lines += textwrap.wrap(
        f"Also understood: {also}; use_cache=True and pad_token_id, which change nothing here. None for "
        "an option is the same as leaving it out.",
        114,
    )
    return "\n".join(lines)
