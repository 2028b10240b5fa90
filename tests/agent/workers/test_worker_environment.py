"""The environment of worker processes."""

from pathlib import Path

import pytest

from headway.agent.attempt import Attempt
from headway.agent.workers.env import worker_environment


def test_threads_sleep_soon_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that look for each other for milliseconds take the cores from other processes."""
    attempt = Attempt(run=Path("run"), number=1, workers=1, device="cpu", threads=2)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert int(worker_environment(attempt)["GOMP_SPINCOUNT"]) <= 10_000
    monkeypatch.setenv("GOMP_SPINCOUNT", "infinity")
    assert worker_environment(attempt)["GOMP_SPINCOUNT"] == "infinity"
