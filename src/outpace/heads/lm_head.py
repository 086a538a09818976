"""LmHead: a head's LM head as it runs beside a target, whatever its form; and Product, one matrix.

Borrowed or trained rows are one product. A low-rank LM head (SlimSpec, Plaksin et al. 2026) is two: hidden to rank, a
small one in PyTorch, and rank to vocabulary, where nearly all of the work is. The large product runs on the compiled
kernels beside a target that runs on them, in PyTorch beside any other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.heads.base import Head
from outpace.heads.head_config import HeadConfig
from outpace.heads.head_runner import HeadRunner, head_spec
from outpace.targets.base import Target


class Product:
    """Rows (n, inputs) times a matrix (outputs, inputs), behind a norm if there is one: (n, outputs) float32.

    A HeadRunner without layers: in the precision that a head is packed in beside ``target``.
    """

    def __init__(self, config: HeadConfig, weight: Tensor, target: Target, *, norm: nn.RMSNorm | None = None) -> None:
        plan = head_spec(config, [], rows=weight, final_norm=norm, width=weight.shape[1], device=target.device)
        if norm is not None and norm.eps is not None:
            plan.epsilon = norm.eps
        self._runner = HeadRunner(plan, target)

    @property
    def device(self) -> torch.device:
        """The device that rows must be on."""
        return self._runner.device

    def __call__(self, rows: Tensor) -> Tensor:
        return self._runner.logits(rows)


class LmHead:
    """States (n, hidden) to logits (n, Vd) over the head's draft vocabulary.

    For drafters whose runner does not compute the logits itself::

        self.lm_head = LmHead(head, target, norm=head.norm)    # norm=None where states are normed already
        out = runner.run(batch, logits=False)                  # head_spec(..., rows=None) without final_norm
        logits = self.lm_head(torch.cat([one.states for one in out]))
        tokens = head.draft_vocabulary.d2t[logits.argmax(-1)]

    A drafter with layers needs it for a low-rank LM head (``head.draft_vocabulary.rank > 0``) only: other rows go into
    the runner's own forward (``head_spec(..., rows=...)``).
    """

    def __init__(self, head: Head, target: Target, *, norm: nn.RMSNorm | None = None) -> None:
        """``norm``: what stands before the LM head."""
        vocabulary = head.draft_vocabulary
        self._down: Tensor | None = None
        self._epsilon: float | None = None
        if not vocabulary.rank:
            self._product = Product(head.config, vocabulary.rows, target, norm=norm)
            return
        self._product = Product(head.config, vocabulary.up, target)
        down = vocabulary.down.detach().float()
        if norm is not None:
            # The norm's weights are multiplied into the columns of the first matrix; its factor for each row remains.
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
