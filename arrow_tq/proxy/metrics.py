"""What ``/arrow-tq/metrics`` shows."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "arrow_tq_proxy_"
CALL_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
STORE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """Counters of one proxy, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = self._counter("calls", "Calls of recorded routes, by what became of them", "outcome")
        self.passed = self._counter("passed_through", "Requests handed on untouched")
        self.steps = self._counter("steps", "Steps committed")
        self.stored_bytes = self._counter(
            "stored_bytes", "Payload bytes of committed steps, receipts included"
        )
        self.stripped_bytes = self._counter("stripped_bytes", "Bytes of answers that agents did not get")
        self.engine_bytes = self._counter("engine_bytes", "Bytes of recorded calls' answers, as they came")
        self.again = self._counter(
            "asked_again", "Calls asked twice of the engine: tokens were not as promised"
        )
        self.store_failures = self._counter(
            "store_failures", "Calls that the store failed, by policy", "policy"
        )
        self.engine_failures = self._counter(
            "engine_failures", "Calls that the engine failed, by code", "code"
        )
        self.call_s = self._histogram("call_seconds", "A recorded call, whole", CALL_BUCKETS_S)
        self.record_s = self._histogram("record_seconds", "Storing and committing one", STORE_BUCKETS_S)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read at every scrape."""
        Gauge(PREFIX + name, text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)
