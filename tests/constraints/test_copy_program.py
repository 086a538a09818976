"""Programs of copied and new lines: the automaton, known edits, and the method on the embedded model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import outpace
from outpace.certify.distributions import Arrivals, autoregressive_distribution, distance, enumerated_distribution
from outpace.certify.exact import tiny_context
from outpace.cli import main
from outpace.constraints.copy_program import MOST_LINES, CopyProgram, lines_of
from outpace.constraints.edit_oracle import Copy, Generate, Rehearsed, edit_steps, program_tokens, worthwhile
from outpace.core.constraint import ConstraintState, tokens_of
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.certain_rows import FEWEST
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.methods.lookup.copy_decode import edited_text
from outpace.methods.registry import build
from outpace.prompts.questions import load_prompts
from outpace.targets.table import TableTarget


class Letters:
    """Tokens are bytes, and some longer pieces that are written wherever they fit."""

    PIECES = ("@@", " copy", "10", "11", "12", "\n  ", "ab", "\n\n")

    fingerprint = "letters"
    has_chat_template = False

    def __len__(self) -> int:
        return 256 + len(self.PIECES)

    def encode(self, text: str) -> list[int]:
        data, tokens = text.encode(), []
        while data:
            fits = [at for at, piece in enumerate(self.PIECES) if data.startswith(piece.encode())]
            tokens.append(256 + fits[0] if fits else data[0])
            data = data[len(self.PIECES[fits[0]].encode()) if fits else 1 :]
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(one) or b"" for one in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        return self.PIECES[token - 256].encode() if token >= 256 else bytes([token])

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def chat(self, messages: object) -> list[int]:
        raise NotImplementedError


class Spaced(Letters):
    """Writes a space before every text, as some tokenizers do."""

    def encode(self, text: str) -> list[int]:
        return super().encode(f" {text}")


def walk(program: CopyProgram, tokens: Sequence[int]) -> ConstraintState | None:
    """The state after tokens, each of which must be in the mask exactly when the automaton takes it."""
    state: ConstraintState | None = program.begin()
    for token in tokens:
        assert state is not None
        allowed = set(tokens_of(state.allowed(len(program.tokenizer)), len(program.tokenizer)).tolist())
        state = state.advance(token)
        assert (token in allowed) == (state is not None)
        if state is None:
            return None
    return state


def shown(program: CopyProgram, tokens: Sequence[int]) -> str:
    shows = program.shown()
    return program.tokenizer.decode([token for token in tokens if shows(token)])


TEXT = "".join(f"line {number} ab\n" for number in range(1, 13))


def test_exactly_the_lines_that_there_are_can_be_copied() -> None:
    program = CopyProgram(TEXT, Letters())
    for first, last in product(range(15), range(15)):
        directive = [*program.copy, *Letters().encode(str(first)), *program.to, *Letters().encode(str(last))]
        inside = 1 <= first <= last <= 12
        assert (walk(program, [*directive, *program.close]) is not None) == inside, (first, last)
    assert walk(program, [*program.copy, *Letters().encode("03")]) is None
    assert walk(program, [*program.copy, *program.to]) is None


def test_spans_keep_the_order_of_the_text_unless_lines_may_be_moved() -> None:
    for ordered in (True, False):
        program = CopyProgram(TEXT, Letters(), ordered=ordered)
        start = program_tokens(program, [Copy(2, 4), Generate("new\n")])
        for first in range(1, 13):
            more = program_tokens(program, [Copy(first, 12)])
            for before in (start, start[: -len(program_tokens(program, [Generate("new\n")]))]):
                assert (walk(program, [*before, *more]) is not None) == (first > 4 or not ordered)
        whole = program_tokens(program, [Copy(1, 12)])
        end = walk(program, whole)
        assert end is not None and end.complete
        assert (walk(program, [*whole, *program.copy]) is None) == ordered
        assert walk(program, [*whole, *program_tokens(program, [Generate("new\n")])]) is not None


def test_a_span_is_decided_by_the_program() -> None:
    program = CopyProgram(TEXT, Letters())
    start = [*program.copy, *Letters().encode("3"), *program.to, *Letters().encode("4")]
    state = walk(program, start)
    assert state is not None
    state = state.advance(program.close[0])
    assert state is not None
    span = Letters().encode("line 3 ab\nline 4 ab\n")
    assert list(state.forced()) == [*program.close[1:], *span]
    for token in state.forced():
        assert not state.complete
        assert tokens_of(state.allowed(264), 264).tolist() == [token]
        assert state.advance((token + 1) % 256) is None
        following = state.advance(token)
        assert following is not None
        state = following
    assert state.complete and set(tokens_of(state.allowed(264), 264).tolist()) == program.begins_directive


def test_answers_end_and_directives_begin_where_a_line_begins() -> None:
    program = CopyProgram(TEXT, Letters())
    assert not program.begin().complete
    inside = walk(program, [*program.generate, *Letters().encode("new")])
    assert inside is not None and not inside.complete
    assert walk(program, [*program.generate, *Letters().encode("a @@ b\n")]) is not None
    behind = walk(program, [*program.generate, *Letters().encode("new\n")])
    assert behind is not None and behind.complete
    assert walk(program, [*program.generate, *Letters().encode("new\n"), *program.copy]) is not None
    assert walk(program, [*program.generate, *Letters().encode("new\n@@ delete")]) is None


def test_steps_that_say_nothing_are_not_allowed() -> None:
    """A model that repeats itself would write them without end."""
    program = CopyProgram(TEXT, Letters())
    begun = walk(program, program.generate)
    assert begun is not None and not begun.complete
    assert walk(program, [*program.generate, *program.copy]) is None
    new = [*program.generate, *Letters().encode("new\n")]
    assert walk(program, [*new, *program.generate]) is None
    assert walk(program, [*new, *program_tokens(program, [Copy(1, 12)]), *new]) is not None
    whole = [*program_tokens(program, [Copy(1, 12)]), *new]
    assert walk(program, [*whole, *program.copy]) is None
    end = walk(program, [*whole, *new[len(program.generate) :]])
    assert end is not None and end.complete


@pytest.mark.parametrize("seed", range(40))
def test_a_known_edit_is_written_exactly(seed: int) -> None:
    chance = random.Random(seed)
    pool = ["x = 1\n", "\n", "    ab\n", "@@ copy(1-2)\n", "@@\n", "@ab\n", "é 10\n", "  return 11\n"]
    before = "".join(chance.choices(pool, k=chance.randint(1, 30)))
    lines = lines_of(before)
    for _ in range(chance.randint(0, 6)):
        at = chance.randrange(len(lines) + 1)
        lines[at : at + chance.randint(0, 2)] = chance.choices(pool, k=chance.randint(0, 2))
    after = "".join(lines)
    program = CopyProgram(before, Letters())
    for steps in (edit_steps(before, after), worthwhile(edit_steps(before, after), program)):
        if after:
            tokens = program_tokens(program, steps)
            end = walk(program, tokens)
            assert end is not None and end.complete
            assert shown(program, tokens) == after


def test_every_token_of_a_program_has_a_role() -> None:
    program = CopyProgram(TEXT, Letters())
    tokens = program_tokens(program, [Generate("new\n"), Copy(3, 4), Generate("@@ x\n")])
    role = program.roles()
    found = [(role(token), token) for token in tokens]
    text = {kind: program.tokenizer.decode([one for of, one in found if of == kind]) for kind, _ in found}
    assert text == {
        "directive": "@@ generate\n@@ copy(3-4)\n@@ generate\n",
        "new": "new\n@@ x\n",
        "copied": "line 3 ab\nline 4 ab\n",
    }


def test_spans_that_are_shorter_than_their_directive_are_written() -> None:
    program = CopyProgram("ab 1\n" * 12, Letters())
    assert worthwhile([Copy(2, 2), Generate("x\n"), Copy(4, 12)], program) == [Generate("ab 1\nx\n"), Copy(4, 12)]


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(BadInput, match="is empty"):
        CopyProgram("", Letters())
    with pytest.raises(BadInput, match="10,000 lines, and the limit is 9,999"):
        CopyProgram("x\n" * (MOST_LINES + 1), Letters())
    with pytest.raises(BadInput, match="writes texts back"):
        CopyProgram(TEXT, Spaced())
    with pytest.raises(BadInput, match="lines 3-13 cannot be copied: the text has 12"):
        program_tokens(CopyProgram(TEXT, Letters()), [Copy(3, 13)])


class Marked(Letters):
    """Reads ``<end>`` as a special token, which it leaves out of texts, and writes \u00b5 as \u03bc."""

    SPECIAL = 264

    def __len__(self) -> int:
        return 265

    def encode(self, text: str) -> list[int]:
        parts = [super(Marked, self).encode(part) for part in text.replace("\u00b5", "\u03bc").split("<end>")]
        return parts[0] + [token for part in parts[1:] for token in (self.SPECIAL, *part)]

    def token_bytes(self, token: int) -> bytes | None:
        return None if token == self.SPECIAL else super().token_bytes(token)

    def token_text(self, token: int) -> str:
        return "<end>" if token == self.SPECIAL else super().token_text(token)


def prepared(prompt: str, *references: str) -> Request:
    """A request as ``copy-decode`` decodes it."""
    words = Marked()
    method = build("copydec", replace(tiny_context(265, 1), tokenizer=words), {"parts": [], "numbered": False})
    tokens = [tuple(words.encode(text)) for text in (prompt, *references)]
    return Request(tokens[0], method, references=tuple(tokens[1:]), reference_texts=references).prepared()


def test_the_text_is_copied_as_it_was_given_or_refused() -> None:
    for found in (prepared("Edit.", "a\nb"), prepared("Edit <end> this.\n```\na\nb\n```<end>ok")):
        assert isinstance(found.params.constraint, CopyProgram)
        assert found.params.constraint.lines == ["a\n", "b\n"]
    for given in ("a\nx = '<end>'\n", "a\nx = '\u00b5'\n"):
        with pytest.raises(BadInput, match=r"this one changes .x = '.*special token"):
            prepared("Edit.", given)
    with pytest.raises(BadInput, match="the special token <end>, which cannot be copied"):
        prepared("Edit.\n```\na\nx = '<end>'\n```\n")


def test_stop_strings_end_programs_inside_of_lines() -> None:
    """The user knows nothing of a program, of which a part is no error, nor of its directives."""
    words = Letters()
    program = CopyProgram("ab\nline 2\n", words)
    constraint = Rehearsed(program, program_tokens(program, [Copy(1, 2)]))
    context = replace(tiny_context(264, 1), tokenizer=words)
    method = replace(build("copydec", context, {"parts": []}), prepare=None)
    decoder = Decoder(context.target, words)
    params = SamplingParams(constraint=constraint)
    found = decoder.submit(Request((0, 1), method, params, max_new_tokens=60, stop_strings=("@", "ne 2")))
    decoder.run()
    found.raise_error()
    assert (found.text, found.finish_reason) == ("ab\nli", "stop")


# ------------------------------------------------------------------------------------------- drafts, by enumeration

PIECES = ("@@ copy(", "@@ generate\n", "1", "2", "-", ")\n", "a\n", "b\n", *"ifxy=: \n", None)
LENGTH = 6  # a directive and the line that it copies
PARTS: dict[tuple[str, ...], dict[str, dict[str, int]]] = {
    (): {},
    ("pld",): {"pld": {"num_draft_tokens": 2}},
    ("draft-model",): {"draft-model": {"num_draft_tokens": 1}},
    ("pld", "draft-model"): {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 1}},
}


@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_answers_have_the_distribution_of_autoregressive_decoding_under_the_program(parts: tuple[str, ...]) -> None:
    """Whatever drafts in new lines: copied spans are decided by the program, all else by the target."""
    size, prompt = len(PIECES), (0, 1, 2, 0, 1)
    context = tiny_context(size, 3, PIECES)
    assert context.tokenizer is not None
    program = CopyProgram("a\nb\n", context.tokenizer)
    params = SamplingParams(temperature=1.0, top_k=2, constraint=program)
    stops = frozenset({size - 1})

    def batch() -> Arrivals:
        context = tiny_context(size, 3, PIECES)
        method = build("copy-decode", context, {"parts": parts, "settings": PARTS[parts]})
        asked = Request(prompt, replace(method, prepare=None), params, max_new_tokens=LENGTH, stop_ids=stops)
        return context.target, [asked], 0

    assert isinstance(context.target, TableTarget)
    plain = autoregressive_distribution(context.target.table, size, params, prompt, LENGTH, stops)
    found, _ = enumerated_distribution(batch)
    assert distance(found, plain) < 1e-6
    roles = [[role(token) for token in output] for output in found for role in [program.roles()]]
    assert any("copied" in one for one in roles) and any("new" in one for one in roles)


# ------------------------------------------------------------------------------------------------ the embedded model


@pytest.fixture(scope="module")
def model() -> outpace.Model:
    return outpace.load("smollm2")


EDITS = load_prompts("code-editing")


def code(prompt: str) -> str:
    return prompt.split("```python\n")[1].partition("```")[0]


def rehearse(
    model: outpace.Model, before: str, after: str, temperature: float = 0.0, parts: Sequence[str] = ()
) -> tuple[Generation, CopyProgram]:
    """The known edit, decoded with ``copy-decode``; its K/V stays open."""
    program = CopyProgram(before, model.tokenizer)
    tokens = program_tokens(program, worthwhile(edit_steps(before, after), program))
    method = replace(model.method("copydec", {"parts": parts}), prepare=None)
    prompt = tuple(model.tokenizer.chat([{"role": "user", "content": f"Edit this.\n{before}"}]))
    sampling = SamplingParams(temperature, constraint=Rehearsed(program, tokens), seed=3)
    decoder = Decoder(model.target, model.tokenizer)
    generation = decoder.submit(Request(prompt, method, sampling, len(tokens) + 9, model.eos_ids, keep=True))
    decoder.run()
    generation.raise_error()
    assert generation.tokens == tokens
    return generation, program


def changed(before: str) -> str:
    """An edit of a line in the middle."""
    lines = lines_of(before)
    lines[len(lines) // 2 : len(lines) // 2 + 1] = ["# changed\n", "\n"]
    return "".join(lines)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rehearsed_edit_is_exact_and_a_span_takes_one_forward(model: outpace.Model, temperature: float) -> None:
    before = code(EDITS[0].text)
    generation, program = rehearse(model, before, changed(before), temperature=temperature)
    assert generation.text == changed(before)
    assert generation.finish_reason == "stop"
    figures = generation.metrics
    spans = sum(len(program.spelled("".join(part))) for part in (lines_of(before)[:10], lines_of(before)[-10:]))
    assert len(generation.tokens) > spans > 3 * figures.rounds


def rewritten(before: str) -> str:
    """An edit of every third line: what new lines hold stands nearly so in the text."""
    lines = lines_of(before)
    for at in range(0, len(lines), 3):
        lines[at : at + 1] = [*lines[at : at + 1], "# " + lines[at].lstrip()]
    return "".join(lines)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_methods_draft_inside_new_lines(model: outpace.Model, temperature: float) -> None:
    before = code(EDITS[1].text)
    after = rewritten(before)
    alone, _ = rehearse(model, before, after, temperature=temperature)
    with_sam, _ = rehearse(model, before, after, temperature=temperature, parts=("sam",))
    assert with_sam.text == alone.text == after
    assert with_sam.metrics.rounds < 0.8 * alone.metrics.rounds
    assert with_sam.metrics.parts["sam"] > 0 and with_sam.metrics.parts["copy-decode"] > 0
    assert set(alone.metrics.parts) == {"copy-decode"}


@pytest.mark.model
def test_spans_stay_whole_in_a_batch_and_tell_nothing_of_what_rounds_cost(
    model: outpace.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    costs: Any = type(model.target.costs)
    monkeypatch.setattr(costs, "took", lambda self, count, *given, **more: rows.append(count))
    method = replace(model.method("copydec"), prepare=None)
    decoder, running = Decoder(model.target, model.tokenizer), []
    for prompt in EDITS[:3]:
        before = code(prompt.text)
        program = CopyProgram(before, model.tokenizer)
        tokens = program_tokens(program, [Copy(1, len(program.lines))])
        ids = tuple(model.tokenizer.chat([{"role": "user", "content": prompt.text}]))
        params = SamplingParams(constraint=Rehearsed(program, tokens))
        running.append(decoder.submit(Request(ids, method, params, len(tokens) + 9, model.eos_ids, trace=True)))
    decoder.run()
    for one, prompt in zip(running, EDITS, strict=False):
        one.raise_error()
        assert one.text == code(prompt.text)
        span = len(model.tokenizer.encode(code(prompt.text)))
        assert max(len(each.committed) for each in one.rounds) > 0.9 * min(span, 512)
    assert rows and max(rows) <= 3 * FEWEST, "forwards without an LM head say nothing of others"


@pytest.mark.model
def test_parts_and_controllers_are_those_of_other_methods(model: outpace.Model) -> None:
    for parts, said in ((["copydec"], "no part of another method"), (["plx"], "plx"), (["sam", "sam"], "twice")):
        with pytest.raises(BadInput, match=said):
            model.method("copydec", {"parts": parts})
    chosen = model.method("copydec", controller="gamma-star")
    assert chosen.prepare is not None and "no bound" in str(chosen.lossy)
    before = "first = 1\nsecond = 2\n"
    ways = (chosen, model.method("copydec"))
    one, other = (model.generate("Add a third line.", method=way, references=before, max_new_tokens=40) for way in ways)
    assert one.tokens == other.tokens
    assert walk(CopyProgram(before, model.tokenizer), one.tokens) is not None


@pytest.mark.model
@pytest.mark.parametrize("parts", [["auto"], ["sam", "recycling"]])
def test_programs_are_the_same_whoever_drafts_in_them(model: outpace.Model, parts: list[str]) -> None:
    alone, drafting = (model.method("copydec", {"parts": one}) for one in ([], parts))
    plain = model.generate(EDITS[0].text, method=alone, max_new_tokens=120)
    drafted = model.generate(EDITS[0].text, method=drafting, max_new_tokens=120)
    assert drafted.tokens == plain.tokens


@pytest.mark.model
def test_kv_after_copied_spans_equals_that_of_one_token_after_the_other(model: outpace.Model) -> None:
    before = code(EDITS[1].text)
    generation, _ = rehearse(model, before, changed(before))
    target, tokens = model.target, generation.sequence.tokens
    rows = target.length(generation.sequence.kv) // 16 * 16
    assert rows > generation.sequence.prompt_length + 100
    alone = target.sequence(tokens[: generation.sequence.prompt_length])
    target.prefill([alone])
    while target.length(alone.kv) < rows:
        target.commit(target.score([(alone, TokenTree())]), [()])
        alone.tokens.append(tokens[len(alone.tokens)])
    assert torch.equal(target.kv_block(alone.kv, 0, rows), target.kv_block(generation.sequence.kv, 0, rows))


@pytest.mark.model
def test_logits_that_are_left_out_are_the_same_when_they_are_read(model: outpace.Model) -> None:
    sequence = model.target.sequence(model.tokenizer.encode("def f(x):\n    return x"))
    model.target.prefill([sequence])
    chain = TokenTree.chain(model.tokenizer.encode(" + 1\n\n\ndef g(x):\n    return f(x) + 2\n"))
    whole = model.target.score([(sequence, chain)])[0].logits
    chain.certain_rows = frozenset(range(1, len(chain)))
    part = model.target.score([(sequence, chain)])[0]
    assert part.argmax(len(chain) - 1) == int(whole[-1].argmax())
    assert part.argmax(3) == int(whole[4].argmax())  # a row that was left out
    assert torch.equal(part.logits, whole)
    chain.certain_rows = frozenset(range(len(chain) + 1))
    assert torch.equal(model.target.score([(sequence, chain)])[0].logits, whole)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_writes_programs_itself(model: outpace.Model, temperature: float) -> None:
    prompts = [prompt.text for prompt in EDITS[:2]]
    answers = model.generate(prompts, method="copydec", max_new_tokens=160, temperature=temperature, seed=4)
    for prompt, found in zip(prompts, answers, strict=True):
        program = CopyProgram(code(prompt), model.tokenizer)
        state = walk(program, found.tokens)
        assert state is not None and (state.complete or found.finish_reason == "length")
        assert shown(program, found.tokens).startswith(found.text.rstrip("\ufffd"))
        assert "no bound" in found.metrics["lossy"]


@pytest.mark.model
def test_the_text_may_be_a_reference(model: outpace.Model) -> None:
    found = model.generate("Add a comment.", method="copydec", references="only = 1\n", max_new_tokens=40)
    assert walk(CopyProgram("only = 1\n", model.tokenizer), found.tokens) is not None


def test_references_do_not_run_together() -> None:
    for given, text in (
        (("a = 1", "b = 2"), "a = 1\nb = 2"),
        (("a = 1\n", "", "b = 2\n"), "a = 1\nb = 2\n"),
        (("only",), "only"),
    ):
        assert edited_text(cast(Request, SimpleNamespace(reference_texts=given)), Letters()) == text


@pytest.mark.model
def test_requests_that_are_no_edits_are_refused(model: outpace.Model) -> None:
    with pytest.raises(BadInput, match="--reference FILE"):
        model.generate("Why is the sky blue?", method="copydec")
    with pytest.raises(BadInput, match="grammar of its own"):
        model.generate(EDITS[0].text, method="copydec", grammar=["yes", "no"])
    with pytest.raises(BadInput, match="nothing to certify"):
        outpace.certify("copydec")
    with pytest.raises(BadInput, match="no part of another method"):
        model.method("merge", {"parts": ["copydec", "pld"]})
    assert not model.method("copydec").lossless


@pytest.mark.model
def test_the_command_line_prints_the_edited_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text("first = 1\nsecond = 2\n")
    asked = ["generate", "Add a third line.", "--method", "copydec", "--temperature", "0", "-n", "30"]
    assert main([*asked, "--reference", "code.py", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["lossless"] is False and "no bound" in found["metrics"]["lossy"]
    assert "@@ copy(" not in found["text"]
    for more, said in (([], "--reference FILE"), (["--reference", "code.py", "--choice", "a"], "grammar of its own")):
        assert main([*asked, *more]) == 2
        caught = capsys.readouterr()
        assert caught.out == "" and said in caught.err and "Traceback" not in caught.err


@pytest.mark.model
def test_the_bench_runs_it_beside_others(model: outpace.Model) -> None:
    report = outpace.bench(model, ["copydec"], "code-editing", limit=2, max_new_tokens=24)
    [row] = [one for one in report.rows if one["method"] == "copy-decode"]
    assert row["error"] is None and row["lossless"] is False and "no bound" in row["lossy"]
