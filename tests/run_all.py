"""Run every test that needs no GPU, package by package, and record how each went: `make test-all`.

    python tests/run_all.py            # all packages; those that passed on these sources are not run again
    python tests/run_all.py cluster    # one package, whether it passed or not

The record, .test-results/test-all.json, has one entry per package: which sources, how many passed, failed and were
skipped, the failed tests by name, and how long it took.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / ".test-results" / "test-all.json"
SOURCES = ("src", "tests", "recipes", "examples", "docs", "benchmarks", "pyproject.toml", "README.md")
ENVIRONMENT = os.environ | {"HEADWAY_TEST_ALL": "1"}  # more random examples: tests/thinned.py
TOP = "tests"
"""Stands for the test files that are of no package."""


def packages() -> list[str]:
    """The folders of tests, and the files beside them."""
    return [*sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))), TOP]


def fingerprint() -> str:
    """Of all sources as they are now, committed or not."""
    digest = hashlib.sha256()
    for source in SOURCES:
        top = ROOT / source
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def run_package(package: str, testers: int) -> dict[str, Any]:
    """Run one package's tests to their end; how they went."""
    places = [f"tests/{package}"]
    if package == TOP:
        places = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py"))]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-n", str(testers), "--dist", "loadfile"]
        started = time.monotonic()
        status = subprocess.run(
            [*command, f"--junit-xml={report}", *places], cwd=ROOT, env=ENVIRONMENT, check=False
        ).returncode
        wall_s = round(time.monotonic() - started, 1)
        if status not in (0, 1) or not report.exists():
            return {"result": f"pytest exited with {status}", "wall_s": wall_s}
        return {**read_junit(report.read_text()), "wall_s": wall_s}


def read_junit(text: str) -> dict[str, Any]:
    """The counts and failures of a JUnit report."""
    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in ET.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[kind].append(f"{case.get('classname')}::{case.get('name')}")
    counts = {kind: len(names) for kind, names in outcomes.items()}
    result = "failed" if counts["failed"] else "passed" if counts["passed"] else "no test ran"
    return {"result": result, **counts, "failures": outcomes["failed"]}


def show(record: dict[str, Any], now: str) -> str:
    """The record as a table."""
    lines = [f"{'package':<12}{'result':<10}{'passed':>8}{'skipped':>9}{'failed':>8}{'minutes':>9}  sources"]
    for package, row in record.items():
        counts = f"{row.get('passed', '-'):>8}{row.get('skipped', '-'):>9}{row.get('failed', '-'):>8}"
        which = "these" if row["sources"] == now else "older"
        lines.append(f"{package:<12}{row['result']:<10}{counts}{row['wall_s'] / 60:>9.1f}  {which}")
    return "\n".join(lines)


def main() -> int:
    """The exit status: 0 once every package has passed on these sources."""
    parser = argparse.ArgumentParser(description="Run every test that needs no GPU, package by package.")
    parser.add_argument("package", nargs="?", choices=packages())
    parser.add_argument("--testers", type=int, default=4, help="test processes side by side")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    now = fingerprint()
    for package in [options.package] if options.package else packages():
        row = record.get(package, {})
        if not options.package and row.get("sources") == now and row["result"] == "passed":
            print(f"{package}: passed on these sources before", flush=True)
            continue
        print(f"{package}:", flush=True)
        record[package] = {"sources": now, **run_package(package, options.testers)}
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1))
    print(show(record, now))
    wanted = [options.package] if options.package else packages()
    return 0 if all(record[package]["result"] == "passed" for package in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
