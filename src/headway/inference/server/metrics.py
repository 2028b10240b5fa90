"""What the server measures, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headway.inference.server.service import EngineService, Timings

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Metrics of a service; they are brought up to date when they are asked for."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._registry = registry = CollectorRegistry()
        self._running = Gauge("headway_requests_running", "Sequences in the batch", registry=registry)
        self._waiting = Gauge("headway_requests_waiting", "Sequences in the queue", registry=registry)
        self._cache = Gauge("headway_kv_cache_usage", "Share of the KV cache in use", registry=registry)
        self._hits = Gauge(
            "headway_prefix_cache_hit_rate", "Share of prompt tokens found in the cache", registry=registry
        )
        self._first = Histogram("headway_ttft_seconds", "Time to first token", buckets=FIRST_TOKEN_S, registry=registry)
        self._token = Histogram("headway_tpot_seconds", "Time per output token", buckets=TOKEN_S, registry=registry)
        self._whole = Histogram("headway_request_seconds", "Time of whole requests", registry=registry)
        self._counts = {
            name: Counter(f"headway_{name}", help_text, registry=registry)
            for name, help_text in (
                ("prompt_tokens", "Tokens of prompts"),
                ("output_tokens", "Tokens generated"),
                ("preemptions", "Sequences that started over for lack of cache"),
                ("steps", "Passes of the model"),
            )
        }
        self._finished = Counter(
            "headway_requests_finished", "Outputs by how they ended", ["reason"], registry=registry
        )
        self._seen: dict[str, int] = {}

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        engine = self._service.engine.engine
        self._running.set(len(engine.running))
        self._waiting.set(len(engine.waiting))
        self._cache.set(1 - engine.pool.free / engine.pool.count)
        self._hits.set(engine.counts.shared_tokens / max(engine.counts.prompt_tokens, 1))
        for name, counter in self._counts.items():
            counter.inc(self._since(name, getattr(engine.counts, name)))
        for reason, count in self._service.finished.items():
            self._finished.labels(reason).inc(self._since(f"finished {reason}", count))
        timings, self._service.timings = self._service.timings, Timings()
        for histogram, seconds in (
            (self._first, timings.first_token_s),
            (self._token, timings.token_s),
            (self._whole, timings.request_s),
        ):
            for value in seconds:
                histogram.observe(value)
        return generate_latest(self._registry).decode()

    def _since(self, name: str, count: int) -> int:
        """Return by how much a count has grown since the last time."""
        grown = count - self._seen.get(name, 0)
        self._seen[name] = count
        return grown
