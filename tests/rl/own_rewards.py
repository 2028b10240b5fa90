"""Rewards of a user, good and bad, that the tests of the scorer name."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from headway.rl.rewards import Answer


def length(answer: Answer, *, factor: float = 1.0) -> float:
    return factor * len(answer.text)


def act(answer: Answer) -> object:
    """Do what the answer says."""
    match answer.text:
        case "raise":
            raise ValueError("no good")
        case "exit":
            sys.exit(0)
        case "die":
            os._exit(3)
        case "crash":
            ctypes.string_at(0)
        case "hang":
            while True:
                time.sleep(1)
        case "hang-once" if not (mark := Path(answer.fields["file"])).exists():
            mark.write_text(str(os.getpid()))
            time.sleep(1000)
        case "child":
            child = subprocess.Popen(["sleep", "1000"])
            Path(answer.fields["file"]).write_text(str(child.pid))
            time.sleep(1000)
        case "print":
            for _ in range(10000):
                print("{" * 100)
            os.write(1, b"not json\n" * 100_000)
            subprocess.run(["head", "-c", "200000", "/dev/zero"], check=True)
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "huge":
            return 10**400
        case "path":
            return float("torch" in sys.modules)
        case "pid":
            return os.getpid()
    return 1.0


def vowels(answer: Answer) -> float:
    return float(sum(letter in "aeiou" for letter in answer.text.lower()))
