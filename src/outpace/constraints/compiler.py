"""From a Grammar to a Constraint over a tokenizer's vocabulary: compiled once, and kept within a bound."""

from __future__ import annotations

import json
import re
from threading import Lock
from time import monotonic, perf_counter
from typing import Any

from outpace.constraints.grammar import DEFAULT_LIMITS, Grammar, GrammarLimits
from outpace.constraints.parser_state import Cursor, ParserState
from outpace.constraints.schema_check import check_schema
from outpace.constraints.schema_limits import check_expressible
from outpace.constraints.schema_patterns import by_standards
from outpace.constraints.token_trie import TokenTrie, engine, token_trie
from outpace.core.errors import BadInput, shortened
from outpace.core.lru import Lru
from outpace.models.base import ChatTokenizer

KEPT = 64
"""Grammars that stay compiled; the least recently used leave first."""
_IDLE = 8
"""Parsers of one grammar that wait for further requests."""
_FUEL = 20_000_000
"""What the engine spends on regular expressions in a second, about; it counts work, not time."""
_ITEMS = 50_000
"""What the parser may hold at one place: an object with optional keys takes four for each."""
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is laid out where a schema says nothing of it, in the engine's words."""
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
r"""No ``\uXXXX``: the engine compares keys as they are written, so that one could spell a named key unseen."""

_EVERY_SPELLING = '%llguidance { "no_forcing": true }'
"""Text that the grammar forces may be spelled in every way that the vocabulary has, as everywhere else."""
_EXCERPT = re.compile(r"\s*(\d+ \||\^\s*$)")
"""Lines of the engine's messages that show its own source: ours is around the user's."""
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\):? ")
_REFUSED_FOR = 60.0
"""Seconds for which a refusal is kept: compile time also depends on what else the machine does."""
_Key = tuple[Grammar, GrammarLimits, str]
_COMPILED: Lru[_Key, ParsedConstraint] = Lru(KEPT)
_REFUSED: Lru[_Key, tuple[float, str]] = Lru(KEPT)
_COMPILING: dict[_Key, Lock] = {}
_LOCK = Lock()
"""Of these tables; never held while a grammar is compiled, which may take seconds."""


def compiled(grammar: Grammar, tokenizer: ChatTokenizer, limits: GrammarLimits = DEFAULT_LIMITS) -> ParsedConstraint:
    """The constraint of a grammar over a vocabulary, compiled now or kept from an earlier call.

    Raises BadInput in one line for a grammar that is broken, unsatisfiable, or beyond ``limits``, and MissingExtra
    where the engine is not installed.
    """
    key = (grammar, limits, tokenizer.fingerprint)
    with _LOCK:
        if (known := _kept(key)) is not None:
            return known
        alone = _COMPILING.setdefault(key, Lock())
    with alone:
        with _LOCK:
            if (known := _kept(key)) is not None:
                return known
        try:
            known = ParsedConstraint(grammar, token_trie(tokenizer), limits)
            with _LOCK:
                _COMPILED.put(key, known)
        except BadInput as error:
            with _LOCK:
                _REFUSED.put(key, (monotonic(), str(error)))
            raise
        finally:
            with _LOCK:
                _COMPILING.pop(key, None)
    return known


def _kept(key: _Key) -> ParsedConstraint | None:
    """What an earlier call compiled, if it did. Raises BadInput where one was refused a short time ago."""
    refused = _REFUSED.get(key)
    if refused is not None and monotonic() - refused[0] < _REFUSED_FOR:
        raise BadInput(refused[1])
    return _COMPILED.get(key)


class ParsedConstraint:
    """A compiled grammar. ``seconds``: what compiling took. Safe to use from several threads, one state at a time."""

    def __init__(self, grammar: Grammar, trie: TokenTrie, limits: GrammarLimits) -> None:
        began = perf_counter()
        size = len(grammar.source.encode())
        if size > limits.max_bytes:
            raise BadInput(
                f"the {grammar.name} has {size:,} bytes, and the limit is {limits.max_bytes:,}; make it smaller, or "
                "raise the limit"
            )
        self.grammar, self._trie = grammar, trie
        self._matcher = _matcher(grammar, trie, limits)
        self._idle: list[Any] = []
        self._check_beginning()
        self.seconds = perf_counter() - began
        if self.seconds > limits.seconds:
            raise BadInput(_too_slow(grammar, limits))

    def __repr__(self) -> str:
        return f"ParsedConstraint({self.grammar.kind}, {shortened(self.grammar.source, 60)!r})"

    def begin(self) -> ParserState:
        cursor = Cursor(self._parser, self._trie, self._give_back)
        return ParserState(cursor, cursor.root)

    def _parser(self) -> Any:
        try:
            matcher = self._idle.pop()
        except IndexError:
            return self._matcher.deep_copy()
        matcher.reset()
        return matcher

    def _give_back(self, matcher: Any) -> None:
        if len(self._idle) < _IDLE and not matcher.is_error():
            self._idle.append(matcher)

    def accepts(self, text: str) -> bool:
        state: ParserState | None = self.begin()
        for token in self._trie.inner.greedy_tokenize(text):
            state = None if state is None else state.advance(token)
        return state is not None and state.complete

    def _check_beginning(self) -> None:
        state = self.begin()
        if not state.complete and not state.allowed(self._trie.size).any():
            raise BadInput(f"the {self.grammar.name} allows no answer at all: no token of this model can begin one")


def _matcher(grammar: Grammar, trie: TokenTrie, limits: GrammarLimits) -> Any:
    llguidance = engine()
    bounds = llguidance.LLParserLimits(
        initial_lexer_fuel=int(limits.seconds * _FUEL),
        max_grammar_size=limits.max_bytes,
        max_items_in_row=_ITEMS,
        verbose_errors=False,
    )
    try:
        source = _source(grammar, llguidance)
        matcher = llguidance.LLMatcher(trie.inner, source, log_level=0, limits=bounds)
        wrong = matcher.get_error()
    except RecursionError:
        wrong = "it is nested too deeply"
    except ValueError as error:
        wrong = str(error)
    if not wrong:
        return matcher
    line = _why(wrong, grammar)
    if any(words in line for words in ("fuel", "too large", "too big", "grammar size")):
        raise BadInput(f"{_too_slow(grammar, limits)} ({line})")
    raise BadInput(f"the {grammar.name} cannot be used: {line}")


def _why(wrong: str, grammar: Grammar) -> str:
    """The engine's reason in one line, without its excerpt of the source; positions are those of the user's text."""
    lines = [line for line in wrong.replace("<non-verbose/>", "").splitlines() if not _EXCERPT.match(line)]
    line = shortened(" ".join(lines))
    found = _POSITION.match(line)
    if found is None:
        return line
    row = int(found[1]) - len(_EVERY_SPELLING.splitlines())
    where = f"line {row}, column {found[2]}: " if grammar.kind == "lark" and not _is_gbnf(grammar.source) else ""
    return where + line[found.end() :].removeprefix("failed to compile JSON schema: ")


def _too_slow(grammar: Grammar, limits: GrammarLimits) -> str:
    return (
        f"the {grammar.name} is too complex to compile within {limits.seconds:g} s; make it simpler, or raise the limit"
    )


def _source(grammar: Grammar, llguidance: Any) -> str:
    """The grammar in the engine's own form. Raises ValueError or BadInput for what is broken."""
    match grammar.kind:
        case "schema":
            rules = f"start: {json_rule(json.loads(grammar.source))}"
        case "regex":
            pattern = llguidance.regex_to_lark(_unanchored(grammar.source), "d")  # only ASCII digits are digits
            rules = f"start: /{pattern}/"
        case "choice":
            # One terminal: alternatives of a rule would be a parser's item each, and these are bounded.
            rules = f"start: CHOICE\nCHOICE: {' | '.join(map(_literal, json.loads(grammar.source)))}"
        case "lark":
            rules = grammar.source
            if _is_gbnf(rules):
                from llguidance.gbnf_to_lark import gbnf_to_lark

                try:
                    rules = gbnf_to_lark(rules)
                except RecursionError:
                    raise
                except Exception as error:  # the converter raises nothing more specific
                    raise ValueError(str(error) or "it is no GBNF") from None
    found: str = llguidance.LLMatcher.grammar_from_lark(f"{_EVERY_SPELLING}\n{rules}")
    return found


def json_rule(schema: Any) -> str:
    """A schema as a part of a rule of the engine's grammars. Raises BadInput where no finite answer satisfies it,
    where the engine would not hold answers to it, or where it is nested too deeply."""
    try:
        check_schema(schema)
        check_expressible(schema)
        schema = by_standards(schema)
        if isinstance(schema, dict):
            given = schema.get("x-guidance", {})
            layout = {"item_separator": ",", "key_separator": ":"} if given.get("whitespace_flexible") else LAYOUT
            schema = {**schema, "x-guidance": {**layout, **given, **_ESCAPES}}
        return f"%json {json.dumps(schema, ensure_ascii=False)}"
    except RecursionError:
        raise BadInput("the schema cannot be used: it is nested too deeply") from None


def _literal(text: str) -> str:
    """A text as the engine's grammars write it; their lexer does not take U+007F as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_gbnf(rules: str) -> bool:
    return re.search(r"^\s*root\s*::=", rules, re.MULTILINE) is not None


def _unanchored(pattern: str) -> str:
    """A pattern without anchors at its ends: it is matched as a whole anyway."""
    pattern = re.sub(r"^(\^|\\A)", "", pattern)
    ends = re.search(r"(\\*)(\$|\\[zZ])$", pattern)
    if ends and len(ends[1]) % 2 == 0:
        pattern = pattern[: ends.start(2)]
    return pattern
