"""Rewards of runs under faults: a random model's answers differ in them, and they take long enough to be hit."""

import time

from headway.errors import EngineError
from headway.rl.rewards import Answer
from headway.rl.sandbox import SandboxLimits, run_program

LIMITS = SandboxLimits(seconds=60)
COUNT = "import sys\nprint(sum(character.isdigit() for character in sys.stdin.read()))"


def digits(answer: Answer, seconds: float = 0.0) -> float:
    """Return the share of an answer's characters that are digits, after so long."""
    time.sleep(seconds)
    return sum(map(str.isdigit, answer.text)) / max(1, len(answer.text))


def digits_in_sandbox(answer: Answer) -> float:
    """Return the same, counted by a program in a sandbox."""
    end = run_program(COUNT, answer.text.encode(errors="replace"), LIMITS, 100)
    if end.status != 0:
        raise EngineError(f"the program that counts ended with status {end.status}")
    return int(end.output) / max(1, len(answer.text))
