"""Runs a program that reads stdin and writes stdout in a sandbox of its own."""

import os
import selectors
import subprocess
from dataclasses import dataclass

from headway.rl.sandbox.process import LOOK_S, SandboxLimits, SandboxProcess, once_more_if_lost

MAIN = "/box/main.py"
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended."""

    status: int
    """0; 1 if it failed, was killed or wrote too much; 124 after its limit of time."""
    output: bytes
    """What it wrote to stdout."""


def run_program(source: str, stdin: bytes, limits: SandboxLimits, most_output: int) -> ProgramEnd:
    """Run a program; it ends as failed when it writes more than `most_output` bytes."""
    return once_more_if_lost(lambda: _run_program(source, stdin, limits, most_output))


def _run_program(source: str, stdin: bytes, limits: SandboxLimits, most_output: int) -> ProgramEnd:
    with SandboxProcess(MAIN, {MAIN: source}, limits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sandbox:
        assert sandbox.stdin is not None
        assert sandbox.stdout is not None
        output = _converse(sandbox.stdin.fileno(), sandbox.stdout.fileno(), sandbox, stdin, most_output)
        if len(output) > most_output:
            return ProgramEnd(1, output[:most_output])
        return ProgramEnd(sandbox.end(), output)


def _converse(writes: int, reads: int, sandbox: SandboxProcess, stdin: bytes, most_output: int) -> bytes:
    """Write the input and read the output until it ends, or is too long."""
    output = bytearray()
    left = memoryview(stdin)
    os.set_blocking(writes, False)
    with selectors.DefaultSelector() as selector:
        selector.register(reads, selectors.EVENT_READ)
        selector.register(writes, selectors.EVENT_WRITE)
        while len(output) <= most_output:
            ready = selector.select(LOOK_S)
            if not ready:
                sandbox.check()
            for key, _ in ready:
                if key.fd == reads:
                    chunk = os.read(reads, CHUNK)
                    if not chunk:
                        return bytes(output)
                    output += chunk
                    continue
                try:
                    left = left[os.write(writes, left[:CHUNK]) :] if left else left
                except BrokenPipeError:  # it reads no more, which is its own affair
                    left = left[:0]
                if not left:
                    selector.unregister(writes)
                    assert sandbox.process.stdin is not None
                    sandbox.process.stdin.close()
    return bytes(output)
