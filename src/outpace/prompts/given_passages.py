"""Prompts about passages of files: summaries, questions with passages, rewritings, translations.

Heads draft worst where answers repeat or translate a text that the user has given, so training needs prompts with real
texts. A row of a file has the passage in ``text`` and may say in ``language`` which one it is in ("en", "de", ...).
Passages in other languages than English are to be translated, a few sentences each; of the others every one is in one
prompt, alone or among others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.prompts.passages import ANSWERS, REWRITINGS, SHARES, SUMMARIES, PassagePrompts
from outpace.prompts.prompt import Prompt
from outpace.prompts.reader import read_rows

LONGEST = 6000
"""Characters of all passages in one prompt, at most, where there are several."""
_LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese", "nl": "Dutch"}
_TRANSLATIONS = (
    "Translate {language} to English: {text}",
    "Translate this {language} text into English.\n\n{text}",
    "{text}\n\nWhat does this {language} text say in English?",
)
_NAMED = (
    "What does the text say about {name}?",
    "Who or what is {name}?",
    "Which facts about {name} are given here?",
    "Why is {name} mentioned?",
)
_OPEN = ("What is this text about?", "What is the most important point here?", "Which reasons does the text give?")
_LATER = ("Now say it in one sentence.", "Put your answer into simpler words.", "Make a list of the points you named.")
_COUNTS, _COUNT_SHARES = (1, 2, 3, 4), (5, 2, 2, 1)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(A-ZÄÖÜ0-9])")
_NAME = re.compile(r"\b(?:[A-Z][a-z]+(?: (?:of |the )?[A-Z][a-z]+)+|[A-Z]{3,}|(?:1[5-9]|20)\d\d)\b")


class GivenPassages:
    """Prompts about the passages of files, by number: the same number, files and seed, the same prompt.

    Raises BadInput for a file that cannot be read, a row without a text, and files without passages.
    """

    name = PassagePrompts.name

    def __init__(self, paths: Sequence[Path], seed: int = 0) -> None:
        self._seed = seed
        passages = [passage for path in paths for passage in _read(path)]
        if not passages:
            raise BadInput(f"no passages in {', '.join(map(str, paths))}: a row is an object with a 'text'")
        chance = random.Random(f"{seed} given passages")
        chance.shuffle(passages)
        english = [text for text, language in passages if language == "en"]
        self._groups = [(language, [part]) for text, language in passages if language != "en" for part in _parts(text)]
        self._groups += [("en", group) for group in _grouped(english, chance)]
        chance.shuffle(self._groups)

    def add(self, question: str, answer: str) -> None:
        """Answers are no passages where passages were given."""

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self._groups)

    def prompt(self, number: int) -> Prompt:
        """The prompt of a number in [0, ``len``); half of them have a second turn."""
        chance = random.Random(f"{self._seed} given passage {number}")
        language, texts = self._groups[number]
        question = ""
        if language != "en":
            form = chance.choice(_TRANSLATIONS)
        elif len(texts) > 1:  # a question about one among others
            form, question = chance.choice(ANSWERS), _question(chance.choice(texts), chance)
        else:
            form = chance.choice(chance.choices((SUMMARIES, ANSWERS, REWRITINGS), SHARES)[0])
            question = _question(texts[0], chance)
        named = _LANGUAGES.get(language, "foreign")
        text = form.format(text="\n\n".join(texts), question=question, language=named)
        later = [chance.choice(_LATER)] if chance.random() < 0.5 else []
        return Prompt.single(f"{self.name}:{number}", text, later=later)


def _read(path: Path) -> list[tuple[str, str]]:
    """(text, language) of every row."""
    found = []
    for number, row in read_rows(path, "passages"):
        text = row.get("text") if isinstance(row, Mapping) else None
        language = row.get("language", "en") if isinstance(row, Mapping) else "en"
        if not isinstance(text, str) or not text.strip():
            raise BadInput(f"{path}, line {number}: a passage is an object with a 'text'")
        if not isinstance(language, str):
            raise BadInput(f"{path}, line {number}: 'language' must be a text such as \"en\"")
        found.append((text.strip(), language.strip().lower() or "en"))
    return found


def _parts(text: str) -> list[str]:
    """One to three sentences each: what users want translated is short."""
    sentences = _SENTENCE.split(text)
    found: list[str] = []
    at = 0
    while at < len(sentences):
        count = 1 + (len(found) % 3)
        found.append(" ".join(sentences[at : at + count]))
        at += count
    return found


def _grouped(texts: Sequence[str], chance: random.Random) -> list[list[str]]:
    """Every text once, alone or among up to three others."""
    groups: list[list[str]] = []
    waiting = list(texts)
    while waiting:
        group = [waiting.pop(0)]
        for _ in range(chance.choices(_COUNTS, _COUNT_SHARES)[0] - 1):
            if waiting and sum(map(len, group)) + len(waiting[0]) <= LONGEST:
                group.append(waiting.pop(0))
        groups.append(group)
    return groups


def _question(text: str, chance: random.Random) -> str:
    """A question that the text answers: about a name or a year in it, where it has one."""
    names = sorted({found.group() for found in _NAME.finditer(text)})
    return chance.choice(_NAMED).format(name=chance.choice(names)) if names else chance.choice(_OPEN)
