"""What the suite's own tools promise: who is charged with CPU time, which runs pass, how tests wait."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from check_budget import over_budget
from cpu_time import package_of, tree_cpu_s
from eventually import eventually
from rerun_failed import verdict
from run_all import packages, read_junit, show

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"


def test_cpu_time_of_a_child_counts_before_and_after_it_is_reaped() -> None:
    before = tree_cpu_s()
    child = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    alive = tree_cpu_s() - before
    child.communicate(b"\n")
    reaped = tree_cpu_s() - before
    assert alive >= 0.25
    assert reaped >= alive - 0.05  # /proc counts in hundredths of a second


def test_packages_are_the_folders_of_tests() -> None:
    assert package_of("tests/agent/nodes/test_lease.py::test_one[a/b]") == "agent"
    assert package_of("tests/cluster/engines/test_command_runner.py::test_two") == "cluster"
    assert package_of("tests/test_house.py::test_three") == "tests"
    assert {"agent", "state", "tests"} <= set(packages())


@pytest.mark.parametrize(
    ("used", "speed", "lines"),
    [
        ({"agent": 9.9, "plan": 1.0}, 1.0, []),
        ({"agent": 13.9, "plan": 1.0}, 1.0, []),  # noise
        ({"agent": 14.1, "plan": 1.0}, 1.0, ["agent: 14.1 CPU-seconds of 10"]),
        ({"agent": 19.0}, 0.5, []),  # on a machine of half the speed
        ({"agent": 7.5}, 2.0, ["agent: 15.0 CPU-seconds of 10"]),
        ({"rl": 0.5}, 1.0, ["rl: 0.5 CPU-seconds, and no budget"]),
    ],
)
def test_growth_beyond_the_budget_is_named(used: dict[str, float], speed: float, lines: list[str]) -> None:
    assert over_budget(used, {"agent": 10, "plan": 5}, speed) == lines


@pytest.mark.parametrize(
    ("alone", "status", "words"),
    [
        ([True], 0, ["FLAKY"]),
        ([True, True], 0, ["FLAKY", "FLAKY"]),
        ([True, True, True], 1, ["FLAKY", "FLAKY", "FLAKY", "3"]),
        ([True, False], 1, ["FLAKY", "FAILED"]),
    ],
)
def test_two_flaky_tests_are_tolerated(alone: list[bool], status: int, words: list[str]) -> None:
    failed = {f"test-{number}": "assert 1 == 2\nmore" for number in range(len(alone))}
    result, lines = verdict(failed, dict(zip(failed, alone, strict=True)))
    assert (result, [line.split()[0] for line in lines]) == (status, words)
    assert lines[0].endswith("test-0: assert 1 == 2")


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_fine"/>
<testcase classname="tests.a" name="test_bad"><failure message="no"/></testcase>
<testcase classname="tests.a" name="test_broken"><error message="no"/></testcase>
<testcase classname="tests.a" name="test_left"><skipped message="no Slurm"/></testcase>
</testsuite></testsuites>"""


def test_a_package_passes_when_something_ran_and_nothing_failed() -> None:
    row = read_junit(JUNIT)
    assert (row["result"], row["passed"], row["failed"], row["skipped"]) == ("failed", 1, 2, 1)
    assert row["failures"] == ["tests.a::test_bad", "tests.a::test_broken"]
    assert read_junit("<testsuites/>")["result"] == "no test ran"
    rows = {"agent": {**row, "wall_s": 90.0, "sources": "now"}, "cli": {**row, "wall_s": 6.0, "sources": "x"}}
    table = show(rows, "now")
    assert [line.split()[-2:] for line in table.splitlines()[1:]] == [["1.5", "these"], ["0.1", "older"]]


def test_waiting_returns_what_came_true_and_fails_with_a_description() -> None:
    values = iter([0, None, "here"])
    assert eventually(lambda: next(values), poll_s=0) == "here"
    with pytest.raises(AssertionError, match=r"not true after 0 s: the log of worker 3"):
        eventually(lambda: False, lambda: "the log of worker 3", ceiling_s=0)


def test_no_tester_imports_large_libraries_only_to_collect() -> None:
    """Every tester collects every file: tests/lazy_imports.py imports them for those that run a test with them."""
    large = re.compile(r"^(?:import|from) (?:diffusers|openai|scipy|sklearn|transformers)\b", re.MULTILINE)
    files = [*Path(__file__).parent.rglob("test_*.py"), Path(__file__).with_name("conftest.py")]
    assert not [str(file) for file in files if large.search(file.read_text(encoding="utf-8"))]
