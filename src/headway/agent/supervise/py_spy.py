"""Stacks that py-spy takes from outside, where it is installed and allowed: Python's, and native ones."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from headway.agent.supervise.stack_queries import has_exited, parse_frames, read_text
from headway.agent.supervise.worker_stacks import Frame, WorkerStack

PY_SPY_TIMEOUT_S = 2.0
"""A native dump of a process with torch took 0.5 s, 2.4 s with a cold file cache."""

_PY_SPY_MAIN = re.compile(r'^Thread [^\n]*"MainThread"\n(?P<frames>(?:    [^\n]*\n)*)', re.MULTILINE)
_PY_SPY_FRAME = re.compile(r"^    (?P<function>[^\n]+?) \((?P<file>[^\n]+):(?P<line>\d+)\)$", re.MULTILINE)


@dataclass(frozen=True)
class PySpyDump:
    """What py-spy printed of a process."""

    python: str = ""
    native: str = ""
    missing: str = ""


def dump_python(stack: WorkerStack) -> PySpyDump:
    """Python stacks, without pausing the process."""
    if has_exited(stack):
        return PySpyDump()
    text, why = _py_spy(stack.pid, "--nonblocking", "--full-filenames")
    return PySpyDump(python=text, missing=f"no native stack: {why}" if why else "")


def dump_native(stack: WorkerStack, dump: PySpyDump) -> PySpyDump:
    """Add native stacks, if py-spy got Python's and the process is not stopped."""
    if not dump.python:
        return dump
    if stack.state == "T":
        return replace(dump, missing="no native stack: py-spy cannot unwind a stopped process")
    text, why = _py_spy(stack.pid, "--native")
    return replace(dump, native=text, missing=f"no native stack: {why}" if why else "")


def _py_spy(pid: int, *options: str) -> tuple[str, str]:
    """The output of `py-spy dump`, or why there is none."""
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    program = shutil.which("py-spy", path=path)
    if program is None:
        return "", "py-spy is not installed (pip install py-spy)"
    command = [program, "dump", "--pid", str(pid), *options]
    try:
        process = subprocess.run(
            command, capture_output=True, timeout=PY_SPY_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not finish within {PY_SPY_TIMEOUT_S:g} s"
    except OSError as error:
        return "", f"cannot start py-spy: {error.strerror}"
    if process.returncode == 0:
        return process.stdout.decode(errors="replace"), ""
    return "", _explain_py_spy_error(process.stderr.decode(errors="replace"))


def _explain_py_spy_error(stderr: str) -> str:
    if "permission denied" in stderr.lower():
        scope = read_text(Path("/proc/sys/kernel/yama/ptrace_scope")).strip()
        fix = f"ptrace_scope is {scope}, run sysctl kernel.yama.ptrace_scope=0" if scope not in ("", "0") else ""
        return f"py-spy has no permission: {fix or 'it needs CAP_SYS_PTRACE'}"
    lines = [line.strip().removeprefix("Error: ") for line in stderr.partition("Stack backtrace")[0].splitlines()]
    return f"py-spy failed: {'; '.join(line for line in lines if line and line != 'Caused by:') or 'no message'}"


def spied_frames(dump: PySpyDump) -> tuple[Frame, ...]:
    """Return the main thread's frames."""
    main = _PY_SPY_MAIN.search(dump.python)
    return parse_frames(_PY_SPY_FRAME, main["frames"]) if main else ()
