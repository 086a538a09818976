"""GraphTarget: the suite that every target passes, on the CPU."""

from __future__ import annotations

from typing import Any

from outpace.targets.base import Target
from outpace.targets.dense.architectures import KNOWN
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from recorder import record
from target_suite import ARCHITECTURES, KVChoice, KVMemory, SubGraphs, TreeScoring


def build(model: Any) -> Target:
    return GraphTarget(read_decoder_spec(model), prefill_chunk=16)


class TestTreeScoring(TreeScoring):
    build = staticmethod(build)
    architectures = tuple(name for name in ARCHITECTURES if name in KNOWN or f"{name}_text" in KNOWN)


class TestKVMemory(KVMemory):
    build = staticmethod(build)
    architectures = TestTreeScoring.architectures


class TestSubGraphs(SubGraphs):
    build = staticmethod(build)


class TestKVChoice(KVChoice):
    build = staticmethod(build)
    architectures = TestTreeScoring.architectures


class TestReplayedTreeScoring(TreeScoring):
    """Everything that can be is replayed from a recording, at every use but a buffer's first."""

    build = staticmethod(lambda model: GraphTarget(read_decoder_spec(model), prefill_chunk=16, capture=record))
    architectures = ("llama", "gemma3")
