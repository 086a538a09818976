"""Comparing a fast target with plain PyTorch on the same weights, layer by layer.

For models that are loaded without transformers, whose own forward is not there to compare with. Each layer gets the
target's own states, so a wrong part shows where it is, and only that layer's weights are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from outpace.core.tree import TokenTree
from outpace.targets.dense.decoder_spec import DecoderSpec, LayerSpec, Matrix
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from outpace.targets.row_target import RowTarget

_TOKENS = 24
_COMMITTED = 12
_WEIGHTS = 2**27
"""Weights of layers that are compared, at most: dequantising them takes a second."""
_ROWS = 1024
"""Rows of the LM head that are compared."""


@torch.inference_mode()
def layer_disagreement(target: RowTarget, spec: DecoderSpec) -> float:
    """The largest root mean square difference of any part, in root mean squares of what the part adds.

    The parts: embeddings, layers, logits of some tokens, and logits over committed K/V against those of one tree.
    ``spec``: what ``target`` was packed from.
    """
    tokens = [(1 + 7919 * step) % target.vocab_size for step in range(_TOKENS)]
    layers = range(target.num_layers + 1)
    sequence, later = target.sequence(tokens[:1]), target.sequence(tokens[:_COMMITTED])
    whole = target.score([(sequence, TokenTree.chain(tokens[1:]))], aux_hidden_state_layers=layers)[0]
    target.prefill([later])
    behind = target.score([(later, TokenTree.chain(tokens[_COMMITTED:]))])[0].logits
    target.close(sequence.kv)
    target.close(later.kv)
    states = [whole.hidden_states[layer].float() for layer in layers]
    found = [_difference(behind, whole.logits[_COMMITTED - 1 :], centred=True)]
    ends = _Reference(spec, torch.tensor(tokens))
    found.append(_difference(states[0], ends.embeddings()))
    found.append(_difference(whole.logits[:, ends.chosen], ends.logits(states[-1]), centred=True))
    for index, layer in _some(spec):
        added = ends.layer(layer, states[index]) - states[index]
        found.append(_difference(states[index + 1] - states[index], added))
    return max(found)


def _difference(ours: Tensor, own: Tensor, *, centred: bool = False) -> float:
    """Root mean square, in that of ``own`` (``centred``: its standard deviation); infinite where not finite."""
    scale = float(own.std() if centred else own.square().mean().sqrt())
    found = float((ours.float() - own).square().mean().sqrt()) / (scale or 1.0)
    return found if found < float("inf") else float("inf")


def _some(spec: DecoderSpec) -> Iterable[tuple[int, LayerSpec]]:
    """Layers evenly spaced, the first and the last among them, as many as the weights that are compared allow."""
    count = len(spec.layers)
    first = spec.layers[0]
    matrices = (first.query, first.key, first.value, first.out, first.gate, first.up, first.down)
    room = max(2, _WEIGHTS // sum(one.weight.numel() for one in matrices))
    chosen = range(count) if count <= room else sorted({round(at * (count - 1) / (room - 1)) for at in range(room)})
    return ((index, first if index == 0 else spec.layers[index]) for index in chosen)


class _Reference:
    """Plain PyTorch in float32 on a spec's weights, and on some rows of its embedding and its LM head."""

    def __init__(self, spec: DecoderSpec, tokens: Tensor) -> None:
        self._spec, self._tokens = spec, tokens
        step = max(1, spec.vocabulary // _ROWS)
        self.chosen = torch.arange(0, spec.vocabulary, step)
        head = spec.embedding if spec.lm_head is None else spec.lm_head
        bias = None if head.bias is None else head.bias[self.chosen].float()
        self._ends = replace(
            spec,
            layers=[],
            embedding=Matrix(spec.embedding.rows(tokens)),
            lm_head=Matrix(head.rows(self.chosen), bias),
            in_blocks=False,
            context_length=min(spec.context_length, _TOKENS),
        )

    def embeddings(self) -> Tensor:
        """(tokens, hidden)."""
        return GraphTarget(self._ends, torch.float32).embed(torch.arange(len(self._tokens)))

    def logits(self, states: Tensor) -> Tensor:
        """Of the chosen tokens."""
        return GraphTarget(self._ends, torch.float32).lm_head(states)

    def layer(self, layer: LayerSpec, states: Tensor) -> Tensor:
        """What a layer makes of (n, hidden) states of one sequence from its beginning."""
        target = GraphTarget(replace(self._ends, layers=[layer.dense(torch.float32)]), torch.float32)
        rows = len(states)
        tree = TokenTree.chain(self._tokens[1:].tolist())
        part = SequenceRows(target.open(), 0, rows, list(range(rows)), tree)
        plan = ForwardPlan([part], stop=1, states=states, wanted=frozenset([1]))
        target.run(plan, self._tokens.tolist(), logits=False)
        return plan.hidden_states[1]
