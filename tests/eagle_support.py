"""What the tests of the EAGLE family share: heads with random weights, and their networks written out row by row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.controllers.base import Budget
from outpace.core.tree import TokenTree
from outpace.drafting.candidate_tree import CandidateTree
from outpace.engine.method import Method
from outpace.heads.base import Batch, Teacher
from outpace.heads.feature_drafter import FeatureState
from outpace.heads.untrained import random_head
from outpace.methods.registry import build
from outpace.targets.base import Target
from outpace.targets.table import TableTarget, random_table
from weights_support import with_head

KINDS = {"eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3"}


def head_of(kind: str, target: Target, vocabulary: int = 0, **options: Any) -> Any:
    """A random head; ``vocabulary`` 0: of all tokens."""
    return random_head((kind,), target, vocabulary=vocabulary or target.vocab_size, options=options)


def method_of(name: str, target: Target, vocabulary: int = 0, rule: str | None = None, **settings: Any) -> Method:
    """A method of the family with a random head."""
    head = head_of(KINDS[name], target, vocabulary)
    context = with_head(target, head)
    return build(name, context, settings, rule)


def table(vocab: int = 12, seed: int = 8) -> TableTarget:
    return TableTarget(vocab, random_table(vocab, seed))


def true_states(target: Target, tokens: Seq[int], aux_hidden_state_layers: Seq[int]) -> dict[int, Tensor]:
    """The target's states of all ``tokens``, (n, hidden) by layer, from one forward over a chain."""
    sequence = target.sequence(tokens[:1])
    scored = target.score([(sequence, TokenTree.chain(tokens[1:]))], aux_hidden_state_layers)[0]
    return {layer: scored.hidden_states[layer].clone() for layer in aux_hidden_state_layers}


class Written:
    """A head row by row: true rows first, then rows that begin with what left the row before."""

    def __init__(self, head: Any, target: Target) -> None:
        self.head, self.target = head, target

    def fused(self, states: dict[int, Tensor]) -> Tensor:
        if self.head.kind == "eagle3":
            found: Tensor = self.head.fused([states[tap] for tap in self.head.config.aux_hidden_state_layers])
            return found
        return self.target.final_norm(states[self.head.config.aux_hidden_state_layers[0]])

    def rows(self, tokens: Seq[int], states: Tensor, drafted: Seq[int]) -> Tensor:
        """Logits (1 + drafted, Vd) behind the last of ``tokens`` and each drafted one.

        ``states`` (n, hidden): fused, of every token but the last.
        """
        head, layer = self.head, self.head.layers[0]
        attention = layer.self_attn
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        state = states[0]
        for at, token in enumerate([*tokens[1:], *drafted]):
            if at < len(states):
                state = states[at]
            embedded = self.target.embed(torch.tensor([token]))[0]
            if head.kind == "eagle3":
                entering = layer.hidden_norm(state)
                read = torch.cat([layer.input_layernorm(embedded), entering])
                if head.options.residual == "normed":
                    state = entering
            else:
                state = read = head.fc(torch.cat([embedded, state]))
            where = torch.tensor([at])
            query = attention.queries(read[None, None], where)[0, :, 0]
            key, value = attention.keys_values(read[None, None], where)
            keys.append(key[0, :, 0])
            values.append(value[0, :, 0])
            found = []
            for which in range(attention.heads):
                group = which // (attention.heads // attention.kv_heads)
                scores = torch.stack([query[which] @ one[group] for one in keys]) * attention.head_size**-0.5
                found.append(sum(w * v[group] for w, v in zip(scores.softmax(0), values, strict=True)))
            stream = state + attention.o_proj(torch.cat(found))
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
            logits.append(head.draft_vocabulary(head.norm(stream) if head.kind == "eagle3" else stream))
            state = head.handed_on(stream, head.norm(stream)) if head.kind == "eagle3" else stream
        return torch.stack(logits[len(tokens) - 2 :])


def drafted_logits(drafter: Any, state: FeatureState, drafted: Seq[int]) -> Tensor:
    """What the drafter's runtime makes of a chain of given tokens: (1 + drafted, Vd)."""
    seen: list[Tensor] = []

    class Given(CandidateTree):
        def take(self, logits: Tensor) -> list[tuple[int, int]]:
            seen.append(logits.clone())
            at = len(seen) - 1
            return [(at, drafted[at])] if at < len(drafted) else []

        def tree(self) -> TokenTree:
            return TokenTree.chain(drafted)

    drafter.start = lambda *_: Given()
    drafter.propose_batch([state], [Budget(len(drafted) + 1)])
    del drafter.start
    return torch.cat(seen)


def batch_of(
    target: Target, rows: list[list[int]], prompts: list[int], aux_hidden_state_layers: tuple[int, ...]
) -> Batch:
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    answer = real.clone()
    layers = sorted({*aux_hidden_state_layers, target.num_layers})
    states = {layer: torch.zeros(len(rows), longest, target.hidden_size) for layer in layers}
    for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[at, : len(row)] = torch.tensor(row)
        real[at, : len(row)] = True
        answer[at, prompt : len(row)] = True
        for layer, found in true_states(target, row, layers).items():
            states[layer][at, : len(row)] = found
    return Batch(tokens, states, real, answer)


def teacher_for(target: Target, head: Any) -> Teacher:
    every = torch.arange(target.vocab_size)
    return Teacher(
        target.embed(every), target.lm_head_rows(head.draft_vocabulary.d2t), lambda rows: rows, target.num_layers
    )


def packed_of(batch: Batch) -> Batch:
    """The same conversations end to end in one row."""
    sizes = batch.real.sum(1).tolist()

    def joined(rows: Tensor) -> Tensor:
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])[None]

    states = {layer: joined(rows) for layer, rows in batch.states.items()}
    return Batch(joined(batch.tokens), states, joined(batch.real), joined(batch.answer), sizes, [0] * len(sizes))
