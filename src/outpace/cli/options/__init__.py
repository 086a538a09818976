"""Options that more than one command has, each declared once.

Commands read all of them here, as ``opt.NAME``. Groups that load models are in :mod:`outpace.cli.session`.
"""

from __future__ import annotations

from outpace.cli.interrupt import INTERRUPTED
from outpace.cli.options.answer_options import IgnoreEos, MaxNewTokens, Stop, System, check_length, check_texts
from outpace.cli.options.declaration import DRAFTING, GRAMMAR, MACHINE, SAMPLING, option
from outpace.cli.options.drafting_options import (
    ControllerName,
    ControllerParam,
    DraftModel,
    Head,
    MethodName,
    Namespace,
    Param,
    Reference,
    RuleParam,
)
from outpace.cli.options.grammar_options import Constrained, GrammarBounds
from outpace.cli.options.model_options import FixedCosts, KvDtype, ModelName, Threads, check_threads
from outpace.cli.options.option_values import (
    check_time_limit,
    key_values,
    names,
    rule_settings,
    settings_by_method,
    sweeps,
)
from outpace.cli.options.output_options import Json, Resume, TraceFile, TraceTexts, check_trace, resume_option
from outpace.cli.options.prompt_options import PromptFile
from outpace.cli.options.sampling_options import Sampling, Seed, logit_bias

__all__ = [
    "DRAFTING",
    "GRAMMAR",
    "INTERRUPTED",
    "MACHINE",
    "SAMPLING",
    "Constrained",
    "ControllerName",
    "ControllerParam",
    "DraftModel",
    "FixedCosts",
    "GrammarBounds",
    "Head",
    "IgnoreEos",
    "Json",
    "KvDtype",
    "MaxNewTokens",
    "MethodName",
    "ModelName",
    "Namespace",
    "Param",
    "PromptFile",
    "Reference",
    "Resume",
    "RuleParam",
    "Sampling",
    "Seed",
    "Stop",
    "System",
    "Threads",
    "TraceFile",
    "TraceTexts",
    "check_length",
    "check_texts",
    "check_threads",
    "check_time_limit",
    "check_trace",
    "key_values",
    "logit_bias",
    "names",
    "option",
    "resume_option",
    "rule_settings",
    "settings_by_method",
    "sweeps",
]
