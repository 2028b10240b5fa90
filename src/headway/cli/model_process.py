"""What verbs that run a model in another process share: which model, and how that process ended."""

from pathlib import Path
from typing import IO, Any

from headway.errors import HeadwayError, UsageError, WorkerError
from headway.state import find_checkpoint, list_checkpoints
from headway.track import find_run, parse_ref, runs_root


def model_of(model: str, runs: Path | None) -> tuple[dict[str, str], str]:
    """Return where a model's files are, for the process that loads it, and its name."""
    folder = Path(model)
    if (folder / "config.json").is_file():
        return {"folder": str(folder)}, folder.resolve().name
    if folder.is_dir() and not (folder / "recipe.json").is_file() and ("/" in model or model.startswith(".")):
        raise UsageError(f"{model} has no config.json", hint="name a Hugging Face folder or a run")
    ref, step = parse_ref(model)
    run = find_run(runs_root(runs), ref)
    checkpoint = find_checkpoint(run.checkpoints, step)
    used = next(entry.step for entry in list_checkpoints(run.checkpoints) if entry.path == checkpoint)
    return {"run": str(run.path), "checkpoint": str(checkpoint)}, f"{run.name}@{used}"


def end_of(name: str, status: int, reported: dict[str, Any] | None, log: IO[bytes]) -> None:
    """Raise the error that a process reported, or that it failed without a word."""
    if reported is not None:
        error = HeadwayError(reported["error"], hint=reported.get("hint"))
        error.exit_status = status
        raise error
    if status != 0:
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise WorkerError(f"the {name} process failed with {how}: {last[0]}")
