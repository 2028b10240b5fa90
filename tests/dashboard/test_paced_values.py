"""What takes long to compute of a growing run is computed at a pace, and what matters is never missed."""

from headway.dashboard.cached import SHARE, Cache, urgent_signature
from headway.track import RunFolder
from track_runs import plain_run, step_line


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_growing_value_is_computed_at_a_pace() -> None:
    clock = Clock()
    cache, computed = Cache(clock=clock), list[int]()

    def ask(size: int, urgent: str = "running") -> int:
        def compute() -> int:
            clock.now += 2.0
            computed.append(size)
            return size

        return cache.get_paced("ledger", (size,), (urgent,), compute)

    assert ask(1) == 1
    for size in range(2, 41):
        clock.now += 1.0
        assert ask(size) == 1, "two seconds of a core last for forty"
    clock.now += 1.0
    assert ask(41) == ask(42) == 41
    assert ask(43, "ended") == 43, "an end is not missed"
    clock.now += 1e3
    assert ask(43, "ended") == 43
    assert computed == [1, 41, 43], "and nothing is computed anew without a change"
    assert 2.0 / SHARE == 40.0


def test_agents_events_are_urgent_and_steps_are_not(tmp_path) -> None:
    run: RunFolder = plain_run(tmp_path, [1.0, 2.0])
    before = urgent_signature(run)
    with (run.events / "0001-rank-0.jsonl").open("a") as file:
        file.write(step_line(3, 1.0))
    assert urgent_signature(run) == before
    with (run.events / "0001-agent.jsonl").open("a") as file:
        file.write("{}\n")
    assert urgent_signature(run) != before
