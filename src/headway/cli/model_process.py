"""What verbs that run a model in another process share: which model, and how that process ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from headway.errors import HeadwayError, UsageError, WorkerError
from headway.state import find_checkpoint, list_checkpoints
from headway.state.address import is_in_store
from headway.state.peft import is_adapter_folder
from headway.track import find_run, runs_root, split_ref
from headway.track.hub import local_model


def model_of(model: str, runs: Path | None) -> tuple[dict[str, str], str]:
    """Return where a model's files are, for the process that loads it, and its name."""
    model = local_model(model)
    if is_in_store(model):
        return {"store": model}, model.rstrip("/").rpartition("/")[2]
    folder = Path(model)
    if (folder / "config.json").is_file():
        return {"folder": str(folder)}, folder.resolve().name
    if folder.is_dir() and not (folder / "recipe.json").is_file() and ("/" in model or model.startswith(".")):
        raise UsageError(f"{model} has no config.json", hint="name a Hugging Face folder or a run")
    if folder.suffix == ".toml":
        raise UsageError(
            f"{model} is a recipe, not a model", hint=f"train it: headway train {model}; then name the run"
        )
    if folder.is_file():
        raise UsageError(f"{model} is a file, not a model", hint="name a Hugging Face folder or a run")
    ref, step = split_ref(runs_root(runs), model)
    run = find_run(runs_root(runs), ref)
    checkpoint = find_checkpoint(run.checkpoints, step)
    used = next(entry.step for entry in list_checkpoints(run.checkpoints) if entry.path == checkpoint)
    return {"run": str(run.path), "checkpoint": str(checkpoint)}, f"{run.name}@{used}"


def adapters_of(named: list[str], model: str, runs: Path | None) -> dict[str, str]:
    """Return where adapters' files are, by name, from NAME=PATH: a folder of PEFT's, or a run's checkpoint."""
    adapters = dict[str, str]()
    for text in named:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UsageError(f"--lora {text} is not NAME=PATH", hint="for example --lora sql=runs/sql-adapter")
        if name in adapters or name == model:
            raise UsageError(f"--lora {text}: the name {name!r} is taken", hint="give each adapter a name of its own")
        path = local_model(path)
        if is_adapter_folder(Path(path)):
            adapters[name] = path
            continue
        if Path(path).is_dir() and not (Path(path) / "recipe.json").is_file():
            raise UsageError(f"--lora {text}: {path} has no adapter_config.json", hint="name PEFT's folder, or a run")
        ref, step = split_ref(runs_root(runs), path)
        try:
            adapters[name] = str(find_checkpoint(find_run(runs_root(runs), ref).checkpoints, step))
        except HeadwayError as error:
            raise UsageError(
                f"--lora {text}: {error.message}", hint="name PEFT's folder, or a run with adapters: headway runs"
            ) from None
    return adapters


@contextlib.contextmanager
def model_process(module: str, name: str, request: dict[str, Any], **options: Any) -> Iterator["ModelProcess"]:
    """Start a module with a request on its stdin; at the end of the block, end it and raise the error it reported.

    `name` says in messages what it is.
    """
    # Files, not pipes, for input and log: a full pipe would block while we read the output.
    with tempfile.TemporaryFile() as request_file, tempfile.TemporaryFile() as log:
        request_file.write(json.dumps(request).encode())
        request_file.seek(0)
        command = [sys.executable, "-m", module, str(os.getpid())]  # it ends with this process
        process = subprocess.Popen(command, stdin=request_file, stdout=subprocess.PIPE, stderr=log, **options)
        running = ModelProcess(process)
        try:
            yield running
            process.wait()
        finally:
            process.kill()  # unless it has ended
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if running.ended and process.returncode == -signal.SIGTERM:
            raise KeyboardInterrupt  # before it could say that it ends
        _raise_if_failed(name, process.returncode, running.error, log)


class ModelProcess:
    """A process that writes JSON lines."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.error: dict[str, Any] | None = None
        """What it reported as its error."""
        self.ended = 0
        """How often it was told to end."""

    def end(self) -> None:
        """Tell it to end in order; the second time, at once."""
        self.ended += 1
        self.process.terminate()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield its messages until it ends; an error is kept."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if "error" in message:
                self.error = message
            else:
                yield message


def _raise_if_failed(name: str, status: int, reported: dict[str, Any] | None, log: IO[bytes]) -> None:
    if reported is not None:
        error = HeadwayError(reported["error"], hint=reported.get("hint"))
        error.exit_status = status
        raise error
    if status != 0:
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise WorkerError(f"the {name} process failed with {how}: {last[0]}")
