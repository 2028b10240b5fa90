"""Two datasets with weights that change during the run.

Builds a dataset from each of two packages of the standard library, the second with the first's tokenizer; shows the
resulting shares; trains a few steps, and prints the held-out loss of each.
"""

import asyncio
import email
import json
import subprocess
import sys
from pathlib import Path

from headway.track import RunFolder, read_run

RECIPE = """
name = "mixture"

[model]
layers = 2
dim = 64

[data]
seq = 64

[data.mixture.mail]
path = "data/mail"
weight = 0.8

[data.mixture.async]
path = "data/async"
weight = [[1, 0.2], [13, 0.8]]

[train]
steps = 24
batch = 8
lr = 3e-3

[eval]
every_steps = 12
windows = 16
"""


def headway(*arguments: str) -> str:
    """Run one command and return what it printed."""
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Build both datasets, print the shares, train, print the losses."""
    mail, tasks = (f"{Path(package.__file__).parent}/*.py" for package in (email, asyncio))
    headway("data", "build", "data/mail", mail, "--vocab-size", "512", "--force")
    headway("data", "build", "data/async", tasks, "--tokenizer", "data/mail", "--force")
    Path("mixture.toml").write_text(RECIPE)
    print(headway("data", "mix", "mixture.toml"))

    run = json.loads(headway("train", "mixture.toml", "--workers", "1", "--json"))["run"]
    events = [event for record in read_run(RunFolder(Path("runs") / run)) for event in record.events]
    for event in events:
        if event["kind"] == "eval":
            losses = ", ".join(f"{name} {loss:.3f}" for name, loss in event["losses"].items())
            epochs = ", ".join(f"{name} {epochs:.3f}" for name, epochs in event["epochs"].items())
            print(f"step {event['step']}: loss {event['loss']:.3f} ({losses}), epochs {epochs}")


if __name__ == "__main__":
    main()
