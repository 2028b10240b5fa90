"""What the Ray engine decides, held against tables; no Ray needed."""

from pathlib import Path
from typing import Any

import pytest

from headway.cluster.engines import LaunchRequest, Machine
from headway.cluster.engines.ray.rules import (
    NextState,
    TaskExit,
    bundle,
    machines_of,
    next_state,
    pause_s,
    why_never_fits,
)
from headway.errors import UsageError

SAVED = "it has saved, and waits to be started again"
SMALL = [Machine(f"m{one}", "free", gpus=2, gpus_free=2, cpus=4, memory_bytes=8 << 30) for one in range(3)]


def ask(**fields: Any) -> LaunchRequest:
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
def test_what_can_never_fit_is_known_at_once(fields: dict[str, Any], fits: bool) -> None:
    assert (why_never_fits(ask(**fields), SMALL) is None) == fits


def test_the_reason_says_what_was_asked_and_what_there_is() -> None:
    busy = [*SMALL, Machine("gone", "away", gpus=8, cpus=64)]
    assert why_never_fits(ask(machines=1, gpus=4, cpus=2), busy) == (
        "1 machine with 4 GPUs and 2 cores each were asked for, and of its 3 machines there is room for 0; "
        "the largest has 2 GPUs, 4 cores and 8 GiB"
    )


@pytest.mark.parametrize("site", [{"strategy": "tight"}, {"partition": "gpu"}])
def test_what_ray_does_not_know_is_refused(site: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"strategy 'TIGHT'|no 'partition'"):
        why_never_fits(ask(site=site), SMALL)


def test_a_bundle_holds_what_is_asked_for_and_nothing_else() -> None:
    assert bundle(ask(cpus=3)) == {"CPU": 3}
    assert bundle(ask(gpus=2, memory_bytes=5)) == {"CPU": 1, "GPU": 2, "memory": 5}


@pytest.mark.parametrize(
    ("ends", "told", "want"),
    [
        ([TaskExit(0, 0), TaskExit(1, 0)], {}, NextState("finished", "", 0)),
        ([TaskExit(0, 0), TaskExit(1, 3)], {}, NextState("failed", "its command exited with 3 on b", 3)),
        (
            [TaskExit(0, 75), TaskExit(1, 0)],
            {},
            NextState("waiting", "it has saved, and waits to be started again", 75),
        ),
        ([TaskExit(0, 75), TaskExit(1, 137)], {}, NextState("failed", "its command exited with 137 on b", 137)),
        ([TaskExit(1, lost="x"), TaskExit(0, 138)], {}, NextState("waiting", "b was lost (x); it is started again")),
        (
            [TaskExit(1, lost="x"), TaskExit(0, 138)],
            {"cancelled": True},
            NextState("cancelled", "somebody cancelled it"),
        ),
        ([TaskExit(0, 75), TaskExit(1, 75)], {"cancelled": True}, NextState("cancelled", "somebody cancelled it", 75)),
        ([TaskExit(0, 0), TaskExit(1, 0)], {"cancelled": True}, NextState("finished", "", 0)),
        (
            [TaskExit(0, 137), TaskExit(1, 137)],
            {"limit_s": 9.0},
            NextState("failed", "it was ended at its limit of 9 s", 137),
        ),
        (
            [TaskExit(0, 75), TaskExit(1, 75)],
            {"limit_s": 9.0},
            NextState("waiting", "it has saved, and waits to be started again", 75),
        ),
        ([TaskExit(0, 138), TaskExit(1, 0)], {"told_after_s": 1.0}, NextState("waiting", SAVED, 138)),
        (
            [TaskExit(0, 138), TaskExit(1, 0)],
            {"told_after_s": 99.0},
            NextState("failed", "its command exited with 138 on a", 138),
        ),
        ([TaskExit(0, error="no folder"), TaskExit(1, lost="called off")], {}, NextState("failed", "no folder")),
        # One that knows how the whole ended is believed, whoever else was lost or failed.
        ([TaskExit(0, 0, said=0), TaskExit(1, lost="gone")], {}, NextState("finished", "b was lost (gone)", 0)),
        ([TaskExit(0, 137), TaskExit(1, 0, said=0)], {}, NextState("finished", "", 0)),
        (
            [TaskExit(0, 1, said=1), TaskExit(1, 75, said=75)],
            {},
            NextState("waiting", "it has saved, and waits to be started again", 75),
        ),
        (
            [TaskExit(0, 75, said=75), TaskExit(1, 0)],
            {"cancelled": True},
            NextState("cancelled", "somebody cancelled it", 75),
        ),
        ([TaskExit(0, 1, said=1), TaskExit(1, 9)], {}, NextState("failed", "its command exited with 9 on b", 9)),
    ],
)
def test_what_follows_when_processes_have_ended(ends: list[TaskExit], told: dict[str, Any], want: NextState) -> None:
    assert next_state(ends, ["a", "b"], **{"cancelled": False, "limit_s": None, **told}) == want


def test_who_is_over_soon_waits_longer_and_longer_but_not_for_ever() -> None:
    pauses = [pause_s(number) for number in range(100)]
    assert pauses[:6] == [0, 0, 0, 1, 2, 4]
    assert max(pauses) == 60


def node(number: str, name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    fields = {"NodeID": number, "Alive": alive, "NodeName": name, "NodeManagerAddress": "10.0.0.1"}
    return {**fields, "NodeManagerHostname": "host", "Resources": {"CPU": 4.0, **resources}}


def test_nodes_become_machines_with_names_that_differ() -> None:
    nodes = [node("aaaaaaaa", "10.0.0.1", GPU=2.0), node("bbbbbbbb", "10.0.0.1"), node("cc", "big", GPU=8.0)]
    others = [node("dd", "gone", alive=False), node("ee", "head", CPU=0.0)]
    found = machines_of([*nodes, *others], {"aaaaaaaa": {"CPU": 4.0, "GPU": 1.0}})
    assert {number: (one.name, one.state, one.gpus, one.gpus_free) for number, one in found.items()} == {
        "aaaaaaaa": ("host-aaaaaa", "busy", 2, 1),
        "bbbbbbbb": ("host-bbbbbb", "free", 0, 0),
        "cc": ("big", "free", 8, 8),
    }
