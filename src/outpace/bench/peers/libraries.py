"""The libraries that outpace is compared with: how each is installed, what it reads, and what it is set to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.core.errors import BadInput
from outpace.core.names import unknown


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a library. ``settings`` go to its worker; a ``draft`` needs --draft-model.

    ``formats``: there is a row for each of --gguf-formats.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    draft: bool = False
    formats: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """One library. ``own_python``: it lives in an environment of its own. ``compiled``: when pip installs it."""

    name: str
    module: str
    worker: str
    reads: Literal["folder", "gguf"]
    install: str
    configs: tuple[Config, ...]
    aliases: tuple[str, ...] = ()
    own_python: bool = False
    compiled: bool = False


# Draft lengths are those of each library's own examples (llama-cpp-python: the one for CPUs); transformers names none.
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "transformers",
            "transformers",
            "transformers.py",
            "folder",
            "pip install transformers",
            (
                Config("plain"),
                Config("prompt-lookup", {"prompt_lookup_num_tokens": 10}),
                Config("draft-model", {"draft": True}, draft=True),
            ),
            ("hf",),
        ),
        Peer(
            "llama-cpp-python",
            "llama_cpp",
            "llama_cpp.py",
            "gguf",
            "pip install llama-cpp-python",
            (Config("plain", formats=True), Config("prompt-lookup", {"max_ngram_size": 2, "num_pred_tokens": 2})),
            ("llama.cpp", "llama-cpp", "llama_cpp"),
            compiled=True,
        ),
        Peer(
            "openvino-genai",
            "openvino_genai",
            "openvino.py",
            "gguf",
            "pip install openvino-genai",
            (
                Config("plain"),
                Config("prompt-lookup", {"lookup": True, "num_assistant_tokens": 5, "max_ngram_size": 3}),
                Config("draft-model", {"draft": True, "num_assistant_tokens": 5}, draft=True),
            ),
            ("openvino", "openvino_genai"),
        ),
        Peer(
            "vllm",
            "vllm",
            "vllm.py",
            "folder",
            "make peers, or name its interpreter: --vllm-python PATH",
            (
                Config("plain"),
                Config("n-gram", {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}),
                Config("suffix", {"method": "suffix", "num_speculative_tokens": 32}),
            ),
            own_python=True,
        ),
    )
}


def choose(names: Sequence[str] | None) -> list[Peer]:
    """Peers by name, or all. Raises BadInput for a name that is none."""
    if names is None:
        return list(PEERS.values())
    known = {alias: peer for peer in PEERS.values() for alias in (peer.name, *peer.aliases)}
    chosen: dict[str, Peer] = {}
    for name in names:
        peer = known.get(name.lower())
        if peer is None:
            raise unknown("peer", name, {alias: one.name for alias, one in known.items()})
        chosen[peer.name] = peer
    if not chosen:
        raise BadInput(f"name at least one peer: {', '.join(PEERS)}")
    return list(chosen.values())
