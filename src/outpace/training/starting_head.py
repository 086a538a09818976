"""StartingHead: a trained head that a training begins from, in place of new weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads import checkpoint
from outpace.heads.base import Head
from outpace.heads.head_config import HeadConfig, TargetFacts
from outpace.heads.head_folder import HeadFolder, HeadOwner
from outpace.heads.kinds import find_kind, plan, weight_shapes
from outpace.heads.shipped import find_head
from outpace.model import Model
from outpace.training.dataset import Dataset

SIZE = "base"
"""Of a new head, where nobody asks for one."""
_SPENT = ("steps", "tokens", "seconds")


@dataclass(frozen=True, slots=True)
class StartingHead:
    """``named``: as the user did; ``weights``: their fingerprint; ``spent``: steps, tokens and seconds behind them."""

    named: str
    head: Head
    weights: str
    spent: Mapping[str, float]

    @classmethod
    def of(cls, named: str | Path, folder: HeadFolder, model: HeadOwner) -> StartingHead:
        """The head of a folder, loaded. Raises BadInput where it does not fit the model."""
        about = checkpoint.read_provenance(folder.files.path) or {}
        parts = about, _table(_table(about.get("from")).get("spent"))
        spent = {name: round(sum(_amount(part.get(name)) for part in parts), 1) for name in _SPENT}
        return cls(str(named), folder.load(model.target), folder.files.fingerprint, spent)

    def config(
        self, facts: TargetFacts, *, size: str | None, vocabulary: int | None, rank: int, options: Mapping[str, Any]
    ) -> HeadConfig:
        """That of the training: the head's own with other ``options``, and as many draft tokens or more.

        ``size``, ``vocabulary`` and ``rank``: None, None and 0 where nobody asks for one; a ``vocabulary`` of 0 is all
        tokens. Raises BadInput for what changes the shapes of its weights.
        """
        old, ours = self.head.config, f"--from {self.named}"
        kind, every = find_kind(old.kind), {**old.options, **options}
        wanted = plan(kind, facts, options=every, aux_hidden_state_layers=old.aux_hidden_state_layers)
        changed = {"target": facts, "options": wanted.options, "layers": wanted.layers, "rank_accuracies": ()}
        if size is not None and kind.shapes_of(facts.hidden_size, size, kind.Options.model_validate(every)) != {
            name: getattr(old, name) for name in ("heads", "kv_heads", "head_size", "intermediate")
        }:
            raise BadInput(f"{ours} is not of --size {size}; leave --size out")
        if rank and rank != old.rank:
            raise BadInput(f"{ours} has an LM head of rank {old.rank}, not {rank}; leave --rank out")
        count = old.vocabulary if vocabulary is None else min(vocabulary or facts.vocab_size, facts.vocab_size)
        if count < old.vocabulary:
            raise BadInput(f"{ours} drafts {old.vocabulary} tokens; --vocabulary must be at least as many")
        if count > old.vocabulary and self.head.draft_vocabulary.own:
            raise BadInput(f"{ours} has an LM head of its own for {old.vocabulary} tokens; leave --vocabulary out")
        config = old.model_copy(update={**changed, "vocabulary": count})
        before, after = weight_shapes(old), weight_shapes(config)
        other = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        if other:
            raise BadInput(f"{ours} has other weights than these settings ask for ({', '.join(other[:3])})")
        return config

    def words(self, count: int, data: Dataset, vocab_size: int) -> Tensor:
        """Its draft tokens, and those that the data's answers use most where there are to be more; (count,) long."""
        own = self.head.draft_vocabulary.d2t.cpu()
        return own if len(own) == count else data.words(count, vocab_size, own.tolist())

    @torch.no_grad()
    def lend(self, head: Head) -> None:
        """Give its weights to ``head``, of the same shapes."""
        given = {
            name: value.float()
            for name, value in self.head.state_dict().items()
            if name != "draft_vocabulary.d2t"  # those of the head may be more
        }
        head.load_state_dict(given, strict=False)

    def public(self) -> dict[str, Any]:
        """As a head's provenance has it."""
        return {"head": Path(self.named).name, "weights": self.weights, "spent": dict(self.spent)}


def _table(value: object) -> Mapping[str, object]:
    """Of provenance, which another program may have written: for information alone, so what is odd counts as none."""
    return value if isinstance(value, Mapping) else {}


def _amount(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def begun_from(
    named: str | Path | None, kind: str, model: Model | Callable[[], Model]
) -> tuple[StartingHead | None, Model]:
    """The head in a folder, or the shipped one of a kind, to begin from; and the model, loaded once it is found.

    Raises BadInput for no such head, one that is not of ``kind``, and one that does not fit the model.
    """
    given = model

    @cache
    def load() -> Model:
        return given if isinstance(given, Model) else given()

    if named is None:
        return None, load()
    found = find_head(named, load)
    if found.kind != kind:
        raise BadInput(f"--from {named} is a head of kind {found.kind}, and {kind} is to be trained")
    return StartingHead.of(named, found, load()), load()


def planned(
    start: StartingHead | None,
    kind: str,
    facts: TargetFacts,
    *,
    size: str | None,
    vocabulary: int | None,
    rank: int,
    options: Mapping[str, Any],
) -> HeadConfig:
    """The configuration of a head that begins as ``start``, or of a new one; as :meth:`StartingHead.config` has it."""
    if start is not None:
        return start.config(facts, size=size, vocabulary=vocabulary, rank=rank, options=options)
    return plan(find_kind(kind), facts, size=size or SIZE, vocabulary=vocabulary or 0, rank=rank, options=options)
