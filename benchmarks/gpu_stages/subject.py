"""Subject: the model that the stages run, on its device, and what they share: sequences, trees, clocks, printing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from statistics import median
from time import perf_counter
from typing import Any

import torch

import outpace
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.model import Model
from outpace.targets.base import Sequence
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.graphs import Capture, Graphs
from outpace.targets.dense.transformers_weights import read_decoder_spec

ROWS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 2, 4, 8, 16)
RANDOM = "random-1.5b"
SHAPE: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


@dataclass(slots=True)
class Subject:
    """A loaded model and how long to measure it. ``repeat``: how often each time is taken."""

    model: Model
    target: GraphTarget
    repeat: int = 20

    @property
    def device(self) -> torch.device:
        return self.target.device

    def opened(self, lengths: Seq[int], seed: int = 0) -> list[Sequence]:
        """Sequences of so many random tokens each, ready to be scored."""
        draws = torch.Generator().manual_seed(seed)
        found = [
            self.target.sequence(torch.randint(self.target.vocab_size, (length,), generator=draws).tolist())
            for length in lengths
        ]
        self.target.prefill(found)
        return found

    def close(self, sequences: Seq[Sequence]) -> None:
        """Release their K/V."""
        for sequence in sequences:
            self.target.close(sequence.kv)

    def chain(self, rows: int) -> TokenTree:
        """A tree whose forward has so many rows, each seeing those before it."""
        return TokenTree.chain(token % self.target.vocab_size for token in range(200, 199 + rows))

    @contextmanager
    def without_capture(self) -> Iterator[None]:
        """Forwards of the same shapes over the same buffers run as they are, nothing being captured or replayed."""
        kept = self.target.graphs
        self.target.graphs = Graphs(None)
        try:
            yield
        finally:
            self.target.graphs = kept

    def seconds(self, work: Callable[[], object], repeat: int | None = None) -> float:
        """Median of the time that ``work`` takes, until the device has done it; three runs before are not counted."""
        for _ in range(3):  # of a new shape: as it is, captured, replayed
            work()
        return median(self.timed(work) for _ in range(repeat or self.repeat))

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of one run, until the device has done it."""
        settle(self.device)
        began = perf_counter()
        work()
        settle(self.device)
        return perf_counter() - began


def settle(device: torch.device) -> None:
    """Wait for the device, so that a clock shows what the work took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> int:
    """Bytes that PyTorch holds on the device and cannot give back; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def bandwidth(subject: Subject, megabytes: int = 2048) -> float:
    """Bytes per second of reading memory, the best of a few."""
    buffer = torch.ones(megabytes * 2**20 // 4, device=subject.device)
    return buffer.nbytes / min(subject.seconds(buffer.max, 5) for _ in range(3))


def load(name: str, dtype: str, device: str, repeat: int, capture: Capture | None = None) -> Subject:
    """The model on a GPU, as users load it. Raises BadInput where the fast target does not take it.

    ``capture`` stands in for CUDA's: the tests run the stages on a CPU with it.
    """
    model = outpace.load(name, dtype=dtype, device=device, target="auto" if capture is None else "generic")
    if capture is not None:
        inner: Any = model.target
        target = GraphTarget(read_decoder_spec(inner.model), capture=capture)
        model = Model(model.name, target, model.tokenizer, model.eos_ids, model.info)
    if not isinstance(model.target, GraphTarget):
        raise BadInput(f"'{name}' does not run on the fast target: {model.info.get('note') or 'no reason given'}")
    return Subject(model, model.target, repeat)


def random_folder(folder: Path, tokenizer_of: str, dtype: str, device: str, shape: dict[str, Any] | None = None) -> str:
    """A folder with a Llama of random weights, in the shape of a common model of 1.5 billion, and the tokenizer of
    another model. Made once."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from outpace.bench.peers.weights import find

    if (folder / "complete").exists():
        return str(folder)
    words = Path(find(tokenizer_of, dtype).folder)
    ends = {key: json.loads((words / "config.json").read_text())[key] for key in ("bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            LlamaConfig(**(shape or SHAPE), **ends), dtype=getattr(torch, dtype)
        )
    model.save_pretrained(folder)
    for file in words.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            copyfile(file, folder / file.name)
    (folder / "complete").touch()
    return str(folder)
