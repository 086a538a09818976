"""The grammar of an answer with calls: where it has to be a call, or where tools are strict.

A call that ``tool_choice`` demands names an offered function, and its arguments are a JSON object. Those of strict
tools follow their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from outpace.constraints.compiler import json_rule
from outpace.constraints.grammar import Grammar
from outpace.constraints.token_trie import installed
from outpace.core.errors import BadInput
from outpace.core.text import encoded
from outpace.models.base import ChatTokenizer
from outpace.serving.errors import ApiError
from outpace.serving.schemas import Tool
from outpace.serving.tool_parser import ToolParser
from outpace.serving.tools import Format


def tool_grammar(tokenizer: ChatTokenizer, tools: Seq[Tool], parser: ToolParser | None) -> Grammar | None:
    """The grammar of what the model writes; None where it is free. ``tools``: those that may be called.

    Raises ApiError where strict tools are asked for and the model's way to write calls cannot be expressed.
    """
    if parser is None:
        return None
    form, named = parser.format, len(tools) == 1 and parser.forced != parser.format.forced(None)
    if not any(tool.function.strict for tool in tools):
        # Several calls in one list are not expressed here, so that there the model is left to write them.
        demanded = parser.forced and (named or not form.listed)
        if not demanded or not installed():
            return None
    bodies = [f"body{at}: {_body(form, tool)}" for at, tool in enumerate(tools)]
    any_body = " | ".join(f"body{at}" for at in range(len(tools)))
    opening = form.begin + form.name
    more = "(call)* " if parser.parallel and form.closing else ""
    rules = [f"call: {_text(_between(form) + opening)} body" if more else "", f"body: {any_body}", *bodies]
    if parser.forced:
        first = f"{_arguments(tools[0])} {_text(form.closing)}" if named else "body"
        rules.insert(0, f"start: {first} {more}".rstrip())
    else:
        rules.insert(0, _free(tokenizer, form, opening, more, [_call(tool, form) for tool in tools]))
    return Grammar.lark("\n".join(rule for rule in rules if rule))


def _free(tokenizer: ChatTokenizer, form: Format, opening: str, more: str, calls: list[str]) -> str:
    """Rules of an answer that may be text, or a call; ``calls``: without what begins and ends them.

    An answer may begin with a call that has no mark; text that begins like one is not allowed, for it would be read as
    a call whose arguments nothing holds to the schema.
    """
    like_a_call = f"[ \\t\\r\\n]*({'|'.join(map(_literal, form.openings))})[ \\t\\r\\n]*\\{{(.|\\n)*"
    text = f"TEXT: /(.|\\n)*/ & ~/{like_a_call}/"
    if form.begin.strip() and not form.listed and _spelled(tokenizer, form.begin.strip()):
        mark = form.begin.strip()
        bare = [f"{_text(_line(one) + form.name)} bare {_text(_closed(end))}" for one, end in form.openings.items()]
        start = " | ".join([f"head {_text(opening.removeprefix(mark))} body {more}", *bare, "TEXT"])
        head = f"head[lazy]: /(.|\\n)*{_literal(mark)}/ & ~/{like_a_call}/"
        return "\n".join([f"start: {start}", head, f"bare: {' | '.join(calls)}", text])
    if not form.begin and opening.startswith("{"):
        return f"start: {_text(opening)} body {more}| TEXT\n{text}"
    raise ApiError(
        "this model begins calls with a special token, so that strict tools need a 'tool_choice' that demands a call",
        param="tools",
        code="unsupported_field",
    )


def _spelled(tokenizer: ChatTokenizer, mark: str) -> bool:
    """Whether a call's mark is made of tokens that have text; one that begins every text is none of the mark."""
    return all(tokenizer.token_bytes(token) for token in encoded(tokenizer, [mark])[0])


def _literal(text: str) -> str:
    """A regular expression of the very text."""
    return "".join(f"[{one}]" if one.isalnum() or one in "<>_" else f"\\{one}" for one in text)


def _line(opener: str) -> str:
    return f"{opener}\n" if opener else ""


def _closed(end: str) -> str:
    """The end of a call's object, and of what it stands in."""
    return f"}}\n{end}" if end else "}"


def _between(form: Format) -> str:
    return "\n" if form.begin.strip() else "; "


def _body(form: Format, tool: Tool) -> str:
    return f"{_call(tool, form)} {_text(form.closing)}".rstrip()


def _call(tool: Tool, form: Format) -> str:
    """The rest of a call after the beginning of its name, up to its arguments."""
    return f"{_text(tool.function.name + form.arguments)} {_arguments(tool)}"


def _arguments(tool: Tool) -> str:
    schema: Mapping[str, Any] = {"type": "object"}
    if tool.function.strict and tool.function.parameters is not None:
        schema = tool.function.parameters
    try:
        return f'" "? {json_rule(json.loads(Grammar.schema(dict(schema)).source))}'
    except BadInput as error:
        raise ApiError(f"the tool '{tool.function.name}': {error}", param="tools", code="invalid_value") from error


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
