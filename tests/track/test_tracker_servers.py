"""Runs sent to a real MLflow server, and to Weights & Biases' offline files, read back by their own libraries."""

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Lab
from eventually import eventually
from headway.recipe import Recipe
from headway.track import RunFolder, read_metrics
from own_environment import python_with

MLFLOW, WANDB = "mlflow==3.17.2", "wandb==0.31.0"

READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("headway tests")
runs = client.search_runs([experiment.experiment_id])
out = []
for run in runs:
    keys = sorted(run.data.metrics)
    history = {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in keys}
    files = [item.path for kind in client.list_artifacts(run.info.run_id, "logged")
             for item in client.list_artifacts(run.info.run_id, kind.path)]
    out.append({"name": run.info.run_name, "status": run.info.status, "params": run.data.params,
                "metrics": history, "files": files})
print(json.dumps(out))
"""

READ_WANDB = """
import json, sys
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore
store = DataStore()
store.open_for_scan(sys.argv[1])
rows, config, files = [], {}, []
while (data := store.scan_data()) is not None:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = record.history.item
        rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    if kind == "run":
        config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    if kind == "files":
        files += [file.path for file in record.files.files]
print(json.dumps({"rows": rows, "config": config, "files": files}))
"""


def send(python: Path, run: RunFolder, limit_s: int = 300) -> str:
    """Send a finished run, as its agent would have it sent; return what the process printed."""
    ended = subprocess.run(
        [str(python), "-m", "headway.track.trackers", str(run.path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
        env=os.environ | {"WANDB_API_KEY": ""},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout + ended.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """An MLflow server on loopback."""
    python = python_with(MLFLOW)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
         "--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}",
         "--artifacts-destination", str(tmp_path / "art")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        eventually(healthy)
        yield python, url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_mlflow_server_has_every_metric_parameter_and_file(
    server: tuple[Path, str], lab: Lab, recipe: Callable[..., Recipe]
) -> None:
    python, url = server
    section = {"mlflow": {"uri": url, "experiment": "headway tests"}}
    lived = lab.train(recipe({"train.steps": 4, "callbacks": [{"class": "own_callbacks:Logging"}]}))
    lived.run.recipe_file.write_text(json.dumps(json.loads(lived.run.recipe_file.read_text()) | {"track": section}))
    send(python, lived.run)
    send(python, lived.run)  # nothing is sent twice
    read = subprocess.run([str(python), "-c", READ_MLFLOW, url], check=True, capture_output=True, text=True)
    (run,) = json.loads(read.stdout)
    assert (run["name"], run["status"]) == (lived.run.name, "FINISHED")
    assert run["params"]["train.steps"] == "4"
    metrics = read_metrics(lived.run)
    for key in ("loss", "grad_norm", "lr", "own/double"):
        assert [step for step, _ in run["metrics"][key]] == metrics[key][0].tolist()
        assert [value for _, value in run["metrics"][key]] == pytest.approx(metrics[key][1].tolist())
    assert [Path(path).suffix for path in run["files"]] == [".png"]


@pytest.mark.slow
def test_wandb_offline_files_have_every_metric_and_image(lab: Lab, recipe: Callable[..., Recipe]) -> None:
    python = python_with(WANDB)
    section = {"wandb": {"project": "headway-tests", "mode": "offline"}}
    lived = lab.train(recipe({"train.steps": 4, "callbacks": [{"class": "own_callbacks:Logging"}]}))
    lived.run.recipe_file.write_text(json.dumps(json.loads(lived.run.recipe_file.read_text()) | {"track": section}))
    send(python, lived.run)
    (file,) = (lived.run.trackers / "wandb").glob("wandb/offline-run-*/*.wandb")
    read = subprocess.run([str(python), "-c", READ_WANDB, str(file)], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(read.stdout)
    metrics = read_metrics(lived.run)
    for key in ("loss", "own/double"):
        rows = [(row["step"], row[key]) for row in found["rows"] if key in row]
        assert [step for step, _ in rows] == metrics[key][0].tolist()
        assert [value for _, value in rows] == pytest.approx(metrics[key][1].tolist())
    (image,) = (row["grid"] for row in found["rows"] if "grid" in row or "grid/path" in row)
    assert image["_type"] == "image-file"
    assert found["config"]["train"]["steps"] == 4
