"""From nothing to a trained model and a ledger, with nothing downloaded: what `make demo` runs.

Builds a data set from the Python standard library's own source, trains a small decoder on it with two workers, prints
what it would write, and shows where the time went. Then it trains the same again, kills a worker halfway with
`kill -9`, and compares: the run goes on by itself and ends with the same bits. Every line that starts with `$` is a
command you can type.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = "data/python-stdlib"
HALFWAY = 100


def headway(*arguments: str) -> None:
    """Show a command and run it; stop the demo if it fails."""
    print(f"\n$ headway {shlex.join(arguments)}", flush=True)
    status = subprocess.run(["headway", *arguments], cwd=ROOT).returncode
    if status:
        sys.exit(status)


def ask(*arguments: str) -> object:
    """What a command answers, for programs."""
    command = ["headway", *arguments, "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def losses(run: str) -> list[float]:
    """A run's loss, step by step."""
    return ask("metrics", run, "--key", "loss")["values"]


def kill_a_worker(run: str) -> None:
    """Wait until a run is halfway, then kill its last worker, as anybody could."""
    while True:
        time.sleep(0.5)
        for one in ask("ps"):
            if one["run"] == run and one["step"] >= HALFWAY and one["workers"]:
                worker = one["workers"][-1]
                print(f"\n$ kill -9 {worker}     (a worker of {run}, after step {one['step']})", flush=True)
                os.kill(worker, signal.SIGKILL)
                return


def main() -> None:
    """The demo, in the order a newcomer would type it."""
    library = sysconfig.get_path("stdlib")
    sources = [f"{library}/{pattern}" for pattern in ("*.py", "asyncio/*.py", "email/*.py", "json/*.py")]
    headway("data", "build", DATA, *sources, "--vocab-size", "2048")

    run, again = f"demo-{os.getpid()}", f"demo-{os.getpid()}-killed"
    options = ["--set", "train.deterministic=true"] if has_gpus() else ["--workers", "2"]
    headway("train", "recipes/demo.toml", "--name", run, *options)

    values = losses(run)
    first, last = sum(values[:10]) / 10, sum(values[-10:]) / 10
    print(f"\nloss: {first:.2f} over the first ten steps, {last:.2f} over the last ten")
    if not last < 0.8 * first:
        sys.exit("error: the loss did not clearly fall; please report this with the run's folder")

    headway("sample", run, "--prompt", "def __init__(self, ", "--max-tokens", "60")

    threading.Thread(target=kill_a_worker, args=(again,), daemon=True).start()
    headway("train", "recipes/demo.toml", "--name", again, *options)
    headway("report", again)
    headway("diff", run, again)
    print(f"\nnext: headway resume {run} --set train.steps=600     (go on where it ended)")
    print("      headway runs, headway metrics last --key loss, headway recipe show recipes/demo.toml")


def has_gpus() -> bool:
    """Whether Headway would train on GPUs here."""
    from headway.hardware import devices

    return devices("auto").kind == "cuda"


if __name__ == "__main__":
    main()
