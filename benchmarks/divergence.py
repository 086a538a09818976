"""How far each precision's distribution is from float32's, on the bench's own prompts.

    python benchmarks/divergence.py --prompts 14

The reference is transformers' forward in float32. Every row of every prompt counts: Kullback-Leibler divergence of the
next token's distribution (mean and the largest), how often the likeliest token is the same, and the mean difference of
the logits of the twenty likeliest tokens.
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

_ROWS = 160  # of each prompt, from its beginning


def logits(target: Target, tokens: list[int]) -> Tensor:
    sequence = target.sequence(tokens[:1])
    found = target.score([(sequence, TokenTree.chain(tokens[1:]))])[0].logits.float()
    target.close(sequence.kv)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds: list[tuple[str, TargetKind]] = [
        ("float32", "generic"),
        ("bfloat16", "generic"),
        ("float32", "auto"),
        ("bfloat16", "auto"),
        ("int8", "auto"),
        ("int4", "auto"),
    ]
    reference: list[Tensor] = []
    print(f"{'precision':<26}{'mean KL':>10}{'largest KL':>12}{'same top':>10}{'top-20 logits':>15}")
    for dtype, kind in kinds:
        model = outpace.load(options.model, dtype=dtype, target=kind)
        prompts = [
            model.tokenizer.chat([{"role": "user", "content": prompt.turns[0]}])[:_ROWS]
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
        every = torch.cat(distances)
        print(
            f"{name:<26}{every.mean():>10.5f}{every.max():>12.4f}"
            f"{100 * torch.cat(same).mean():>9.1f}%{torch.cat(moved).mean():>15.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
