"""Rewards that the tests' recipes name."""

import hashlib
import os
import time
from pathlib import Path

from headway.rl.rewards import Answer


def digits(answer: Answer) -> float:
    """The share of characters that are digits: what a random model can improve on at once."""
    return sum(c.isdigit() for c in answer.text) / max(1, len(answer.text))


def noted(answer: Answer, folder: str) -> float:
    """The same, with a file per call: how often was each answer scored?"""
    key = f"{answer.prompt}-{hash(answer.text)}-{answer.tokens}"
    with (Path(folder) / key.replace("/", "_")).open("a") as file:
        file.write("x")
    return digits(answer)


def constant(_: Answer) -> float:
    """Nothing to learn from."""
    return 1.0


def sometimes(answer: Answer) -> float:
    """Raises, dies or is no number, by the answer's characters."""
    match sum(map(ord, answer.text)) % 5:
        case 0:
            raise ValueError("no score for this one")
        case 1:
            os._exit(3)
        case 2:
            return float("nan")
    return digits(answer)


def forever(_: Answer) -> float:
    """Never returns."""
    while True:
        time.sleep(60)


def slow_once(answer: Answer, folder: str, after: int, seconds: float) -> float:
    """Takes long once, after it has been called so often by any process."""
    with (Path(folder) / "calls").open("a") as file:
        file.write("x")
        calls = file.tell()
    try:
        if calls > after:
            (Path(folder) / "slept").touch(exist_ok=False)
            time.sleep(seconds)
    except FileExistsError:
        pass
    return digits(answer)


def counted(answer: Answer, folder: str) -> float:
    """The same, with a character in a file of the prompt and the answer for every call."""
    prompt = int(answer.fields["target"]) - 1
    name = hashlib.sha256(f"{prompt} {answer.text}".encode()).hexdigest()
    with (Path(folder) / name).open("a") as file:
        file.write("x")
    return digits(answer)
