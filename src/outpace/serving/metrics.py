"""Prometheus metrics, with vLLM's names and meanings under our own prefix, and what vLLM does not count.

Counters grow while an answer is decoded, on the decoding thread; gauges are read from the decoders when they are asked
for. A label ``model_name`` tells models apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outpace.core.errors import BadInput
from outpace.engine.shared_decoder import SharedDecoder, Ticket

_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
_REASONS = {"cancelled": "abort"}
"""Reasons for an end that vLLM names otherwise."""

_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of answers.",
    "num_preemptions": "How often a request had to wait again, as there was no memory for its K/V.",
    "spec_decode_num_drafts": "Rounds of requests in which anything was drafted.",
    "spec_decode_num_rounds": "Rounds of requests.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
    "spec_decode_num_requests": "Ended requests for which anything was drafted.",
    "goodput_requests": "Answers that were complete within the latency bounds (--goodput).",
    "goodput_tokens": "Tokens of these answers.",
}
_HISTOGRAMS: dict[str, tuple[str, Seq[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _LATENCIES),
    "inter_token_latency_seconds": ("Between the ends of two rounds of one answer that gave tokens.", _GAPS),
    "request_time_per_output_token_seconds": ("Time after the first token, for each further token.", _GAPS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _LATENCIES),
    "request_queue_time_seconds": ("From a request's arrival to its admission.", _LATENCIES),
    "request_prefill_time_seconds": ("From a request's admission to its first token.", _LATENCIES),
    "request_decode_time_seconds": ("From a request's first token to its last.", _LATENCIES),
    "request_inference_time_seconds": ("From a request's admission to its last token.", _LATENCIES),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
}


@dataclass(frozen=True, slots=True)
class LatencyBounds:
    """Within these an answer counts for goodput. Seconds; None: no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, ttft: float, tpot: float, e2e: float) -> bool:
        """Whether all of them hold."""
        pairs = ((self.ttft, ttft), (self.tpot, tpot), (self.e2e, e2e))
        return all(bound is None or value <= bound for bound, value in pairs)


def read_bounds(given: Seq[str]) -> LatencyBounds:
    """``ttft:1000``, ``tpot:50`` and ``e2e:5000``, in milliseconds. Raises BadInput for anything else."""
    found: dict[str, float] = {}
    for one in given:
        name, _, text = one.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in ("ttft", "tpot", "e2e") or not 0 < value < float("inf") or name in found:
            raise BadInput(f"--goodput takes ttft:MS, tpot:MS and e2e:MS, each at most once, not '{one}'")
        found[name] = value / 1e3
    return LatencyBounds(**found)


class Metrics:
    """What one server counts."""

    def __init__(self, decoders: Mapping[str, SharedDecoder], bounds: LatencyBounds | None = None) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.bounds = bounds or LatencyBounds()
        self.registry = prometheus.CollectorRegistry()
        about: dict[str, Any] = {"registry": self.registry}
        self.counters = {
            name: prometheus.Counter(f"outpace:{name}", text, ["model_name"], **about)
            for name, text in _COUNTERS.items()
        }
        self.histograms = {
            name: prometheus.Histogram(f"outpace:{name}", text, ["model_name"], buckets=buckets, **about)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.accepted_per_position = prometheus.Counter(
            "outpace:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            ["model_name", "position"],
            **about,
        )
        self.ended = prometheus.Counter(
            "outpace:request_success",
            "Ended requests, by the reason of their end.",
            ["model_name", "finished_reason"],
            **about,
        )
        self.lossy = prometheus.Counter(
            "outpace:lossy_requests",
            "Ended requests that were decoded with a lossy rule, or by a method that is lossy whatever its rule.",
            ["model_name", "rule"],
            **about,
        )
        self.refused = prometheus.Counter(
            "outpace:http_errors", "Answers with an error, by status code.", ["status"], **about
        )
        self.counter = {model: {name: one.labels(model) for name, one in self.counters.items()} for model in decoders}
        self.histogram = {
            model: {name: one.labels(model) for name, one in self.histograms.items()} for model in decoders
        }
        for model in decoders:
            self.accepted_per_position.labels(model, "0")
        self.registry.register(_Engines(decoders))

    def refuse(self, status: int) -> None:
        """An answer with an error was given."""
        self.refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return prometheus.generate_latest(self.registry)


class _Engines(Collector):
    """Gauges and counters that the decoders themselves keep."""

    def __init__(self, decoders: Mapping[str, SharedDecoder]) -> None:
        self._decoders = decoders

    def collect(self) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[SharedDecoder], float]]] = {
            "num_requests_running": ("Requests that are being read or decoded.", lambda one: len(one.running)),
            "num_requests_waiting": ("Requests that wait for their turn.", lambda one: len(one.waiting)),
            "kv_cache_usage_perc": ("Share of the bound on K/V that requests hold; 1 is all of it.", _usage),
            "prefix_cache_bytes": ("Bytes of cached beginnings of prompts.", _cached),
        }
        for name, (text, read) in gauges.items():
            gauge = GaugeMetricFamily(f"outpace:{name}", text, labels=["model_name"])
            for model, decoder in self._decoders.items():
                gauge.add_metric([model], read(decoder))
            yield gauge
        for name, text, field in (
            ("prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.", "asked"),
            ("prefix_cache_hits", "Tokens of prompts that the prefix cache had.", "found"),
        ):
            counter = CounterMetricFamily(f"outpace:{name}", text, labels=["model_name"])
            for model, decoder in self._decoders.items():
                counter.add_metric([model], 0 if decoder.prefixes is None else getattr(decoder.prefixes.use, field))
            yield counter


def _cached(decoder: SharedDecoder) -> int:
    return 0 if decoder.prefixes is None else decoder.prefixes.bytes


def _usage(decoder: SharedDecoder) -> float:
    """As vLLM counts it: cached beginnings are free memory, because they leave when a request needs their place."""
    bound = decoder.limits.kv_bytes
    return 0.0 if not bound else decoder.kv_bytes / bound


_COUNTED = {
    "preemptions": "num_preemptions",
    "drafting": "spec_decode_num_drafts",
    "rounds": "spec_decode_num_rounds",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
"""Counters by the figures of a request that they add up."""


class RequestWatch:
    """Counts one request while it is decoded; called on the decoding thread alone."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._counter, self._histogram = metrics.counter[model], metrics.histogram[model]
        self._seen = dict.fromkeys(_COUNTED, 0)
        self._positions: list[int] = []
        self._tokens = 0
        self._first = self._last = 0.0

    def event(self, ticket: Ticket) -> None:
        """A round has ended, or the request has."""
        generation = ticket.generation
        if generation is None:
            return
        now, seen = generation.metrics, self._seen
        new = len(generation.tokens) - self._tokens
        if new:
            self._add("generation_tokens", new)
        for name, counter in _COUNTED.items():
            value = getattr(now, name)
            if value != seen[name]:
                self._add(counter, value - seen[name])
                seen[name] = value
        for position, count in enumerate(now.accepted_at_depth):
            if position == len(self._positions):
                self._positions.append(0)
            if count > self._positions[position]:
                added = count - self._positions[position]
                self._metrics.accepted_per_position.labels(self._model, str(position)).inc(added)
                self._positions[position] = count
        if new > 0:
            if not self._tokens:  # the whole prompt has been read: vLLM counts its tokens then
                self._add("prompt_tokens", len(generation.request.prompt))
            self._time(ticket.arrived)
            self._tokens += new

    def end(self, ticket: Ticket) -> None:
        """The request has ended, for whatever reason."""
        now = perf_counter()
        generation = ticket.generation
        reason = "error" if ticket.error is not None or generation is None else generation.finish_reason or "error"
        self._metrics.ended.labels(self._model, _REASONS.get(reason, reason)).inc()
        self._observe("e2e_request_latency_seconds", now - ticket.arrived)
        admitted = next((at for event, at in ticket.timeline if event == "admitted"), None)
        if admitted is not None:
            self._observe("request_queue_time_seconds", admitted)
            if self._first:
                began = ticket.arrived + admitted
                self._observe("request_prefill_time_seconds", self._first - began)
                self._observe("request_decode_time_seconds", self._last - self._first)
                self._observe("request_inference_time_seconds", self._last - began)
        if generation is None:
            return
        prompt, tokens = len(generation.request.prompt), len(generation.tokens)
        self._observe("request_prompt_tokens", prompt)
        self._observe("request_generation_tokens", tokens)
        self._add("spec_decode_num_requests", int(generation.metrics.drafted > 0))
        method = generation.request.method
        if method.lossy is not None:  # the name alone: settings are the callers' to choose, and each would be a series
            rule = method.name if method.rule.exact else method.rule.name
            self._metrics.lossy.labels(self._model, rule).inc()
        each = (self._last - self._first) / (tokens - 1) if tokens > 1 else 0.0
        if tokens > 1:
            self._observe("request_time_per_output_token_seconds", each)
        first = (self._first or now) - ticket.arrived
        if reason in ("stop", "length") and self._metrics.bounds.met(first, each, now - ticket.arrived):
            self._add("goodput_requests", 1)
            self._add("goodput_tokens", tokens)

    def _time(self, arrived: float) -> None:
        now = perf_counter()
        if not self._first:
            self._first = now
            self._observe("time_to_first_token_seconds", now - arrived)
        else:
            self._observe("inter_token_latency_seconds", now - self._last)
        self._last = now

    def _add(self, name: str, amount: float) -> None:
        if amount > 0:
            self._counter[name].inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histogram[name].observe(value)
