"""What a server counts, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from mia_serve.llm.spending import Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_FILL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Metrics:
    """Counters of one server; each app has its own, so that two in a process do not add up.

    Attributes:
        requests: Answered requests by route, method and status.
        seconds: Their time, until the last byte.
        under_way: Requests that are being answered.
        failures: Errors by reason.
        tokens: Tokens that were encoded, by encoder.
        batches: Forwards, by encoder.
        fill: Tokens of a batch that are no padding, as a share of the budget.
        forward: Seconds of a forward.
        waited: Seconds that the oldest sequence of a batch has waited.
        encode_failures: What went wrong with encoding, by reason.
        waiting_tokens: Tokens that wait.
        waiting_items: Sequences that wait.
        alive: Whether the worker is at work.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("mia_requests", "Answered requests", ["route", "method", "status"], **made)
        self.seconds = Histogram("mia_request_seconds", "Seconds to the last byte", ["route"], buckets=_SECONDS, **made)
        self.under_way = Gauge("mia_requests_under_way", "Requests being answered", **made)
        self.failures = Counter("mia_failures", "Errors by reason", ["reason"], **made)
        self.tokens = Counter("mia_encode_tokens", "Tokens that were encoded", ["encoder"], **made)
        self.batches = Counter("mia_encode_batches", "Forwards", ["encoder"], **made)
        self.fill = Histogram("mia_batch_fill", "Tokens of a batch / budget", ["encoder"], buckets=_FILL, **made)
        self.forward = Histogram("mia_forward_seconds", "Seconds of a forward", ["encoder"], buckets=_SECONDS, **made)
        self.waited = Histogram("mia_queue_seconds", "Seconds in the queue", ["encoder"], buckets=_SECONDS, **made)
        self.encode_failures = Counter("mia_encode_failures", "Failed encoding", ["encoder", "reason"], **made)
        self.waiting_tokens = Gauge("mia_queue_tokens", "Tokens that wait for an encoder", ["encoder"], **made)
        self.waiting_items = Gauge("mia_queue_items", "Texts that wait for an encoder", ["encoder"], **made)
        self.alive = Gauge("mia_encoder_alive", "Whether the encoder's worker is at work", ["encoder"], **made)

    def of_queue(self, encoder: str) -> QueueMetrics:
        """Return the counters of one encoder's queue."""
        return QueueMetrics(self, encoder)

    def watch_llm(self, stats: Callable[[], Stats | None]) -> None:
        """Report what the language model's client counts itself."""
        self.registry.register(_Llm(stats))

    def text(self) -> bytes:
        """Return all of it in Prometheus' text form."""
        return generate_latest(self.registry)


class QueueMetrics:
    """Counters of one encoder's queue.

    Args:
        metrics: Of the server.
        encoder: ``e1`` or ``e2``.
    """

    def __init__(self, metrics: Metrics, encoder: str) -> None:
        self._metrics, self._encoder = metrics, encoder
        self._tokens, self._batches = metrics.tokens.labels(encoder), metrics.batches.labels(encoder)
        self._fill, self._forward = metrics.fill.labels(encoder), metrics.forward.labels(encoder)
        self._waited, self._alive = metrics.waited.labels(encoder), metrics.alive.labels(encoder)
        self._items, self._waiting = metrics.waiting_items.labels(encoder), metrics.waiting_tokens.labels(encoder)

    def waiting(self, items: int, tokens: int) -> None:
        """Take what waits now."""
        self._items.set(items)
        self._waiting.set(tokens)

    def batch(self, items: int, tokens: int, padded: int, budget: int, seconds: float) -> None:
        """Take a forward."""
        self._batches.inc()
        self._tokens.inc(tokens)
        self._fill.observe(tokens / max(padded, budget))
        self._forward.observe(seconds)

    def waited(self, seconds: float) -> None:
        """Take the time that the oldest sequence of a batch has waited."""
        self._waited.observe(seconds)

    def failed(self, reason: str) -> None:
        """Take a failure."""
        self._metrics.encode_failures.labels(self._encoder, reason).inc()

    def worker(self, alive: bool) -> None:
        """Take whether the worker is at work."""
        self._alive.set(alive)


class _Llm(Collector):
    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        found = self._stats()
        if found is None:
            return
        yield CounterMetricFamily("mia_llm_calls", "Calls of the language model", found.calls)
        yield CounterMetricFamily("mia_llm_failed", "Chats without a usable reply", found.failed)
        tokens = CounterMetricFamily("mia_llm_tokens", "Tokens of those calls", labels=["kind"])
        tokens.add_metric(["prompt"], found.prompt_tokens)
        tokens.add_metric(["completion"], found.completion_tokens)
        yield tokens
