"""DenseTarget: the suite that every target passes."""

from __future__ import annotations

from typing import Any

from outpace.targets.base import Target
from outpace.targets.dense.architectures import KNOWN
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from target_suite import ARCHITECTURES, KVChoice, KVMemory, SubGraphs, TreeScoring


def build(model: Any) -> Target:
    return DenseTarget(read_decoder_spec(model), prefill_chunk=16)


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
