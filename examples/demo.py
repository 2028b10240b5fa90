"""From nothing to a trained model and a ledger, with nothing downloaded: what `make demo` runs.

Builds a data set from the Python standard library's own source, trains a small decoder on it with two workers, prints
what it would write, and shows where the time went. Every line that starts with `$` is a command you can type.
"""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = "data/python-stdlib"


def headway(*arguments: str) -> None:
    """Show a command and run it; stop the demo if it fails."""
    print(f"\n$ headway {shlex.join(arguments)}", flush=True)
    status = subprocess.run(["headway", *arguments], cwd=ROOT).returncode
    if status:
        sys.exit(status)


def losses(run: str) -> list[float]:
    """A run's loss, step by step."""
    command = ["headway", "metrics", run, "--key", "loss", "--json"]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return json.loads(answer)["values"]


def main() -> None:
    """The demo, in the order a newcomer would type it."""
    library = sysconfig.get_path("stdlib")
    sources = [f"{library}/{pattern}" for pattern in ("*.py", "asyncio/*.py", "email/*.py", "json/*.py")]
    headway("data", "build", DATA, *sources, "--vocab-size", "2048")

    run = f"demo-{os.getpid()}"
    headway("train", "recipes/demo.toml", "--name", run, *([] if has_gpus() else ["--workers", "2"]))

    values = losses(run)
    first, last = sum(values[:10]) / 10, sum(values[-10:]) / 10
    print(f"\nloss: {first:.2f} over the first ten steps, {last:.2f} over the last ten")
    if not last < 0.8 * first:
        sys.exit("error: the loss did not clearly fall; please report this with the run's folder")

    headway("sample", run, "--prompt", "def __init__(self, ", "--max-tokens", "60")
    headway("report", run)
    print(f"\nnext: headway resume {run} --set train.steps=600     (go on where it ended)")
    print("      headway runs, headway metrics last --key loss, headway recipe show recipes/demo.toml")


def has_gpus() -> bool:
    """Whether Headway would train on GPUs here."""
    from headway.hardware import devices

    return devices("auto").kind == "cuda"


if __name__ == "__main__":
    main()
