"""LmHead: a head's words as they are scored beside a target, whatever their form.

Rows that are borrowed or trained are one product; a low-rank LM head (SlimSpec, Plaksin et al. 2026) is two: hidden to
rank, a small one in PyTorch, and rank to words, where nearly all of the work is. The large product runs on the compiled
kernels beside a fast target, in PyTorch beside any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.heads.base import Head
from outpace.heads.stack import Stack, stack_plan
from outpace.targets.base import Target


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
        words, config = head.words, head.config
        device = getattr(target, "device", torch.device("cpu"))
        self._down: Tensor | None = None
        self._normed = norm is not None
        self._epsilon = norm.eps if norm is not None and norm.eps is not None else config.epsilon
        if words.rank:
            # A norm's weights multiply columns of the first product: what is left of it is a factor for each row.
            wide = words.down.detach().float()
            self._down = (wide if norm is None else wide * norm.weight.detach().float()).to(device)
            plan = stack_plan(config, [], rows=words.up, width=words.rank, device=device)
        else:
            plan = stack_plan(config, [], rows=words.rows, final_norm=norm, device=device)
            plan.epsilon = self._epsilon
        self._stack = Stack(plan, target)

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """Logits (n, Vd) in float32 of states (n, hidden) as they enter the norm."""
        if self._down is not None:
            states = states.to(self._down)
            narrow = functional.linear(states, self._down)
            if self._normed:
                narrow *= torch.rsqrt(states.square().mean(-1, keepdim=True) + self._epsilon)
            states = narrow
        return self._stack.logits(states)
