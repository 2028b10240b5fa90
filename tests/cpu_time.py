"""Pytest plugin: CPU-seconds per test and per package, child processes included.

`pytest --cpu-record=FILE`, as `make test` calls it, prints the slowest tests and the CPU-seconds of each package, and
writes them to FILE, from which `make lint` checks tests/budget.toml and `.ci/run` learns what failed.

A test is charged what its process and all descendants used since the last reading: threads, forked workers, daemons.
Descendants that outlive their parent are no longer seen, so that a total is a lower bound. Each tester also times a
fixed loop now and then: `speed` tells how fast this machine was, next to the one that the budgets were measured on.
"""

import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SLOWEST = 15
LONG_S = 0.25
"""Phases of less wall time are not worth reading /proc for: the next longer one is charged with them."""
CALIBRATE_EVERY_S = 15.0
REFERENCE_LOOP_S = 0.0215
"""CPU-seconds of the fixed loop on an idle core of the machine that the budgets were measured on (Neoverse-N1)."""


def tree_cpu_s() -> float:
    """CPU-seconds of this process and its descendants, living or reaped."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(part.ru_utime + part.ru_stime for part in usage)
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended meanwhile
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # its own, and those of children it has reaped
    total, stack = 0, list(children.get(os.getpid(), []))
    while stack:
        pid = stack.pop()
        total += ticks[pid]
        stack.extend(children.get(pid, []))
    return own_s + total / os.sysconf("SC_CLK_TCK")


def loop_cpu_s() -> float:
    """CPU-seconds that a fixed amount of interpreted work takes here and now."""
    started = time.thread_time()
    sum(number * number % 7 for number in range(200_000))
    return time.thread_time() - started


class Meter:
    """In each tester: reads the CPU clock after the phases of a test, and adds the difference to its report."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s, self._calibrated_s = 0.0, 0.0, float("-inf")
        self._collection_cpu_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = time.monotonic()
        if self._collection_cpu_s:
            report.collection_cpu_s, self._collection_cpu_s = self._collection_cpu_s, 0.0
        if now - self._wall_s >= LONG_S:
            cpu_s = tree_cpu_s()
            report.cpu_s, self._cpu_s = max(0.0, cpu_s - self._cpu_s), max(cpu_s, self._cpu_s)
        if now - self._calibrated_s >= CALIBRATE_EVERY_S:
            report.loop_cpu_s, self._calibrated_s = loop_cpu_s(), now
        self._wall_s = now
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        if not self._wall_s:  # before the first test: importing and collecting, which is no test's
            self._cpu_s, self._wall_s = tree_cpu_s(), time.monotonic()
            self._collection_cpu_s = self._cpu_s


class Summary:
    """In the process that was started: adds up what testers report."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._started_s = time.monotonic()
        self._tests: Counter[str] = Counter()
        self._loops: list[float] = []
        self._failed: dict[str, str] = {}
        self._collection_cpu_s = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._tests[report.nodeid] += getattr(report, "cpu_s", 0.0)
        self._collection_cpu_s += getattr(report, "collection_cpu_s", 0.0)
        if hasattr(report, "loop_cpu_s"):
            self._loops.append(report.loop_cpu_s)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failed.setdefault(report.nodeid, str(crash.message if crash else report.longrepr)[:2000])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = str(report.longrepr)[-2000:]

    def pytest_sessionfinish(self) -> None:
        packages: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for test, cpu_s in self._tests.items():
            packages[package_of(test)] += cpu_s
            files[test.partition("::")[0]] += cpu_s
        packages["collection"] = self._collection_cpu_s
        self.result = {
            "wall_s": round(time.monotonic() - self._started_s, 1),
            "cpu_s": round(packages.total(), 1),
            "speed": round(REFERENCE_LOOP_S / statistics.median(self._loops), 3) if self._loops else 1.0,
            "packages": {name: round(cpu_s, 1) for name, cpu_s in packages.most_common()},
            "files": {name: round(cpu_s, 1) for name, cpu_s in files.most_common()},
            "slowest": {name: round(cpu_s, 1) for name, cpu_s in self._tests.most_common(100)},
            "failed": self._failed,
        }
        self._record.parent.mkdir(exist_ok=True)
        self._record.write_text(json.dumps(self.result, indent=1))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        result = self.result
        terminalreporter.write_sep("=", f"CPU-seconds: the slowest {SLOWEST} tests, and packages")
        for test, cpu_s in list(result["slowest"].items())[:SLOWEST]:
            terminalreporter.write_line(f"{cpu_s:8.1f}  {test}")
        terminalreporter.write_line("")
        for package, cpu_s in result["packages"].items():
            terminalreporter.write_line(f"{cpu_s:8.1f}  {package}")
        terminalreporter.write_line(f"{result['cpu_s']:8.1f}  all; this machine's speed is {result['speed']:.2f}")


def package_of(test: str) -> str:
    """The package that a test is about: `agent` of `tests/agent/nodes/test_lease.py::test_one`, else `tests`."""
    parts = Path(test.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else "tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-record", metavar="FILE", type=Path, help="measure CPU-seconds per test, and write them here"
    )


def pytest_configure(config: pytest.Config) -> None:
    record = config.getoption("cpu_record")
    if record is None or not Path("/proc/self/stat").exists():
        return
    is_tester = hasattr(config, "workerinput")  # one of several that xdist has started
    if not is_tester:
        config.pluginmanager.register(Summary(record.absolute()))
    if is_tester or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter())
