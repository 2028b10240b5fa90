"""Tables of the Ray engine's decisions; no Ray needed."""

from pathlib import Path
from typing import Any

import pytest

from headway.cluster.engines import LaunchRequest, Machine
from headway.cluster.engines.ray.rules import (
    NextState,
    TaskExit,
    bundle,
    machines_from_nodes,
    machines_to_avoid,
    must_stop,
    next_state,
    restart_delay_s,
    why_never_fits,
)
from headway.errors import UsageError

SAVED = "saved; waiting to be restarted"
SMALL = [Machine(f"m{index}", "free", gpus=2, gpus_free=2, cpus=4, memory_bytes=8 << 30) for index in range(3)]


def make_request(**fields: Any) -> LaunchRequest:
    return LaunchRequest("job", ("true",), Path("/nowhere"), **fields)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"machines": 3, "gpus": 2}, True),
        ({"machines": 4}, False),
        ({"machines": 1, "gpus": 3}, False),
        ({"machines": 1, "cpus": 5}, False),
        ({"machines": 1, "memory_bytes": 9 << 30}, False),
        ({"machines": 3, "avoid": ("m1",)}, False),
        ({"machines": 2, "avoid": ("m1",)}, True),
        ({"machines": 12, "site": {"strategy": "SPREAD"}}, True),
        ({"machines": 13, "site": {"strategy": "pack"}}, False),
        ({"machines": 2, "gpus": 1, "site": {"strategy": "strict-pack"}}, True),
        ({"machines": 2, "gpus": 2, "site": {"strategy": "STRICT_PACK"}}, False),
    ],
)
def test_impossible_requests_are_recognized(fields: dict[str, Any], fits: bool) -> None:
    assert (why_never_fits(make_request(**fields), SMALL) is None) == fits


def test_reason_states_request_and_capacity() -> None:
    busy = [*SMALL, Machine("gone", "away", gpus=8, cpus=64)]
    assert why_never_fits(make_request(machines=1, gpus=4, cpus=2), busy) == (
        "it asks for 1 machine with 4 GPUs, 2 cores each; the 3 machines have room for 0; "
        "the largest has 2 GPUs, 4 cores, 8 GiB"
    )
    assert "; the 1 machine has room for 0; " in str(why_never_fits(make_request(machines=1, gpus=4), SMALL[:1]))


@pytest.mark.parametrize("site", [{"strategy": "tight"}, {"partition": "gpu"}])
def test_unknown_settings_and_strategies_are_refused(site: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"strategy 'TIGHT'|no setting 'partition'"):
        why_never_fits(make_request(site=site), SMALL)


def test_bundle_holds_the_requested_resources_only() -> None:
    assert bundle(make_request(cpus=3)) == {"CPU": 3}
    assert bundle(make_request(gpus=2, memory_bytes=5)) == {"CPU": 1, "GPU": 2, "memory": 5}


@pytest.mark.parametrize(
    ("exits", "options", "expected"),
    [
        ([TaskExit(0, 0), TaskExit(1, 0)], {}, NextState("finished", "", 0)),
        ([TaskExit(0, 0), TaskExit(1, 3)], {}, NextState("failed", "the command exited with status 3 on b", 3)),
        (
            [TaskExit(0, 75), TaskExit(1, 0)],
            {},
            NextState("waiting", SAVED, 75),
        ),
        ([TaskExit(0, 75), TaskExit(1, 137)], {}, NextState("failed", "the command exited with status 137 on b", 137)),
        (
            [TaskExit(1, lost="x"), TaskExit(0, 138)],
            {},
            NextState("waiting", "b was lost (x); waiting to be restarted"),
        ),
        (
            [TaskExit(1, lost="x"), TaskExit(0, 138)],
            {"cancelled": True},
            NextState("cancelled", "cancelled by the user"),
        ),
        ([TaskExit(0, 75), TaskExit(1, 75)], {"cancelled": True}, NextState("cancelled", "cancelled by the user", 75)),
        ([TaskExit(0, 0), TaskExit(1, 0)], {"cancelled": True}, NextState("finished", "", 0)),
        (
            [TaskExit(0, 137), TaskExit(1, 137)],
            {"limit_s": 9.0},
            NextState("failed", "killed at its time limit of 9 s", 137),
        ),
        (
            [TaskExit(0, 75), TaskExit(1, 75)],
            {"limit_s": 9.0},
            NextState("waiting", SAVED, 75),
        ),
        ([TaskExit(0, 138), TaskExit(1, 0)], {"signalled_after_s": 1.0}, NextState("waiting", SAVED, 138)),
        (
            [TaskExit(0, 138), TaskExit(1, 0)],
            {"signalled_after_s": 99.0},
            NextState("failed", "the command exited with status 138 on a", 138),
        ),
        ([TaskExit(0, error="no folder"), TaskExit(1, lost="called off")], {}, NextState("failed", "no folder")),
        # A reported status of the whole job counts, whatever else was lost or failed.
        ([TaskExit(0, 0, reported=0), TaskExit(1, lost="gone")], {}, NextState("finished", "b was lost (gone)", 0)),
        ([TaskExit(0, 137), TaskExit(1, 0, reported=0)], {}, NextState("finished", "", 0)),
        (
            [TaskExit(0, 1, reported=1), TaskExit(1, 75, reported=75)],
            {},
            NextState("waiting", SAVED, 75),
        ),
        (
            [TaskExit(0, 75, reported=75), TaskExit(1, 0)],
            {"cancelled": True},
            NextState("cancelled", "cancelled by the user", 75),
        ),
        (
            [TaskExit(0, 1, reported=1), TaskExit(1, 9)],
            {},
            NextState("failed", "the command exited with status 9 on b", 9),
        ),
    ],
)
def test_next_state_after_tasks_have_ended(exits: list[TaskExit], options: dict[str, Any], expected: NextState) -> None:
    assert next_state(exits, ["a", "b"], **{"cancelled": False, "limit_s": None, **options}) == expected


@pytest.mark.parametrize(
    ("exits", "spares", "stops"),
    [
        ([TaskExit(0, 0)], 0, False),
        ([TaskExit(0, lost="x")], 0, True),
        ([TaskExit(0, lost="x")], 1, False),
        ([TaskExit(0, lost="x"), TaskExit(1, lost="x")], 1, True),
        ([TaskExit(0, error="x")], 9, True),
    ],
)
def test_tasks_stop_when_more_machines_are_lost_than_spare(exits: list[TaskExit], spares: int, stops: bool) -> None:
    assert must_stop(exits, spares) == stops


def test_suspects_are_avoided_only_while_others_are_enough() -> None:
    request = make_request(machines=2, avoid=("m0",))
    four = [*SMALL, Machine("m3", "free", gpus=2, gpus_free=2, cpus=4, memory_bytes=8 << 30)]
    assert machines_to_avoid(request, ["m1", "m0"], four) == ("m0", "m1")
    assert machines_to_avoid(request, ["m1"], SMALL) == ("m0",)


def test_restart_delay_grows_up_to_a_limit() -> None:
    delays = [restart_delay_s(number) for number in range(100)]
    assert delays[:6] == [0, 0, 0, 1, 2, 4]
    assert max(delays) == 60


def node(number: str, name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    fields = {"NodeID": number, "Alive": alive, "NodeName": name, "NodeManagerAddress": "10.0.0.1"}
    return {**fields, "NodeManagerHostname": "host", "Resources": {"CPU": 4.0, **resources}}


def test_nodes_become_machines_with_unique_names() -> None:
    nodes = [node("aaaaaaaa", "10.0.0.1", GPU=2.0), node("bbbbbbbb", "10.0.0.1"), node("cc", "big", GPU=8.0)]
    others = [node("dd", "gone", alive=False), node("ee", "head", CPU=0.0)]
    machines = machines_from_nodes([*nodes, *others], {"aaaaaaaa": {"CPU": 4.0, "GPU": 1.0}})
    assert {number: (node.name, node.state, node.gpus, node.gpus_free) for number, node in machines.items()} == {
        "aaaaaaaa": ("host-aaaaaa", "busy", 2, 1),
        "bbbbbbbb": ("host-bbbbbb", "free", 0, 0),
        "cc": ("big", "free", 8, 8),
    }
