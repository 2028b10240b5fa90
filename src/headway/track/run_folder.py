"""The folder of a run, and the folder of all runs.

runs/<run>/
  recipe.json  plan.json  environment.json
  events/       one file per process and attempt
  checkpoints/  step-<n>/
  logs/         <attempt>-rank-<n>.log, <attempt>-agent.log
  lock          held by the agent while the run is alive
runs/.failed/<run>/  a run that failed before its first step: its name is free for the next try
"""

import os
import secrets
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headway.track.access import PRIVATE, new_run_mode

FAILED = ".failed"
"""Folder, beside all runs, of those that failed before their first step."""


class _PathInRun:
    """Attribute of RunFolder: a path in the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunFolder", _: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the paths in it."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    recipe_file = _PathInRun("recipe.json")
    """The resolved recipe."""
    plan_file = _PathInRun("plan.json")
    """The plan it started with."""
    environment_file = _PathInRun("environment.json")
    """What bitwise reproducibility depends on: versions, chip, threads."""
    data_file = _PathInRun("data.json")
    """The manifest of its dataset."""
    tokenizer_file = _PathInRun("tokenizer.json")
    """The tokenizer of its dataset."""
    companions = _PathInRun("huggingface")
    """Other files of the Hugging Face folder its weights came from; absent for other runs."""
    events = _PathInRun("events")
    """Its event records."""
    checkpoints = _PathInRun("checkpoints")
    """Its checkpoints."""
    initial = _PathInRun("initial")
    """The initial weights of a custom model class, as a checkpoint of step 0, with facts about the class."""
    labels_file = _PathInRun("labels.json")
    """Tags, a note, and whether it is archived."""
    evals = _PathInRun("evals")
    """Evaluations of its checkpoints."""
    samples = _PathInRun("samples")
    """Images or video that a diffusion model generated during training."""
    logs = _PathInRun("logs")
    """Output of its processes."""
    logged = _PathInRun("logged")
    """Images, audio, tables and artifacts that code of the user's own logged."""
    trackers = _PathInRun("trackers")
    """How far other trackers have received its events."""
    id_file = _PathInRun("id")
    """Its unique id."""
    key_file = _PathInRun("key")
    """The key that its agents authenticate each other with."""
    leases = _PathInRun("leases")
    """Leader leases: the current leader and its predecessors."""
    suspects_file = _PathInRun("suspects")
    """Machines excluded from it."""
    lock_file = _PathInRun("lock")
    """Locked by the process that runs it."""
    faults = _PathInRun("faults")
    """Injected faults that have fired, and when."""
    stacks = _PathInRun("stacks")
    """Stack dumps of its workers, from hangs and requests."""
    rendezvous = _PathInRun("rendezvous")
    """Rendezvous files of its workers."""

    def command(self, verb: str, *words: str) -> str:
        """Return the command of a verb about this run, to be copied from the terminal."""
        if self.path.parent.name == FAILED:
            return command(self.path.parent.parent, verb, f"{FAILED}/{self.name}", *words)
        return command(self.path.parent, verb, self.name, *words)


def command(root: Path, *words: str) -> str:
    """Return a headway command to print, with --runs unless a shell here finds this folder of runs without it."""
    found_anyway = root.absolute() == runs_root().absolute()
    return " ".join(["headway", *words, *([] if found_anyway else ["--runs", shlex.quote(str(root))])])


def run_id(run: RunFolder) -> str:
    """Return a run's unique id, which stays the same in copies of its folder; created on first use."""
    try:
        with run.id_file.open("x") as file:
            file.write(secrets.token_hex(8))
    except FileExistsError:
        pass
    return run.id_file.read_text().strip()


def runs_root(option: Path | None = None) -> Path:
    """Return the folder of all runs: the option given, else $HEADWAY_RUNS, else ./runs."""
    return option or Path(os.environ.get("HEADWAY_RUNS") or "runs")


def create_private_folder(folder: Path) -> None:
    """Create the folder of all runs, or one beside them, as private as they are; an existing one stays as it is."""
    mode = new_run_mode()
    with suppress(OSError):  # an error is reported by whoever writes into it
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(PRIVATE)
        folder.chmod(mode)  # whatever the umask is
