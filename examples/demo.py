"""From raw text to a trained model and its ledger, without any download: `make demo` runs this.

Builds a dataset from the source of the Python standard library, trains a small decoder on it with two workers, samples
from it, and shows where the time went. Then it trains the same recipe again, kills a worker halfway with `kill -9`, and
compares: the run recovers by itself and ends with the same bits. Every line that starts with `$` is a command you can
type.
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


def query(*arguments: str) -> object:
    """Return the JSON output of a command."""
    command = ["headway", *arguments, "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def losses(run: str) -> list[float]:
    """Return a run's loss per step."""
    return query("metrics", run, "--key", "loss")["values"]


def kill_a_worker(run: str) -> None:
    """Wait until a run is halfway, then kill its last worker."""
    while True:
        time.sleep(0.5)
        for live in query("ps"):
            if live["run"] == run and live["step"] >= HALFWAY and live["workers"]:
                worker = live["workers"][-1]
                print(f"\n$ kill -9 {worker}     (a worker of {run}, after step {live['step']})", flush=True)
                os.kill(worker, signal.SIGKILL)
                return


def main() -> None:
    """Run the demo, in the order in which a newcomer would type it."""
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
    print("\nnext: . .venv/bin/activate     (puts headway on your path)")
    print(f"      headway resume {run} --set train.steps=600     (continues the run)")
    print("      headway runs, headway metrics last --key loss, headway recipe show recipes/demo.toml")


def has_gpus() -> bool:
    """Whether Headway would train on GPUs here."""
    from headway.hardware import devices

    return devices("auto").kind == "cuda"


if __name__ == "__main__":
    main()
