"""Questions and answers in a JSONL file: the model reads the questions, but they are masked in the loss.

Writes a file of sums, builds a dataset from it with the question as the prompt, trains a few steps, and shows how many
tokens of each step were trained on.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

SUMS = Path("data/sums.jsonl")
DATA = "data/sums"
RECIPE = """
name = "sums"

[model]
layers = 2
dim = 64

[data]
path = "data/sums"
seq = 64

[train]
steps = 12
batch = 8
lr = 3e-3
"""


def headway(*arguments: str) -> str:
    """Run one command and return what it printed."""
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Write the file, build the dataset, train, print the result."""
    generator = random.Random(1)
    pairs = [(generator.randrange(100), generator.randrange(100)) for _ in range(2000)]
    SUMS.parent.mkdir(exist_ok=True)
    SUMS.write_text("".join(json.dumps({"ask": f"{a} + {b} = ", "say": str(a + b)}) + "\n" for a, b in pairs))
    fields = ("--prompt-field", "ask", "--text-field", "say", "--vocab-size", "300", "--force")
    print(headway("data", "build", DATA, str(SUMS), *fields))

    Path("sums.toml").write_text(RECIPE)
    run = json.loads(headway("train", "sums.toml", "--workers", "1", "--json"))["run"]
    trained = json.loads(headway("metrics", run, "--key", "tokens", "--json"))["values"]
    print(f"{run}: of {8 * 64} tokens in a step, {trained[0]:.0f} were trained on in the first; the rest are prompts")
    print(headway("metrics", run, "--key", "loss"), end="")


if __name__ == "__main__":
    main()
