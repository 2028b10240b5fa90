"""Fault plans."""

import os
import signal
import time

import pytest
from pydantic import ValidationError

from headway.recipe import FaultPlan
from headway.recipe.faults import AGENT, KEEPER, Fault, execute_fault, mark_fired, read_fired_faults


def due(plan: FaultPlan, *where: object, **more: object) -> list[str]:
    """What would strike, in words."""
    return [plan.faults[number].action for number in plan.due(*where, **more)]


def test_fault_plan_round_trips_as_json() -> None:
    plan = FaultPlan().kill(step=3, rank=1).stall("data", step=5, seconds=2.0)
    again = FaultPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert due(again, "start", 3, 1, 1) == ["kill"]
    assert again.due("start", 3, 0, 1) == []
    assert again.due("start", 3, 1, 2) == [], "a resumed run is not struck again"
    assert [again.faults[n].seconds for rank in (0, 1) for n in again.due("data", 5, rank, 1)] == [2.0, 2.0]


def test_when_a_fault_is_due() -> None:
    """Every way in which one can be asked for, against a list made by hand."""
    plan = (
        FaultPlan()
        .add("kill", point="compute", step=4)  # any rank, in the first attempt
        .add("stop", point="compute", step=4, rank=1, attempt=None)
        .add("raise", point="compute", step=4, rank=0, always=True)
        .add("nan", point="compute", step=4, rank=0, attempt=2, cursor=32)
        .add("exit", point="compute", rank=1, attempt=3)  # at whichever step comes first
        .add("slow", point="data", step=4, rank=1)
        .add("hang", point="watch", step=4, rank=AGENT)
    )
    assert due(plan, "compute", 4, 0, 1) == ["kill", "raise"]
    assert due(plan, "compute", 4, 1, 1) == ["kill", "stop"]
    assert due(plan, "compute", 4, 1, 2) == ["stop"]
    assert due(plan, "compute", 4, 0, 2) == ["raise"]
    assert due(plan, "compute", 4, 0, 2, cursor=32) == ["raise", "nan"]
    assert due(plan, "compute", 4, 0, 2, cursor=24) == ["raise"]
    assert due(plan, "compute", 4, 0, 9) == ["raise"]
    assert due(plan, "compute", 5, 0, 1) == due(plan, "compute", 3, 0, 1) == due(plan, "data", 3, 1, 1) == []
    assert due(plan, "compute", 3, 1, 3) == due(plan, "compute", 5, 1, 3) == ["exit"]
    assert [due(plan, "data", step, 1, 1) for step in (3, 4, 5, 99)] == [[], ["slow"], ["slow"], ["slow"]]
    assert [due(plan, "watch", step, AGENT, 1) for step in (3, 4, 9)] == [[], ["hang"], ["hang"]]
    assert due(plan, "watch", 4, KEEPER, 1) == []


@pytest.mark.parametrize(
    ("fault", "again"),
    [
        (Fault(action="kill", step=3, attempt=None), False),  # over all attempts once
        (Fault(action="kill", step=3, attempt=1), True),  # attempts have other numbers
        (Fault(action="raise", step=3, attempt=None, always=True), True),
        (Fault(action="slow", step=3, attempt=None), True),  # in every step from there on
    ],
    ids=["once", "an attempt's", "always", "slow"],
)
def test_one_time_fault_fires_once_per_rank(tmp_path, fault: Fault, again: bool) -> None:
    folder = tmp_path / "faults"
    before = time.monotonic_ns()
    assert mark_fired(folder, 7, fault, 1, 3)
    assert mark_fired(folder, 7, fault, 0, 4), "each rank for itself"
    assert mark_fired(folder, 7, fault, 1, 5) is again
    fired = read_fired_faults(folder)
    assert [(fault.number, fault.rank, fault.step) for fault in fired] == [(7, 1, 3), (7, 0, 4)], (
        "the first time counts"
    )
    assert before <= fired[0].at_ns <= fired[1].at_ns <= time.monotonic_ns()


def test_no_fired_faults_without_a_folder(tmp_path) -> None:
    assert read_fired_faults(tmp_path / "faults") == []


@pytest.mark.parametrize(
    ("action", "how"), [("kill", -signal.SIGKILL), ("exit", 3), ("raise", RuntimeError), ("full-disk", OSError)]
)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_execution_of_faults(action: str, how: object) -> None:
    fault = Fault(action=action, point="save", step=3)
    if not isinstance(how, int):
        with pytest.raises(how, match=r"injected at save of step 3|No space left on device"):
            execute_fault(fault)
        return
    pid = os.fork()
    if not pid:
        execute_fault(fault)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == how


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fault_signals_another_process() -> None:
    """As the agent does it to its keeper; neither touches the process that strikes."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    execute_fault(Fault(action="stop"), pid=pid)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    execute_fault(Fault(action="kill"), pid=pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_stall_and_slow_sleep_as_configured(monkeypatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    for action, seconds in (("stall", 2.0), ("slow", 0.25)):
        execute_fault(Fault(action=action, seconds=seconds))
    execute_fault(Fault(action="hang"))
    assert slept[:2] == [2.0, 0.25]
    assert slept[2] > 24 * 3600


def test_invalid_fault_is_refused() -> None:
    for wrong in ({"step": 0}, {"attempt": 0}, {"seconds": -1.0}, {"point": "nowhere"}, {"sttep": 1}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Fault.model_validate({"action": "kill", **wrong})


def test_mutations_are_part_of_a_plan_and_unknown_ones_refused() -> None:
    plan = FaultPlan.model_validate_json('{"mutations": ["whole-norm", "no-gradient-reduction"]}')
    assert plan.mutations == ("whole-norm", "no-gradient-reduction")
    assert plan.kill(step=1).mutations == plan.mutations, "a fault more leaves them as they are"
    assert FaultPlan().mutations == ()
    with pytest.raises(ValidationError, match="no-such-mistake"):
        FaultPlan.model_validate({"mutations": ["no-such-mistake"]})
