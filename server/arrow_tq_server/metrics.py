"""What ``/metrics`` shows: the server's own counters, and the engine's statistics at the time of asking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

PREFIX = "arrow_tq_"
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.put_s = self._histogram(
            "put_seconds", "From the arrival of a message of chunks until they are stored"
        )
        self.ack_s = self._histogram("put_ack_seconds", "Making chunks durable and acking them")
        self.commit_s = self._histogram("commit_seconds", "One message of step commits")
        self.get_s = self._histogram("get_seconds", "One answer, from first to last message")
        self.action_s = self._histogram(
            "action_seconds", "One action, or one command of a stream, waiting claims included", "verb"
        )
        self.put_bytes = self._counter("put_bytes", "Payload bytes of stored chunks")
        self.get_bytes = self._counter("get_bytes", "Payload bytes of answers")
        self.errors = self._counter("errors", "Errors by code", "code")
        self.waits = self._counter("waits", "Calls that waited for a place", "budget")
        self.busy = self._gauge("handlers", "Calls under way", "budget")
        self.in_flight_bytes = self._gauge("in_flight_bytes", "Bytes received and not acked yet")

    def watch(self, stats: Callable[[], Mapping[str, float]]) -> None:
        """Show an engine's statistics too, read anew at every scrape."""
        self.registry.register(_Statistics(stats))

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=LATENCY_BUCKETS_S, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)


class _Statistics(Collector):
    """Statistics whose labels are in their names, as Prometheus writes them."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        lines = [f"{PREFIX}{name} {float(value)!r}" for name, value in sorted(self._stats().items())]
        families: dict[str, Metric] = {}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            kept = families.setdefault(family.name, family)
            if kept is not family:
                kept.samples.extend(family.samples)
        yield from families.values()

    def describe(self) -> list[Metric]:
        """Nothing: names are known only when asked, and a registry asks before there are any."""
        return []
