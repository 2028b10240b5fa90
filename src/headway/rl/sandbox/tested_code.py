"""Runs an answer's code against tests, in a sandbox each: the code never sees what is expected of it."""

import json
import os
import select
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headway.errors import DataError
from headway.rl.sandbox.process import (
    LOOK_S,
    TIMED_OUT,
    SandboxLimits,
    SandboxProcess,
    once_more_if_lost,
)

ANSWER_SIDE, TESTS_SIDE = "/box/answer_side.py", "/box/tests_side.py"
MOST_VERDICT = 1 << 20


@dataclass(frozen=True, slots=True)
class TestCode:
    """The tests of a row."""

    __test__ = False  # to pytest, a class of this name would be one of tests
    tests: Sequence[str]
    """Statements, each of which raises unless the answer passes: `assert f(2) == 4`."""
    setup: str = ""
    """Statements before them: imports, helpers."""
    entry_point: str | None = None
    """The only name that they take from the answer; without it, all that it defines but Python's own names."""


def run_tests(code: str, tests: TestCode, limits: SandboxLimits) -> list[bool]:
    """Return of each test whether the answer's code passes; those that the time did not suffice for do not."""
    return once_more_if_lost(lambda: _run_tests(code, tests, limits))


def _run_tests(code: str, tests: TestCode, limits: SandboxLimits) -> list[bool]:
    with ExitStack() as stack:
        pipes = [os.pipe() for _ in range(3)]
        open_ends = {end for pipe in pipes for end in pipe}
        stack.callback(_close, open_ends)
        (requests, ask), (replies, reply), (verdicts, verdict) = pipes
        answer_files = {ANSWER_SIDE: _script("answer_side"), "/box/answer.py": code}
        tests_files = {TESTS_SIDE: _script("tests_side"), "/box/tests.json": json.dumps(_as_json(tests))}
        shared = {"/box/headway/rl/sandbox/plain_data.py": _script("plain_data")}
        answer_sandbox = stack.enter_context(
            SandboxProcess(ANSWER_SIDE, {**answer_files, **shared}, limits, stdin=requests, stdout=reply)
        )
        tests_sandbox = stack.enter_context(
            SandboxProcess(TESTS_SIDE, {**tests_files, **shared}, limits, stdin=replies, stdout=ask, verdict=verdict)
        )
        # Each must see the end of its pipes when the other ends, so none may be open here.
        _close(open_ends - {verdicts})
        open_ends &= {verdicts}
        lines = _read(verdicts, [answer_sandbox, tests_sandbox]).splitlines()
        status = tests_sandbox.end()
        if not lines:  # the code could not be run, or its sandbox could not be built, which is another matter
            answer_sandbox.end()
        answer_sandbox.check()
        if status not in (0, TIMED_OUT):
            raise DataError("the row's tests ended their process instead of passing or raising")
    return _passed(lines, len(tests.tests))


def _close(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read(descriptor: int, sandboxes: Sequence[SandboxProcess]) -> bytes:
    """Read until the tests' sandbox has ended, which its limit of time sees to."""
    verdicts = bytearray()
    while len(verdicts) <= MOST_VERDICT:
        if not select.select([descriptor], [], [], LOOK_S)[0]:
            for sandbox in sandboxes:
                sandbox.check()
            continue
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            break
        verdicts += chunk
    return bytes(verdicts)


def _passed(lines: Sequence[bytes], count: int) -> list[bool]:
    messages = [json.loads(line) for line in lines[:count]]
    for message in messages:
        if "unusable" in message:
            raise DataError(f"the row's tests cannot be run: {message['unusable']}")
    passed = [bool(message["passed"]) for message in messages]
    return passed + [False] * (count - len(passed))


def _as_json(tests: TestCode) -> dict[str, object]:
    return {"tests": list(tests.tests), "setup": tests.setup, "entry_point": tests.entry_point}


@cache
def _script(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
