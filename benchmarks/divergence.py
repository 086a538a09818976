"""How far each precision's distribution is from float32's, on the bench's own prompts.

    python benchmarks/divergence.py --prompts 14
    python benchmarks/divergence.py --dtypes bfloat16,int4 --kv-dtype auto,int8

The reference is transformers' forward in float32. Every row of every prompt counts: Kullback-Leibler divergence of the
next token's distribution (mean and the largest), how often the likeliest token is the same, and the mean difference of
the logits of the twenty likeliest tokens. ``--rows`` takes longer pieces of prompts, where K/V weighs more.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import outpace
from outpace.core.tree import TokenTree
from outpace.prompts.questions import load_prompts
from outpace.targets.base import Target
from outpace.targets.choice import TargetKind


def logits(target: Target, tokens: list[int]) -> Tensor:
    sequence = target.sequence(tokens[:1])
    found = target.score([(sequence, TokenTree.chain(tokens[1:]))])[0].logits.float()
    target.close(sequence.kv)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--rows", type=int, default=160, help="of each prompt, from its beginning")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8,int4", help="of the fast target")
    parser.add_argument("--kv-dtype", default="auto", help="of the fast target, one or more: auto,int8")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds: list[tuple[str, TargetKind, str]] = [("float32", "generic", "auto"), ("bfloat16", "generic", "auto")]
    for dtype in options.dtypes.split(","):
        keeps = options.kv_dtype.split(",") if dtype != "float32" else ["auto"]
        kinds += [(dtype, "auto", kv) for kv in keeps]
    reference: list[Tensor] = []
    print(f"{'precision':<34}{'K/V a token':>12}{'mean KL':>10}{'largest KL':>12}{'same top':>10}{'top-20 logits':>15}")
    for dtype, kind, kv in kinds:
        model = outpace.load(options.model, dtype=dtype, target=kind, kv_dtype=kv)
        prompts = [
            model.tokenizer.chat([{"role": "user", "content": prompt.turns[0]}])[: options.rows]
            for prompt in load_prompts(limit=options.prompts)
        ]
        found = [logits(model.target, tokens) for tokens in prompts]
        reference = reference or found
        distances, same, moved = [], [], []
        for ours, theirs in zip(found, reference, strict=True):
            p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
            distances.append((p.exp() * (p - q)).sum(-1))
            same.append((ours.argmax(-1) == theirs.argmax(-1)).float())
            top = theirs.topk(20).indices
            moved.append((ours.gather(1, top) - theirs.gather(1, top)).abs().mean(-1))
        name = f"{dtype}, {'transformers' if kind == 'generic' else 'fast target'}"
        name += f", K/V {kv}" if kv != "auto" else ""
        kept = f"{size / 1024:.1f} KiB" if (size := model.target.kv_bytes_per_token) else ""
        every = torch.cat(distances)
        print(
            f"{name:<34}{kept:>12}{every.mean():>10.5f}{every.max():>12.4f}"
            f"{100 * torch.cat(same).mean():>9.1f}%{torch.cat(moved).mean():>15.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
