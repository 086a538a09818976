"""Metrics of an address with several replicas: the ingress's own counters, and the replicas' with a label each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SAMPLE = re.compile(r"(?P<name>[^\s{]+)(?:\{(?P<labels>.*)\})?(?P<value>\s.*)")
_PARTS = ("_total", "_bucket", "_sum", "_count")


class IngressMetrics:
    """What the ingress counts. ``running``: how many requests are under way."""

    def __init__(self, running: Callable[[], int]) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        self._answers = self._counter("ingress_requests", "Requests that were answered, by status code.", "status")
        self._replays = self._counter("ingress_replays", "Requests that another replica answered after one died.")
        self._broken = self._counter("ingress_broken_streams", "Streams that ended early because a replica died.")
        self._replicas = self._counter(
            "ingress_replica_requests", "Requests that a replica began to answer.", "replica"
        )
        self.registry.register(_Running(running))

    def _counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(f"outpace:{name}", text, labels, registry=self.registry)

    def answered(self, status: int) -> None:
        """A request was answered or refused."""
        self._answers.labels(str(status)).inc()

    def replayed(self) -> None:
        """A replica died before anything of its answer was sent."""
        self._replays.inc()

    def broken(self) -> None:
        """A replica died in the middle of a stream."""
        self._broken.inc()

    def begun(self, replica: str) -> None:
        """A replica began to answer."""
        self._replicas.labels(replica).inc()

    def text(self) -> str:
        """Everything in Prometheus's text format."""
        return prometheus.generate_latest(self.registry).decode()


class _Running(Collector):
    def __init__(self, running: Callable[[], int]) -> None:
        self._running = running

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("outpace:ingress_requests_running", "Requests under way.", value=self._running())


def merged(texts: Mapping[str, str]) -> str:
    """Several processes' metrics as one text: every sample with the label ``replica``, every family once."""
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(maxsplit=3)
                name = words[2] if len(words) > 2 else ""
                family = about.setdefault(name, [])
                if line not in family:
                    family.append(line)
                samples.setdefault(name, [])
            elif found := _SAMPLE.fullmatch(line):
                labels = f'replica="{replica}"' + (f",{found['labels']}" if found["labels"] else "")
                family_name = _family(found["name"], samples)
                samples.setdefault(family_name, []).append(f"{found['name']}{{{labels}}}{found['value']}")
    return "".join(f"{line}\n" for name, lines in samples.items() for line in (*about.get(name, []), *lines))


def _family(sample: str, known: Mapping[str, object]) -> str:
    """The family of a sample: its name, or its name without the ending that its type adds."""
    if sample in known:
        return sample
    return next((sample.removesuffix(part) for part in _PARTS if sample.removesuffix(part) in known), sample)
