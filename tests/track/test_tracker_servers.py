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
from wandb_endpoint import wandb_endpoint

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

# The file is a log of records in blocks of 32 kB, as LevelDB writes it; a record is a message of their protobuf.
READ_WANDB = """
import json, sys
from wandb.proto import wandb_internal_pb2
data, at, whole = open(sys.argv[1], "rb").read(), 7, b""
rows, config, files = [], {}, []
while at + 7 <= len(data):
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    whole += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind not in (1, 4):
        continue
    record = wandb_internal_pb2.Record()
    record.ParseFromString(whole)
    whole = b""
    name = record.WhichOneof("record_type")
    if name == "history":
        items = record.history.item
        rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    if name == "run":
        config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
print(json.dumps({"rows": rows, "config": config}))
"""


def send(python: Path, run: RunFolder, limit_s: int = 300, **variables: str) -> str:
    """Send a finished run, as its agent would have it sent; return what the process printed."""
    ended = subprocess.run(
        [str(python), "-m", "headway.track.trackers", str(run.path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
        env=os.environ | {"WANDB_API_KEY": ""} | variables,
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
    images = [row for row in found["rows"] if "grid/_type" in row]
    assert [(row["grid/_type"], row["step"]) for row in images] == [("image-file", 2)]
    assert found["config"]["train"]["steps"] == 4


@pytest.mark.slow
def test_wandb_online_has_every_metric_and_image_and_the_key_stays_out_of_the_run(
    lab: Lab, recipe: Callable[..., Recipe]
) -> None:
    python, key = python_with(WANDB), "local-" + "0123456789" * 4
    section = {"wandb": {"project": "headway-tests"}}
    lived = lab.train(recipe({"train.steps": 4, "callbacks": [{"class": "own_callbacks:Logging"}]}))
    lived.run.recipe_file.write_text(json.dumps(json.loads(lived.run.recipe_file.read_text()) | {"track": section}))
    with wandb_endpoint() as endpoint:
        printed = [send(python, lived.run, WANDB_BASE_URL=endpoint.url, WANDB_API_KEY=key) for _ in range(2)]
    metrics = read_metrics(lived.run)
    for name in ("loss", "grad_norm", "own/double"):
        rows = [(row["step"], row[name]) for row in endpoint.history if name in row]
        assert [step for step, _ in rows] == metrics[name][0].tolist()
        assert [value for _, value in rows] == pytest.approx(metrics[name][1].tolist())
    (image,) = [row["grid"] for row in endpoint.history if "grid" in row]
    assert endpoint.uploads[image["path"]].startswith(b"\x89PNG")
    assert (endpoint.runs[0]["project"], endpoint.runs[0]["displayName"]) == ("headway-tests", lived.run.name)
    assert json.loads(endpoint.runs[0]["config"])["train"]["value"]["steps"] == 4
    assert endpoint.exit_codes[0] == 0
    assert any(header.startswith("Basic ") for header in endpoint.keys), "with the key of the environment"
    files = [path for path in lived.run.path.rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()]
    assert key not in "".join(printed)
