"""Weights & Biases, through its library: online, or offline into files that `wandb sync` sends later."""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.recipe.track import Wandb
from headway.track.trackers.base import RunFacts, Scalars, Sent, State, Tracker

STEP = "step"
"""The metric that others are drawn over: W&B's own step cannot go back when a run resumes from a checkpoint."""


class WandbTracker(Tracker):
    """Logs numbers, images, audio, tables and artifacts of one W&B run."""

    name = "wandb"

    def __init__(self, settings: Wandb) -> None:
        self._settings = settings

    def open(self, run: RunFacts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Create the run, or go on with it."""
        wandb: Any = importlib.import_module("wandb")  # it may not be installed
        folder = run.folder / "trackers" / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_stats=True
        )
        self._wandb = wandb
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=run.name,
            id=run.id,
            resume="allow",
            mode=self._settings.mode,
            dir=str(folder),
            config=run.recipe.model_dump(mode="json"),
            settings=quiet,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return {**known, "id": run.id}

    def send(self, batch: Sequence[Sent]) -> None:
        """Log a batch; the library has a queue and a process of its own."""
        for item in batch:
            if isinstance(item, Scalars):
                self._run.log({**item.values, STEP: item.step, "wall": item.wall})
            elif isinstance(item, State):
                self._run.summary["state"] = item.text or item.what
            else:
                self._send_file(item)

    def _send_file(self, item: Any) -> None:
        wandb, (_, file) = self._wandb, item
        match file.kind:
            case "image":
                value = wandb.Image(str(file.path), caption=file.caption or None)
            case "audio":
                value = wandb.Audio(str(file.path), caption=file.caption or None)
            case "table":
                table = json.loads(file.path.read_bytes())
                value = wandb.Table(columns=table["columns"], data=table["rows"])
            case _:
                artifact = wandb.Artifact("".join(c if c.isalnum() else "-" for c in file.key), type="file")
                artifact.add_file(str(file.path), name=file.caption.rpartition("/")[2] or None)
                self._run.log_artifact(artifact)
                return
        self._run.log({file.key: value, STEP: file.step})

    def close(self, outcome: str | None) -> None:
        """End the run as it ended."""
        self._run.finish(exit_code=0 if outcome in ("finished", "stopped") else 1)
