"""What an agent that leads says of those it waits for."""

from pathlib import Path

from headway.agent.attempt import Attempt
from headway.agent.nodes.wait_reporter import WaitReporter


def waiting(host: str | None = "10.0.0.1", spares: int = 0) -> WaitReporter:
    attempt = Attempt(
        run=Path("runs/r"), number=1, workers=3, nodes=3, spares=spares, host=host, device="cpu", threads=1
    )
    return WaitReporter(attempt, "10.0.0.1", 29400, 100.0)


def test_it_says_who_is_missing_once_and_again_when_that_changes() -> None:
    one = waiting()
    assert one.words([], 101.0) is None  # they may all be on their way
    first = one.words(["gpu-node-0"], 104.0)
    assert first is not None
    assert first.startswith("waiting for ranks 1, 2 of 3: headway agent --run r --nodes 3 --rank I")
    assert first.endswith("--join 10.0.0.1:29400")
    assert one.words(["gpu-node-0"], 190.0) is None
    second = one.words(["gpu-node-0", "other-2"], 191.0)
    assert second is not None
    assert "waiting for rank 1 of 3: headway agent --run r --nodes 3 --rank 1;" in second
    assert one.words(["gpu-node-0"], 195.0) is None  # another came and went
    assert one.words(["gpu-node-0"], 201.5) is not None
    assert one.words(["gpu-node-0", "other-1", "other-2"], 300.0) is None


def test_spares_are_counted_and_nodes_that_are_this_machine_are_not() -> None:
    told = waiting(spares=1).words(["a-0", "a-1", "a-2"], 104.0)
    assert told is not None
    assert "waiting for rank 3 of 4: headway agent --run r --nodes 3 --spares 1 --rank 3;" in told
    assert waiting(host=None).words([], 104.0) is None


def test_machines_without_the_folder_are_told_of_the_store() -> None:
    one = waiting()
    one.url = "s3://bucket/r"
    assert (one.words(["a-0", "a-1"], 104.0) or "").endswith("headway agent --run s3://bucket/r --nodes 3 --rank 2")
