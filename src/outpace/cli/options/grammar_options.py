"""What answers must look like: a schema, a regular expression, a grammar or choices, and bounds on these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outpace.cli.options.declaration import GRAMMAR, option
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.constraints.grammar import Grammar, GrammarLimits
    from outpace.core.future_validity import ConstraintWeighting


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
