"""Two tiny draft models for a target, trained on its own answers: one on its vocabulary, one on a BPE of its own.

    python benchmarks/draft_models.py PROMPTS.jsonl --out FOLDER --minutes 20 --threads 2

Stand-ins, so that the methods that take a draft model can be measured. The target answers prompts (JSON lines with
"turns"), half of them greedily and half at temperature 0.8; both models learn next tokens of these conversations, and
are saved as Hugging Face folders FOLDER/shared and FOLDER/own. A second call with the same folder goes on where the
first one stopped. At the end their accepted length on held-out prompts is printed, greedy and at temperature 0.8.

The target's vocabulary makes the first model's tied embedding its largest part by far (49,152 rows of 128: 6.3 of 6.7
million weights), and its softmax the cost of a step; the second has 4,000 rows.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import outpace
from outpace.core.metrics import total
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.loading import load
from outpace.model import Model

WINDOW = 128
"""Tokens of a training row."""
TOGETHER = 32
"""Prompts that are answered as one batch."""
HELD_OUT = 12
"""Prompts at the end of the file that are never answered for training."""


def read_prompts(path: Path) -> list[str]:
    """First turns of moderate length, shuffled the same way every time."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    prompts = [line["turns"][0] for line in lines if len(line["turns"][0]) < 1500]
    random.Random(0).shuffle(prompts)
    return prompts


def answer(target: Model, prompts: list[str], file: Path, seconds: float, tokens: int) -> list[dict[str, Any]]:
    """Conversations of the target: those in the file, and as many more as the time allows, each written at once."""
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    plain, ended = target.method("none"), time.monotonic() + seconds
    with file.open("a") as out:
        for start in range(len(known), len(prompts) - HELD_OUT, TOGETHER):
            if time.monotonic() > ended:
                break
            decoder, running = Decoder(target.target), []
            for number in range(start, min(start + TOGETHER, len(prompts) - HELD_OUT)):
                ids = tuple(target.tokenizer.chat([{"role": "user", "content": prompts[number]}]))
                params = SamplingParams(temperature=0.8 * (number % 2), seed=number)
                running.append(Request(ids, plain, params, max_new_tokens=tokens, stop_ids=target.eos_ids))
            done = [decoder.submit(request) for request in running]
            decoder.run()
            for one in done:
                known.append({"prompt": one.request.prompt, "answer": one.sequence.tokens[len(one.request.prompt) :]})
                print(json.dumps(known[-1]), file=out, flush=True)
    return known


def own_tokenizer(target: Model, texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the texts; the target's special tokens keep their names."""
    specials = [
        target.tokenizer.token_text(token)
        for token in range(len(target.tokenizer))
        if target.tokenizer.token_bytes(token) is None
    ]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet)
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    end = target.tokenizer.token_text(min(target.eos_ids))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end)


def train(folder: Path, rows: torch.Tensor, vocab: int, eos: int, hidden: int, seconds: float) -> None:
    """Next-token cross entropy, for ``seconds``; a folder that holds a model goes on from it."""
    if (folder / "model.safetensors").exists():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=2,
            num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, max_position_embeddings=2048,
            tie_word_embeddings=True, eos_token_id=eos, bos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    generator, began, step, mean = torch.Generator().manual_seed(1), time.monotonic(), 0, math.log(vocab)
    while (spent := (time.monotonic() - began) / seconds) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * spent)))
        batch = rows[torch.randint(len(rows), (8,), generator=generator)]
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step, mean = step + 1, 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0:
            print(f"{folder.name}: step {step}, loss {mean:.3f}, {100 * spent:.0f}%", flush=True)
    model.save_pretrained(folder)


def windows(stream: list[int]) -> torch.Tensor:
    """Rows of the conversations end to end, half a window apart."""
    return torch.tensor([stream[at : at + WINDOW] for at in range(0, len(stream) - WINDOW, WINDOW // 2)])


def accepted_length(target: Model, draft: Model, method: str, settings: dict[str, Any], prompts: list[str]) -> str:
    """Mean tokens a round over the prompts, greedy and at temperature 0.8."""
    built, figures = target.method(method, settings, draft_model=draft), []
    for temperature in (0.0, 0.8):
        done = []
        for prompt in prompts:
            ids = tuple(target.tokenizer.chat([{"role": "user", "content": prompt}]))
            decoder = Decoder(target.target)
            params = SamplingParams(temperature=temperature)
            one = decoder.submit(Request(ids, built, params, max_new_tokens=48, stop_ids=target.eos_ids))
            decoder.run()
            done.append(one.metrics)
        figures.append(f"{total(done).figures()['mean_acceptance_length']:.2f}")
    return " / ".join(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, help='JSON lines with "turns"')
    parser.add_argument("--out", type=Path, required=True, help="folder for answers and models")
    parser.add_argument("--model", default="smollm2", help="the target")
    parser.add_argument("--minutes", type=float, default=20.0, help="for answers and training together")
    parser.add_argument("--tokens", type=int, default=160, help="longest answer")
    parser.add_argument("--hidden", type=int, default=128, help="width of the draft models")
    parser.add_argument("--vocabulary", type=int, default=4000, help="tokens of the draft model's own BPE")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    target, prompts = outpace.load(options.model), read_prompts(options.prompts)
    seconds = 60.0 * options.minutes
    talks = answer(target, prompts, options.out / "answers.jsonl", 0.5 * seconds, options.tokens)
    ids = [[*talk["prompt"], *talk["answer"]] for talk in talks]
    print(f"{len(ids)} conversations, {sum(len(one) for one in ids)} tokens")
    shared, own = options.out / "shared", options.out / "own"
    eos = min(target.eos_ids)
    stream = [token for one in ids for token in one]
    train(shared, windows(stream), target.target.vocab_size, eos, options.hidden, 0.3 * seconds)
    target.tokenizer.inner.save_pretrained(shared)  # type: ignore[attr-defined]
    texts = ["".join(map(target.tokenizer.token_text, one)) for one in ids]
    if not (own / "tokenizer.json").exists():
        own_tokenizer(target, texts, options.vocabulary).save_pretrained(own)
    words = PreTrainedTokenizerFast.from_pretrained(own)
    stream = [token for text in texts for token in words(text)["input_ids"]]
    train(own, windows(stream), len(words), words.eos_token_id, options.hidden, 0.2 * seconds)
    held_out = prompts[-HELD_OUT:]
    print("accepted length on held-out prompts, greedy / temperature 0.8")
    for label, folder, method, settings in (
        ("the target's vocabulary", shared, "draft-model", {}),
        ("its own, tli", own, "hetvocab", {"algorithm": "tli"}),
        ("its own, slem", own, "hetvocab", {"algorithm": "slem"}),
    ):
        print(f"{label:24} {accepted_length(target, load(str(folder)), method, settings, held_out)}", flush=True)


if __name__ == "__main__":
    main()
