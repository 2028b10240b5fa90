"""Run the tests that failed in the last `make test` once more, one by one: `.ci/run` does, `make test` does not.

    python tests/rerun_failed.py .test-results/test.json

A test that passes alone is printed as FLAKY, with what it failed with the first time. More than two of them fail the
run, and so does one that fails again.
"""

import json
import subprocess
import sys
from pathlib import Path

ALLOWED = 2
"""Flaky tests that a run may have. Each is to be fixed before anything else is begun."""
MOST = 12
"""With more failures than this nothing is flaky, and running them again tells nothing new."""


def verdict(failed: dict[str, str], passes_alone: dict[str, bool]) -> tuple[int, list[str]]:
    """The exit status, and one line per test."""
    lines = []
    for test, message in failed.items():
        first = next(iter(message.strip().splitlines()), "no message")
        lines.append(f"{'FLAKY' if passes_alone[test] else 'FAILED'} {test}: {first}")
    flaky = sum(passes_alone.values())
    if flaky > ALLOWED:
        lines.append(f"{flaky} flaky tests, {ALLOWED} are allowed")
    return (0 if flaky == len(failed) and flaky <= ALLOWED else 1), lines


def main(record: Path) -> int:
    """The exit status of the whole run."""
    failed = json.loads(record.read_text())["failed"] if record.exists() else {}
    if not failed or len(failed) > MOST:
        print(f"{len(failed)} failed tests: none is run again", file=sys.stderr)
        return 1
    passes = {test: _passes(test) for test in failed}
    status, lines = verdict(failed, passes)
    print("\n".join(lines))
    return status


def _passes(test: str) -> bool:
    return (
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test], check=False).returncode
        == 0
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
