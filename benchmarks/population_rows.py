"""Rows of ``benchmarks/populations.py``: how each decodes a prompt, and what it is compared with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outpace.prompts.prompt import Prompt

if TYPE_CHECKING:
    from populations import Runs


@dataclass(frozen=True, slots=True)
class Answered:
    """Tokens of the answer, and how many tokens each round of the target added to every sequence."""

    tokens: list[int]
    tokens_per_round: float | None


Decode = Callable[["Runs", Prompt, int], Answered]


@dataclass(frozen=True, slots=True)
class Row:
    """``sequences`` of so many new tokens each are decoded; ``base``: the row whose speed its own is divided by."""

    name: str
    base: str
    sequences: int
    decode: Decode


def timed(row: Row, runs: Runs, prompt: Prompt, tokens: int) -> dict[str, Any]:
    """A row on one prompt: tokens of all sequences, seconds, tokens of a round, and the answer."""
    runs.model()  # loading is not what is timed
    began = perf_counter()
    found = row.decode(runs, prompt, tokens)
    return {
        "seconds": perf_counter() - began,
        "tokens": row.sequences * tokens,
        "tokens_per_round": found.tokens_per_round,
        "answer": found.tokens,
    }


def generated(**options: Any) -> Decode:
    """By ``generate``, with these options; ``drafted``: with the draft model; ``load``: how the model is loaded."""
    drafted, load = options.pop("drafted", False), options.pop("load", {})

    def decode(runs: Runs, prompt: Prompt, tokens: int) -> Answered:
        given = {"method": "none", "seed": runs.options.seed, **options, **(runs.draft if drafted else {})}
        if not given.get("temperature"):
            del given["seed"]
        model = runs.model(**load)
        found = model.generate(list(prompt.messages), max_new_tokens=tokens, ignore_eos=True, **given)
        first = found[0] if isinstance(found, list) else found
        return Answered(list(first.tokens), first.metrics["mean_acceptance_length"])

    return decode


def one_by_one(count: int) -> Decode:
    """``count`` requests, each with its own seed, one after the other."""

    def decode(runs: Runs, prompt: Prompt, tokens: int) -> Answered:
        found = [generated(temperature=1.0, seed=runs.options.seed + at)(runs, prompt, tokens) for at in range(count)]
        return found[0]

    return decode


def of_transformers(beams: int) -> Decode:
    """transformers' own beam search, in float32."""

    def decode(runs: Runs, prompt: Prompt, tokens: int) -> Answered:
        import torch

        from outpace.targets.hf import HFTarget

        model = runs.model(dtype="float32", target="generic")
        ids = torch.tensor([model.tokenizer.chat(list(prompt.messages))])
        assert isinstance(model.target, HFTarget)
        inner = model.target.model
        inner.generation_config.eos_token_id = None
        with torch.inference_mode():
            found = inner.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=beams,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return Answered(found[0, ids.shape[1] :].tolist(), 1.0)

    return decode


def rows_of(study: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a study, each behind the one that it is compared with."""
    if study == "groups":
        count, apart = options.samples, f"{options.samples} requests, one after the other"
        return [
            Row(apart, "", count, one_by_one(count)),
            Row(f"n={count}", apart, count, generated(n=count, temperature=1.0)),
            Row(f"best_of={count}", apart, count, generated(best_of=count, temperature=1.0)),
        ]
    beams = options.beams
    if study == "transformers":
        theirs = f"transformers, num_beams={beams}"
        ours = generated(num_beams=beams, load={"dtype": "float32"})
        return [Row(theirs, "", beams, of_transformers(beams)), Row(f"num_beams={beams}", theirs, beams, ours)]
    if study == "beams":
        search, drawn = f"num_beams={beams}", f"num_beams={beams}, temperature 1"
        sampled = {"num_beams": beams, "temperature": 1.0}
        return [
            Row(search, "", beams, generated(num_beams=beams)),
            Row("`dsbd`", search, beams, generated(method="dsbd", num_beams=beams, drafted=True)),
            Row(drawn, "", beams, generated(**sampled)),
            Row("`dsbd`, temperature 1", drawn, beams, generated(method="dsbd", drafted=True, **sampled)),
        ]
    found = []
    for count in options.particles:
        apart = f"{count} independent samples"
        sampled = {"n": count, "temperature": 1.0}
        particles = {"method": "smcsd", "settings": {"num_particles": count}, "temperature": 1.0}
        found += [
            Row(apart, "", count, generated(**sampled)),
            Row(f"{apart}, `draft-model`", apart, count, generated(method="draft-model", drafted=True, **sampled)),
            Row(f"`smcsd`, {count} particles", apart, count, generated(drafted=True, **particles)),
        ]
    return found
