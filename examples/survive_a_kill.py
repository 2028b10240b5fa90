"""A worker is killed in the middle of a step; the run resumes from memory and ends with the bits of an undisturbed one.

Then the machine is "lost": the run's checkpoints are removed, and it resumes from its object store, here a folder.
"""

import json
import shutil
from pathlib import Path

from headway.agent import new_run, resume_run, supervise_run
from headway.data import BuildOptions, build_dataset
from headway.recipe import Checkpoint, Data, FaultPlan, Model, Recipe, Store, Train
from headway.track import account, compare_runs, read_run


def main() -> None:
    """Train one recipe twice: once undisturbed, once with a killed worker."""
    text = Path(json.__file__).parent / "*.py"  # a little text that every Python has
    built = build_dataset("data/json-package", [text], BuildOptions(vocab_size=512), force=True)
    recipe = Recipe(
        name="survivor",
        model=Model(layers=2, dim=64, heads=4),
        data=Data(path=str(built.path), version=built.manifest.version, seq=64),
        train=Train(steps=20, batch=8, lr=3e-3, device="cpu"),
        checkpoint=Checkpoint(
            every_steps=10,  # to disk
            memory_every_steps=1,  # to the agent's memory
            store=Store(url=Path("bucket").absolute().as_uri(), every_steps=10),  # s3://bucket/prefix works as well
        ),
    )
    undisturbed = new_run(recipe, Path("runs"), workers=2)
    assert supervise_run(undisturbed).state == "finished"

    attempt = new_run(recipe, Path("runs"), workers=2)
    killed = attempt.model_copy(update={"faults": FaultPlan().kill(step=15, rank=1, point="compute")})
    print(f"{attempt.run.name}: {supervise_run(killed).reason}")
    for incident in account(read_run(attempt.folder)).incidents:
        print(f"  {incident.text}")
    print(f"compared with the undisturbed run: {compare_runs(attempt.folder, undisturbed.folder).sentence}")

    shutil.rmtree(attempt.folder.checkpoints)
    resumed = resume_run(attempt.folder, ["train.steps=24"])
    print("\n".join(resumed.notes))
    print(f"{attempt.run.name}: {supervise_run(resumed).state} at step 24")


if __name__ == "__main__":
    main()
