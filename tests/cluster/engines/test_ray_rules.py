"""What the Ray engine decides, held against tables; no Ray needed."""

from pathlib import Path
from typing import Any

import pytest

from headway.cluster.engines import Machine, Request
from headway.cluster.engines.ray_rules import End, Next, after, bundle, machines_of, misfit, pause_s
from headway.errors import UsageError

SAVED = "it has saved, and waits to be started again"
SMALL = [Machine(f"m{one}", "free", gpus=2, gpus_free=2, cpus=4, memory_bytes=8 << 30) for one in range(3)]


def ask(**fields: Any) -> Request:
    return Request("job", ("true",), Path("/nowhere"), **fields)


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
    assert (misfit(ask(**fields), SMALL) is None) == fits


def test_the_reason_says_what_was_asked_and_what_there_is() -> None:
    busy = [*SMALL, Machine("gone", "away", gpus=8, cpus=64)]
    assert misfit(ask(machines=1, gpus=4, cpus=2), busy) == (
        "1 machine with 4 GPUs and 2 cores each were asked for, and of its 3 machines there is room for 0; "
        "the largest has 2 GPUs, 4 cores and 8 GiB"
    )


@pytest.mark.parametrize("site", [{"strategy": "tight"}, {"partition": "gpu"}])
def test_what_ray_does_not_know_is_refused(site: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"strategy 'TIGHT'|no 'partition'"):
        misfit(ask(site=site), SMALL)


def test_a_bundle_holds_what_is_asked_for_and_nothing_else() -> None:
    assert bundle(ask(cpus=3)) == {"CPU": 3}
    assert bundle(ask(gpus=2, memory_bytes=5)) == {"CPU": 1, "GPU": 2, "memory": 5}


@pytest.mark.parametrize(
    ("ends", "told", "want"),
    [
        ([End(0, 0), End(1, 0)], {}, Next("finished", "", 0)),
        ([End(0, 0), End(1, 3)], {}, Next("failed", "its command exited with 3 on b", 3)),
        ([End(0, 75), End(1, 0)], {}, Next("waiting", "it has saved, and waits to be started again", 75)),
        ([End(0, 75), End(1, 137)], {}, Next("failed", "its command exited with 137 on b", 137)),
        ([End(1, lost="x"), End(0, 138)], {}, Next("waiting", "b was lost (x); it is started again")),
        ([End(1, lost="x"), End(0, 138)], {"cancelled": True}, Next("cancelled", "somebody cancelled it")),
        ([End(0, 75), End(1, 75)], {"cancelled": True}, Next("cancelled", "somebody cancelled it", 75)),
        ([End(0, 0), End(1, 0)], {"cancelled": True}, Next("finished", "", 0)),
        ([End(0, 137), End(1, 137)], {"limit_s": 9.0}, Next("failed", "it was ended at its limit of 9 s", 137)),
        (
            [End(0, 75), End(1, 75)],
            {"limit_s": 9.0},
            Next("waiting", "it has saved, and waits to be started again", 75),
        ),
        ([End(0, 138), End(1, 0)], {"told_after_s": 1.0}, Next("waiting", SAVED, 138)),
        ([End(0, 138), End(1, 0)], {"told_after_s": 99.0}, Next("failed", "its command exited with 138 on a", 138)),
        ([End(0, error="no folder"), End(1, lost="called off")], {}, Next("failed", "no folder")),
        # One that knows how the whole ended is believed, whoever else was lost or failed.
        ([End(0, 0, said=0), End(1, lost="gone")], {}, Next("finished", "b was lost (gone)", 0)),
        ([End(0, 137), End(1, 0, said=0)], {}, Next("finished", "", 0)),
        (
            [End(0, 1, said=1), End(1, 75, said=75)],
            {},
            Next("waiting", "it has saved, and waits to be started again", 75),
        ),
        ([End(0, 75, said=75), End(1, 0)], {"cancelled": True}, Next("cancelled", "somebody cancelled it", 75)),
        ([End(0, 1, said=1), End(1, 9)], {}, Next("failed", "its command exited with 9 on b", 9)),
    ],
)
def test_what_follows_when_processes_have_ended(ends: list[End], told: dict[str, Any], want: Next) -> None:
    assert after(ends, ["a", "b"], **{"cancelled": False, "limit_s": None, **told}) == want


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
