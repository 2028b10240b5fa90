"""MLflow, through its client."""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.recipe.load import leaves
from headway.recipe.track import MLflow
from headway.track.trackers.base import RunFacts, Scalars, Sent, State, Tracker

METRICS, PARAMS, LONGEST = 1000, 100, 500
"""Most metrics and parameters per request, and characters of a parameter."""
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflowTracker(Tracker):
    """Logs the recipe as parameters, numbers as metrics and files as artifacts of one MLflow run."""

    name = "mlflow"

    def __init__(self, settings: MLflow) -> None:
        self._settings = settings

    def open(self, run: RunFacts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Create the run, or go on with the one that is known."""
        for name, value in (("TIMEOUT", "10"), ("MAX_RETRIES", "1")):  # errors are retried here
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        self._entities: Any = importlib.import_module("mlflow.entities")  # it may not be installed
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self._settings.uri)
        if isinstance(known.get("run_id"), str):
            self._run_id: str = known["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
            return dict(known)
        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        tags = {"headway.run_id": run.id}
        self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        params = [self._entities.Param(key, str(value)[:LONGEST]) for key, value in leaves(run.recipe.model_dump())]
        for part in _parts(params, PARAMS):
            self._client.log_batch(self._run_id, params=part)
        return {**known, "run_id": self._run_id}

    def send(self, batch: Sequence[Sent]) -> None:
        """Log a batch."""
        metric, metrics, latest = self._entities.Metric, [], None
        for item in batch:
            if isinstance(item, Scalars):
                at_ms = int(item.wall * 1000)
                metrics += [metric(_key(key), value, at_ms, item.step) for key, value in item.values.items()]
            elif isinstance(item, State):
                latest = item if item.what in _STATES or item.what == "started" else latest
            else:
                self._client.log_artifact(self._run_id, str(item[1].path), f"logged/{item[1].kind}")
        for part in _parts(metrics, METRICS):
            self._client.log_batch(self._run_id, metrics=part)
        if latest is not None:
            self._client.set_tag(self._run_id, "headway.state", latest.text or latest.what)

    def close(self, outcome: str | None) -> None:
        """End the run as it ended."""
        if outcome in _STATES:
            self._client.set_terminated(self._run_id, _STATES[outcome])


def _key(key: str) -> str:
    """Return a key with the characters that MLflow allows."""
    return key.replace("@", "_")


def _parts(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield list(items[first : first + size])
