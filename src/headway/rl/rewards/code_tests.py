"""The `code` reward: Python that passes its row's tests, in a sandbox."""

import re
from typing import Annotated, Any

from pydantic import Field

from headway.errors import DataError
from headway.rl.rewards.answer import Answer
from headway.rl.sandbox import SandboxLimits, TestCode, check_sandbox, run_program, run_tests

OUTPUT_SLACK = 1 << 16
"""Bytes that a program may write beyond twice what is expected."""

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


def code_reward(
    answer: Answer,
    *,
    partial: bool = False,
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0,
    memory_mb: Annotated[int, Field(ge=64)] = 512,
) -> float:
    """Return 1.0 if the answer's last code block passes all tests of its row; with `partial`, the share that it passes.

    The row has `tests`, statements such as `assert f(2) == 4` (with `setup` and `entry_point`, if need be); or `inputs`
    and `outputs`, what a program reads and must write. `seconds` are for all tests, or for each of the inputs.
    """
    check_sandbox()
    code = last_block(answer.text)
    limits = SandboxLimits(seconds=seconds, memory_bytes=memory_mb << 20)
    if "inputs" in answer.fields:
        passed = _run_on_inputs(code, answer, limits, stop_early=not partial)
    else:
        passed = run_tests(code, _tests(answer), limits)
    return sum(passed) / len(passed) if partial else float(all(passed))


def last_block(text: str) -> str:
    """Return the last closed code block of a text; all of it if there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _tests(answer: Answer) -> TestCode:
    tests = answer.field("tests")
    tests = [tests] if isinstance(tests, str) else tests
    setup, entry_point = answer.fields.get("setup") or "", answer.fields.get("entry_point") or None
    if not _are_texts(tests) or not isinstance(setup, str) or not isinstance(entry_point, str | None):
        raise DataError("field 'tests' is no list of statements", hint='tests = ["assert f(2) == 4"], setup = "..."')
    return TestCode(tests, setup, entry_point)


def _run_on_inputs(code: str, answer: Answer, limits: SandboxLimits, stop_early: bool) -> list[bool]:
    """Return for each input whether the program writes the expected output, which stays out here."""
    inputs, outputs = answer.field("inputs"), answer.field("outputs")
    if not _are_texts(inputs) or not _are_texts(outputs) or len(inputs) != len(outputs):
        raise DataError("fields 'inputs' and 'outputs' are no lists of as many texts")
    passed: list[bool] = []
    for stdin, expected in zip(inputs, outputs, strict=True):
        most = 2 * len(expected.encode()) + OUTPUT_SLACK
        end = run_program(code, stdin.encode(), limits, most)
        passed.append(end.status == 0 and _lines(end.output.decode(errors="replace")) == _lines(expected))
        if stop_early and not passed[-1]:
            break
    return passed


def _lines(output: str) -> list[str]:
    """Return lines to compare: white space at their ends and empty lines at the end do not count."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
