"""What the layers of a target tell of its drafts: recorded from greedy decoding, node by node.

At each layer boundary the state of a node's parent goes through the final norm and the LM head, as it is and after a
linear map that was fitted to the target's last states (on other prompts). What is kept of the logits is what a check
could read: the draft token beside its siblings, beside a reduced vocabulary, beside all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outpace.api.requests import prompt_ids, request
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.targets.base import Scores, Trees, TreeScores
from outpace.targets.sub_graph import FULL, SubGraph

REDUCED = 4096
"""Tokens of the reduced vocabulary."""
CHECKS = ("tree", "reduced", "full", "reduced, fitted", "full, fitted")
"""What a check reads: logits of the tree's own tokens, of these and a reduced vocabulary, of all tokens; after the
linear map."""
RIDGE = 1e-2
"""Of the mean square of a state's entries."""
_LONGEST = 1000
"""Tokens of a prompt whose states are fitted."""
Forward: TypeAlias = tuple[int, TreeScores, dict[int, Tensor]]
"""The prompt's number, the scores, and states by layer."""


@dataclass
class Round:
    """One tree and its verdict. ``hits``: whether a node's token is the target's choice after its parent."""

    prompt: int
    parents: list[int]
    path_probs: list[float]
    hits: list[bool]
    found: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    """By (layer, check): for each node (its logit beside the largest one, its log-probability), both among what the
    check reads."""


class Recorder:
    """Decodes, reading the target's states at ``layers`` in each forward."""

    def __init__(self, model: Model, method: Method, layers: Seq[int]) -> None:
        self.model, self.method, self.layers = model, method, tuple(layers)
        self.maps: dict[int, Tensor] = {}
        self.reduced = torch.zeros(0, dtype=torch.long)
        self.forwards: list[Forward] = []
        self._prompt = 0

    def decode(self, prompts: Iterable[tuple[int, Prompt]], length: int) -> list[Forward]:
        """Every forward over a draft."""
        target = self.model.target
        plain, last = target.score, target.num_layers

        def score(batch: Trees, layers: Seq[int] = (), graph: SubGraph = FULL, resume: Scores | None = None) -> Scores:
            found = plain(batch, sorted({*layers, *self.layers, last}), graph, resume)
            for part in found.parts:
                states = dict(part.hidden_states)
                part.hidden_states = {layer: states[layer] for layer in layers}
                if len(part.tree):
                    self.forwards.append((self._prompt, part, states))
            return found

        self.forwards = []
        target.score = score  # type: ignore[method-assign, assignment]
        try:
            for self._prompt, prompt in prompts:
                text, decoder = prompt.turns[0], Decoder(target, self.model.tokenizer)
                decoder.submit(request(self.model, text, method=self.method, max_new_tokens=length, temperature=0.0))
                decoder.run()
        finally:
            del target.score
        return self.forwards

    @torch.inference_mode()
    def fit(self, prompts: Seq[tuple[int, Prompt]], length: int) -> None:
        """Fit the linear maps, and choose the reduced vocabulary: what the target finds likely most often."""
        forwards = self.decode(prompts, length)
        target, every = self.model.target, [states for _, _, states in forwards]
        for _, prompt in prompts:
            sequence = target.sequence(prompt_ids(self.model, prompt.turns[0])[:_LONGEST])
            layers = (*self.layers, target.num_layers)
            target.prefill([sequence], layers, lambda *chunk: every.append(dict(chunk[-1])))
            target.close(sequence.kv)
        last = torch.cat([states[target.num_layers] for states in every])
        for layer in self.layers:
            rows = torch.cat([states[layer] for states in every])
            rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
            square = rows.T @ rows
            square += RIDGE * len(rows) * rows[:, :-1].square().mean() * torch.eye(len(square))
            self.maps[layer] = torch.linalg.solve(square, rows.T @ last)
        counts: Counter[int] = Counter()
        for _, part, _ in forwards:
            counts.update(part.logits.topk(64).indices.flatten().tolist())
        self.reduced = torch.tensor([token for token, _ in counts.most_common(REDUCED)])
        self.forwards = []

    @torch.inference_mode()
    def rounds(self, prompts: Iterable[tuple[int, Prompt]], length: int) -> list[Round]:
        """Every round with a draft. Prompts must be others than those of ``fit``."""
        found = []
        for one in prompts:  # states of a whole answer are large
            found += [self._round(*forward) for forward in self.decode([one], length)]
            self.forwards = []
        return found

    def _round(self, prompt: int, part: TreeScores, states: dict[int, Tensor]) -> Round:
        tree = part.tree
        parents, tokens = torch.tensor(tree.parents) + 1, torch.tensor(tree.tokens)
        choices = part.logits.argmax(-1)
        hits = (choices[parents] == tokens).tolist()
        one = Round(prompt, list(tree.parents), list(tree.path_acceptance_probs), hits)
        inner = torch.unique(parents)
        at = torch.searchsorted(inner, parents)
        own = torch.unique(tokens)
        some = torch.unique(torch.cat([own, self.reduced]))
        for layer in self.layers:
            rows = states[layer][inner]
            mapped = torch.cat([rows, torch.ones(len(rows), 1)], 1) @ self.maps[layer]
            for suffix, entering in (("", rows), (", fitted", mapped)):
                logits: Any = self.model.target.lm_head(entering)
                mine = logits[at, tokens]
                one.found[layer, "full" + suffix] = _beside(mine, logits, at)
                one.found[layer, "reduced" + suffix] = _beside(mine, logits[:, some], at)
                if not suffix:
                    one.found[layer, "tree"] = _beside(mine, logits[:, own], at)
        return one


def _beside(mine: Tensor, logits: Tensor, at: Tensor) -> np.ndarray:
    largest, total = logits.max(-1).values[at], logits.logsumexp(-1)[at]
    return torch.stack([mine - largest, mine - total], 1).float().numpy()
