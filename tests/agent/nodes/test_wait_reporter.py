"""Reports of the nodes that the leader waits for."""

from pathlib import Path

from headway.agent.attempt import Attempt
from headway.agent.nodes.wait_reporter import WaitReporter


def make_reporter(host: str | None = "10.0.0.1", spares: int = 0) -> WaitReporter:
    attempt = Attempt(
        run=Path("runs/r"), number=1, workers=3, nodes=3, spares=spares, host=host, device="cpu", threads=1
    )
    return WaitReporter(attempt, "10.0.0.1", 29400, 100.0)


def test_missing_ranks_are_reported_with_the_time_left_and_soon_after_a_change() -> None:
    reporter = make_reporter()
    assert reporter.message([], 101.0, 220.0) is None  # they may all be starting
    first = reporter.message(["gpu-node-0"], 104.0, 220.0)
    assert first is not None
    assert first.startswith(
        "waiting for ranks 1, 2 of 3 for 4 s, at most 116 s more (train.join_s): headway agent --run r --nodes 3 "
        "--rank I"
    )
    assert first.endswith("--join 10.0.0.1:29400")
    assert reporter.message(["gpu-node-0"], 133.0, 220.0) is None
    again = reporter.message(["gpu-node-0"], 180.0, 220.0)
    assert again is not None
    assert "for 80 s, at most 40 s more" in again
    second = reporter.message(["gpu-node-0", "other-2"], 191.0, 220.0)
    assert second is not None
    assert (
        "waiting for rank 1 of 3 for 91 s, at most 29 s more (train.join_s): headway agent --run r --nodes 3 --rank 1;"
        in second
    )
    assert reporter.message(["gpu-node-0"], 195.0, 220.0) is None  # too soon after the last report
    assert reporter.message(["gpu-node-0"], 201.5, 220.0) is not None
    assert reporter.message(["gpu-node-0", "other-1", "other-2"], 300.0, 220.0) is None


def test_emulated_nodes_that_do_not_join_are_named() -> None:
    reporter = make_reporter(host=None)
    assert reporter.message(["n0", "n2"], 114.0, 220.0) is None, "they share the cores of one machine"
    assert (reporter.message(["n0", "n2"], 116.0, 220.0) or "").startswith("waiting for node n1 for 16 s, at most ")
    assert reporter.started_without(["n0", "n2"], 120.0) == "starting without node n1: not there after 20 s"
    assert reporter.started_without(["n0", "n1", "n2"], 120.0) is None


def test_spares_are_counted() -> None:
    message = make_reporter(spares=1).message(["a-0", "a-1", "a-2"], 104.0, 220.0)
    assert message is not None
    assert message.startswith("waiting for rank 3 of 4 for 4 s, at most 116 s more (train.join_s): headway agent ")
    assert "--run r --nodes 3 --spares 1 --rank 3;" in message
    assert make_reporter(spares=1).started_without(["a-0", "a-1", "a-2"], 121.0) == (
        "starting without rank 3: not there after 21 s"
    )


def test_printed_command_has_what_its_machine_needs() -> None:
    """Without --workers a machine would offer one place; without --host rank 0 would listen on its main network."""
    reporter = make_reporter()
    reporter.attempt = reporter.attempt.model_copy(update={"workers": 6})
    message = reporter.message(["a-1", "a-2"], 104.0, 220.0)
    assert "--nodes 3 --workers 6 --rank 0 --host 10.0.0.1;" in (message or "")
    gpus = make_reporter()
    gpus.attempt = reporter.attempt.model_copy(update={"device": "cuda"})
    assert "--nodes 3 --rank 2;" in (gpus.message(["a-0", "a-1"], 104.0, 220.0) or "")


def test_machines_without_the_folder_get_the_store_address() -> None:
    reporter = make_reporter()
    reporter.url = "s3://bucket/r"
    assert (reporter.message(["a-0", "a-1"], 104.0, 220.0) or "").endswith(
        "headway agent --run s3://bucket/r --nodes 3 --rank 2"
    )


def test_missing_nodes_are_named_with_their_place_when_the_wait_ends() -> None:
    reporter = make_reporter()
    reporter.place = {1: "gpu-7", 2: ""}.__getitem__
    assert reporter.too_few(["a-0"], 221.0) == (
        "too few nodes for 3 workers after 121 s: ranks 1 (gpu-7), 2 did not join (joined: a-0)"
    )
    emulated = make_reporter(host=None)
    emulated.place = lambda rank: f"process 47{rank}, stopped by a signal"
    assert "waiting for nodes n1 (process 471, stopped by a signal), n2 (process 472" in (
        emulated.message(["n0"], 116.0, 220.0) or ""
    )
    assert "node n2 (process 472, stopped by a signal) did not join" in emulated.too_few(["n0", "n1"], 230.0)


def test_before_any_node_has_joined_the_deadline_is_that_of_the_first() -> None:
    message = make_reporter().message([], 104.0, 700.0)
    assert message is not None
    assert "for 4 s, at most 596 s more until a first one has joined: headway agent" in message
