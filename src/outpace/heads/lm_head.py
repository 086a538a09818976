"""LmHead: a head's words as they are scored beside a target, whatever their form; and the single matrix, Product.

Rows that are borrowed or trained are one product; a low-rank LM head (SlimSpec, Plaksin et al. 2026) is two: hidden to
rank, a small one in PyTorch, and rank to words, where nearly all of the work is. The large product runs on the compiled
kernels beside a fast target, in PyTorch beside any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.heads.base import Head, HeadConfig
from outpace.heads.runner import HeadRunner, head_spec
from outpace.targets.base import Target


class Product:
    """Rows (n, inputs) times a matrix (outputs, inputs), behind a norm if there is one: (n, outputs) float32.

    A stack without layers: in the precision that a head is packed in beside ``target``.
    """

    def __init__(self, config: HeadConfig, weight: Tensor, target: Target, *, norm: nn.RMSNorm | None = None) -> None:
        plan = head_spec(config, [], rows=weight, final_norm=norm, width=weight.shape[1], device=target.device)
        if norm is not None and norm.eps is not None:
            plan.epsilon = norm.eps
        self._runner = HeadRunner(plan, target)

    @property
    def device(self) -> torch.device:
        """Where rows are wanted."""
        return self._runner.device

    def __call__(self, rows: Tensor) -> Tensor:
        return self._runner.logits(rows)


class LmHead:
    """States to logits over the head's words.

    For drafters whose layers do not end in their own stack's LM head::

        self.lm_head = LmHead(head, target, norm=head.norm)    # norm=None where states are normed already
        out = stack.run(batch, logits=False)                   # stack_plan(..., rows=None) without final_norm
        logits = self.lm_head(torch.cat([one.states for one in out]))
        tokens = head.words.ids[logits.argmax(-1)]

    A drafter that has a stack needs this for ``head.words.rank > 0`` alone: rows otherwise go into the stack itself,
    whose last product then overlaps with its layers.
    """

    def __init__(self, head: Head, target: Target, *, norm: nn.RMSNorm | None = None) -> None:
        """``norm``: what stands before the LM head."""
        words = head.words
        self._down: Tensor | None = None
        self._epsilon: float | None = None
        if not words.rank:
            self._product = Product(head.config, words.rows, target, norm=norm)
            return
        self._product = Product(head.config, words.up, target)
        down = words.down.detach().float()
        if norm is not None:
            # A norm's weights multiply columns of the first product: what is left of it is a factor for each row.
            self._epsilon = head.config.epsilon if norm.eps is None else norm.eps
            down = down * norm.weight.detach().float()
        self._down = down.to(self._product.device)

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """Logits (n, Vd) in float32 of states (n, hidden) as they enter the norm."""
        if self._down is None:
            return self._product(states)
        states = states.to(self._down)
        narrow = functional.linear(states, self._down)
        if self._epsilon is not None:
            narrow *= torch.rsqrt(states.square().mean(-1, keepdim=True) + self._epsilon)
        return self._product(narrow)
