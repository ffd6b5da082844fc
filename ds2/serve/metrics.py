"""What a server counts, for Prometheus; recognisers in several processes count in a folder, and each tells the sum."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector


class Metrics:
    """The figures of one server; none holds anything of what was said."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge(
            "ds2_sessions", "Sources that are heard now", registry=self.registry, multiprocess_mode="livesum"
        )
        self.refused = Counter("ds2_refused", "Requests refused", ["reason"], registry=self.registry)
        self.audio_s = Counter("ds2_audio_seconds", "Audio taken, seconds", registry=self.registry)
        self.words = Counter("ds2_words", "Words that became final", registry=self.registry)
        self.batch = Histogram(
            "ds2_batch_size", "Sources in a batch", buckets=[2**n for n in range(12)], registry=self.registry
        )
        self.latency_s = Histogram(
            "ds2_latency_seconds",
            "From a chunk's arrival to its result",
            buckets=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10],
            registry=self.registry,
        )

    def told(self) -> bytes:
        """All of it, of all recognisers together."""
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
