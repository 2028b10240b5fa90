"""A run without TOML and without the command line: the same recipe, agent and ledger, called from Python."""

import json
import sys
from pathlib import Path

from headway.agent import new_run, supervise_run
from headway.data import BuildOptions, build_dataset
from headway.recipe import Checkpoint, Data, Model, Recipe, Train, to_toml
from headway.track import account, largest_overhead, read_metric, read_run


def main() -> None:
    """Build data, train with two workers, read the record back."""
    text = Path(json.__file__).parent / "*.py"  # a little text that every Python has
    built = build_dataset("data/json-package", [text], BuildOptions(vocab_size=512), force=True)
    print(f"{built.manifest.tokens:,} tokens, version {built.manifest.version}")

    recipe = Recipe(
        name="from-python",
        model=Model(layers=2, dim=64, heads=4),
        data=Data(path=str(built.path), version=built.manifest.version, seq=64),
        train=Train(steps=20, batch=8, lr=3e-3, device="cpu"),
        checkpoint=Checkpoint(every_steps=10),
    )
    print(to_toml(recipe).split("[data]")[0])  # the same recipe as a file

    # new_run checks everything and creates the run's folder; supervise_run runs it to its end in this process.
    attempt = new_run(recipe, Path("runs"), workers=2)
    outcome = supervise_run(attempt)
    print(f"{attempt.run.name}: {outcome.state}, {outcome.reason}")
    if outcome.state != "finished":
        sys.exit(outcome.exit_status)

    steps, losses = read_metric(attempt.folder, "loss")
    print(f"loss {losses[0]:.3f} at step {steps[0]}, {losses[-1]:.3f} at step {steps[-1]}")

    ledger = account(read_run(attempt.folder))
    assert sum(ledger.accounts.values()) == ledger.total_ns  # to the nanosecond
    for name, ns in ledger.accounts.items():
        print(f"  {name:18} {ns / 1e9:8.3f} s {ledger.share(name):7.1%}")
    print(largest_overhead(ledger))


if __name__ == "__main__":
    main()
