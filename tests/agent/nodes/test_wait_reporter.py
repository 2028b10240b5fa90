"""Reports of the nodes that the leader waits for."""

from pathlib import Path

from headway.agent.attempt import Attempt
from headway.agent.nodes.wait_reporter import WaitReporter


def make_reporter(host: str | None = "10.0.0.1", spares: int = 0) -> WaitReporter:
    attempt = Attempt(
        run=Path("runs/r"), number=1, workers=3, nodes=3, spares=spares, host=host, device="cpu", threads=1
    )
    return WaitReporter(attempt, "10.0.0.1", 29400, 100.0)


def test_missing_ranks_are_reported_once_and_again_after_a_change() -> None:
    reporter = make_reporter()
    assert reporter.message([], 101.0) is None  # they may all be starting
    first = reporter.message(["gpu-node-0"], 104.0)
    assert first is not None
    assert first.startswith("waiting for ranks 1, 2 of 3: headway agent --run r --nodes 3 --rank I")
    assert first.endswith("--join 10.0.0.1:29400")
    assert reporter.message(["gpu-node-0"], 190.0) is None
    second = reporter.message(["gpu-node-0", "other-2"], 191.0)
    assert second is not None
    assert "waiting for rank 1 of 3: headway agent --run r --nodes 3 --rank 1;" in second
    assert reporter.message(["gpu-node-0"], 195.0) is None  # too soon after the last report
    assert reporter.message(["gpu-node-0"], 201.5) is not None
    assert reporter.message(["gpu-node-0", "other-1", "other-2"], 300.0) is None


def test_emulated_nodes_that_do_not_join_are_named() -> None:
    reporter = make_reporter(host=None)
    assert reporter.message(["n0", "n2"], 114.0) is None, "they share the cores of one machine"
    assert (reporter.message(["n0", "n2"], 116.0) or "").startswith("waiting for node n1; see the logs in ")
    assert reporter.started_without(["n0", "n2"], 120.0) == "starting without node n1: not there after 20 s"
    assert reporter.started_without(["n0", "n1", "n2"], 120.0) is None


def test_spares_are_counted() -> None:
    message = make_reporter(spares=1).message(["a-0", "a-1", "a-2"], 104.0)
    assert message is not None
    assert "waiting for rank 3 of 4: headway agent --run r --nodes 3 --spares 1 --rank 3;" in message
    assert make_reporter(spares=1).started_without(["a-0", "a-1", "a-2"], 121.0) == (
        "starting without rank 3: not there after 21 s"
    )


def test_machines_without_the_folder_get_the_store_address() -> None:
    reporter = make_reporter()
    reporter.url = "s3://bucket/r"
    assert (reporter.message(["a-0", "a-1"], 104.0) or "").endswith(
        "headway agent --run s3://bucket/r --nodes 3 --rank 2"
    )
