"""What a caller chose: options read, checked and brought into one form, whatever name and form they came in."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import configured_rule
from outpace.api.options import options, other_names
from outpace.api.processor_forms import read_processors
from outpace.constraints.grammar import DEFAULT_LIMITS, Grammar, GrammarLimits
from outpace.controllers.registry import ControllerChoice
from outpace.core.errors import BadInput, shown
from outpace.core.sampling import SamplingParams
from outpace.core.text import check_text
from outpace.engine.method import Method
from outpace.engine.populations.beam_options import BeamOptions
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.named_weights import DraftModels, Heads

_ACCELERATE = "outpace.accelerate(hf_model).generate takes transformers' arguments"
_NEUTRAL = {
    "num_beam_groups": (1, "diverse beam search is not supported"),
    "use_cache": (True, "decoding always keeps its K/V"),
    "return_dict_in_generate": (False, _ACCELERATE),
}
"""Names of transformers that are accepted at the one value that changes nothing."""
_ELSEWHERE = {
    "input_ids": "give the encoding as the prompt: generate(inputs); " + _ACCELERATE,
    "inputs": "give it as the prompt, the first argument",
    "prompts": "give them as the prompt, the first argument: a list of prompts is a batch",
    "messages": "give them as the prompt, the first argument",
    "attention_mask": "give the whole encoding as the prompt: generate(inputs); " + _ACCELERATE,
    "generation_config": _ACCELERATE,
    "streamer": "iterate over stream() instead; " + _ACCELERATE,
    "stream": "call stream() instead of generate()",
    "stopping_criteria": "use stop, stop_token_ids or max_new_tokens",
    "assistant_model": "load it with outpace.load and give draft_model=",
    "prompt_lookup_num_tokens": 'use method="pld"',
    "min_new_tokens": _ACCELERATE,
    "min_tokens": _ACCELERATE,
    "min_length": _ACCELERATE,
    "n": "only generate and agenerate return several samples",
    "num_return_sequences": "only generate and agenerate return several samples",
    "progress": "only generate and agenerate show progress",
}
"""Names of other libraries that mean something else here, and what to do."""
_SAMPLING = tuple(one.name for one in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The options of one call. ``params`` holds those that are sampling parameters."""

    params: SamplingParams
    method: str | Method
    settings: Mapping[str, Any]
    rule: str | AcceptanceRule | None
    rule_settings: Mapping[str, Any]
    """Those of ``rule``, which has them already."""
    controller: str | ControllerChoice | None
    controller_settings: Mapping[str, Any]
    draft_model: DraftModels
    head: Heads
    datastore: str | Path | None
    references: tuple[str, ...]
    namespace: str
    raw: bool
    max_new_tokens: int
    max_length: int | None
    grammar: Grammar | None
    grammar_limits: GrammarLimits
    stop: tuple[str, ...]
    ignore_eos: bool
    eos_token_id: frozenset[int] | None
    stop_token_ids: frozenset[int]
    beams: BeamOptions | None = None
    """None: one sequence, as with num_beams=1."""
    best_of: int | None = None
    one_beam: bool = field(default=False, compare=False)
    """Whether num_beams=1 was given: one sequence like any other, but for methods that decode beams."""

    @property
    def choice(self) -> ControllerChoice | None:
        """The controller with its settings. Raises BadInput for settings without a controller's name."""
        if self.controller_settings and not isinstance(self.controller, str):
            raise BadInput("controller_settings are for a controller that is given by its name: controller=NAME")
        named = self.controller
        return ControllerChoice(named, self.controller_settings) if isinstance(named, str) else named

    def stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an answer, for a model whose own are ``eos_ids``."""
        eos = eos_ids if self.eos_token_id is None else self.eos_token_id
        return self.stop_token_ids | (frozenset() if self.ignore_eos else eos)


def choose(given: Mapping[str, Any]) -> Chosen:
    """Read the options that a caller wrote. Raises BadInput, in one line, for unknown names and unusable values."""
    values = _named(given)
    lengths = {name: whole(name, values.get(name), 1) for name in ("max_new_tokens", "max_length")}
    if None not in lengths.values():
        raise BadInput("max_new_tokens and max_length both limit the answer; give one of them")
    eos = values.get("eos_token_id")
    return Chosen(
        params=_params(values),
        method=_of_type("method", values.get("method"), (str, Method), "a method's name", DEFAULT_METHOD),
        settings=_of_type("settings", values.get("settings"), (Mapping,), "a dict of the method's settings", {}),
        rule=_rule(values),
        rule_settings=values.get("rule_settings", {}),
        controller=_of_type(
            "controller", values.get("controller"), (str, ControllerChoice), "a controller's name", None
        ),
        controller_settings=_of_type(
            "controller_settings", values.get("controller_settings"), (Mapping,), "a dict of its settings", {}
        ),
        draft_model=_weights("draft_model", values.get("draft_model"), "a loaded model, the folder of a draft LM"),
        head=_weights("head", values.get("head"), "the folder of a trained head"),
        datastore=_of_type("datastore", values.get("datastore"), (str, os.PathLike), "a path", None),
        references=texts("references", values.get("references")),
        namespace=_of_type("namespace", values.get("namespace"), (str,), "a name", ""),
        raw=_of_type("raw", values.get("raw"), (bool,), "True or False", False),
        max_new_tokens=lengths["max_new_tokens"] or _DEFAULT_LENGTH,
        max_length=lengths["max_length"],
        grammar=Grammar.read(values["grammar"]) if "grammar" in values else None,
        grammar_limits=_of_type(
            "grammar_limits", values.get("grammar_limits"), (GrammarLimits,), "a GrammarLimits", DEFAULT_LIMITS
        ),
        stop=texts("stop", values.get("stop")),
        ignore_eos=_of_type("ignore_eos", values.get("ignore_eos"), (bool,), "True or False", False),
        eos_token_id=None if eos is None else _ids("eos_token_id", eos),
        stop_token_ids=_ids("stop_token_ids", values.get("stop_token_ids", ())),
        beams=_beams(values),
        best_of=whole("best_of", values.get("best_of"), 1),
        one_beam=values.get("num_beams") == 1,
    )


_DEFAULT_LENGTH = int(options()["max_new_tokens"][1].default)


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their own names, those that are None left out."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        if name in _NEUTRAL:
            neutral, why = _NEUTRAL[name]
            if value is not None and value != neutral:
                raise BadInput(f"{name}={value!r} cannot be honoured: {why}; leave it out")
            continue
        if name == "pad_token_id":  # nothing is padded
            continue
        option = other_names().get(name, name)
        if option not in options():
            raise BadInput(f"there is no option '{name}'{_hint(name)}")
        if value is None:
            continue
        if option in values:
            raise BadInput(f"{written[option]} and {name} are the same option; give one of them")
        values[option], written[option] = value, name
    return values


def _hint(name: str) -> str:
    if name in _ELSEWHERE:
        return f": {_ELSEWHERE[name]}"
    known = [*options(), *other_names()]
    close = difflib.get_close_matches(name, known, 1, 0.6) or [one for one in known if one.startswith(name)]
    return f"; did you mean '{close[0]}'?" if close else "; help(outpace.generate) lists them all"


def _params(values: Mapping[str, Any]) -> SamplingParams:
    base = values.get("params", SamplingParams())
    if not isinstance(base, SamplingParams):
        raise BadInput(f"params must be an outpace.SamplingParams, not {shown(base)}")
    named = {name: values[name] for name in _SAMPLING if name in values}
    if named.get("top_k") == -1:
        named["top_k"] = 0
    if "processors" in named:
        named["processors"] = read_processors(named["processors"])
    if "logprobs" in named or "top_logprobs" in named:
        base = replace(base, logprobs=False, top_logprobs=0)
    params = replace(base, **named)
    sample = values.get("do_sample")
    if sample is None:
        return params
    _of_type("do_sample", sample, (bool,), "True or False", None)
    if sample != params.greedy:
        return params
    if "temperature" in named:
        raise BadInput(f"do_sample={sample} and temperature={params.temperature:g} contradict each other; give one")
    return replace(params, temperature=1.0 if sample else 0.0)


def _rule(values: Mapping[str, Any]) -> str | AcceptanceRule | None:
    rule = _of_type("rule", values.get("rule"), (str, AcceptanceRule), "a rule's name", None)
    settings = _of_type("rule_settings", values.get("rule_settings"), (Mapping,), "a dict of the rule's settings", {})
    return configured_rule(rule, settings)


def _beams(values: Mapping[str, Any]) -> BeamOptions | None:
    """Beam search, if more than one beam is asked for."""
    given = {name: values[name] for name in ("length_penalty", "early_stopping") if name in values}
    options = BeamOptions(values.get("num_beams", 1), **given)
    if options.num_beams > 1:
        return options
    if options != BeamOptions(1):
        raise BadInput(f"{next(iter(given))} belongs to beam search; give num_beams, or leave it out")
    return None


def _of_type(name: str, value: Any, kinds: tuple[type, ...], what: str, default: Any) -> Any:
    if value is None:
        return default
    if not isinstance(value, kinds):
        raise BadInput(f"{name} must be {what}, not {shown(value)}")
    return value


def _weights(name: str, value: Any, what: str) -> Any:
    """Draft models or heads: one, a list of them, or a dict by name."""
    given = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    for one in given:
        loaded = name == "draft_model" and hasattr(one, "target")
        if one is not None and not loaded and not isinstance(one, str | os.PathLike):
            raise BadInput(f"{name} must be {what}, a list of these or a dict of them by name, not {shown(one)}")
    return value


def whole(name: str, value: Any, low: int) -> int | None:
    """A whole number of at least ``low``, or None. Raises BadInput for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise BadInput(f"{name} must be a whole number, not {shown(value)}")
    if value < low:
        raise BadInput(f"{name} must be at least {low}, not {value}")
    return int(value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One text, or a list of them: a text alone is one item, never its characters. Raises BadInput for others."""
    found = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(found, Sequence | set | frozenset) or not all(isinstance(one, str) for one in found):
        raise BadInput(f"{name} must be a text or a list of texts, not {shown(value)}")
    for one in found:
        check_text(one, name)
    return tuple(found)


def _ids(name: str, value: Any) -> frozenset[int]:
    found = (value,) if isinstance(value, Integral) else value
    if not isinstance(found, Sequence | set | frozenset) or isinstance(found, str):
        raise BadInput(f"{name} must be a token id or a list of them, not {shown(value)}")
    for one in found:
        if isinstance(one, bool) or not isinstance(one, Integral):
            raise BadInput(f"{name} must be a token id or a list of them, not {shown(value)}")
    return frozenset(int(one) for one in found)
