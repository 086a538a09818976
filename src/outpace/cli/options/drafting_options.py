"""What drafts: methods, their settings, and the models, heads and texts that they draft with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli.options.declaration import DRAFTING, option

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
        text="Controller to use instead of the method's own: it decides how much is drafted; see: outpace controllers.",
    ),
]
ControllerParam = Annotated[
    list[str] | None, option(value="KEY=VALUE", panel=DRAFTING, text="Setting of the controller; may be repeated.")
]
