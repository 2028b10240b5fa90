"""Models: the checkpoints of runs, with how they scored."""

from functools import partial
from typing import Any

from headway.dashboard.cached import files_signature
from headway.dashboard.recorded import RecordedRuns, read_json
from headway.dashboard.run_page import parent_of
from headway.state import list_checkpoints
from headway.track import RunFolder, latest_evaluations, list_runs


def model_list(recorded: RecordedRuns) -> list[dict[str, Any]]:
    """Return the runs that have checkpoints, with these and what each is for."""
    rows = []
    for run in list_runs(recorded.root):
        signature = (*files_signature(run.checkpoints), *files_signature(run.evals))
        checkpoints = recorded.cache.get((run.path, "checkpoints"), signature, partial(_checkpoints, run))
        if checkpoints:
            recipe = read_json(run.recipe_file)
            rows.append({
                "run": run.name,
                "parent": parent_of(run, recipe, recorded),
                "objective": (recipe.get("objective") or {}).get("kind"),
                "adapters": isinstance(recipe.get("lora"), dict),
                "checkpoints": checkpoints,
                "commands": {verb: run.command(verb) for verb in ("serve", "sample", "checkpoint export")},
            })  # fmt: skip
    return rows


def _checkpoints(run: RunFolder) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, newest first."""
    scores: dict[int | None, list[dict[str, Any]]] = {}
    for evaluation in latest_evaluations(run):
        for metric in evaluation.metrics[:1]:
            scores.setdefault(evaluation.step, []).append({"task": evaluation.key, **metric.model_dump()})
    rows = []
    for entry in reversed(list_checkpoints(run.checkpoints)):
        manifest = read_json(entry.path / "manifest.json")
        tensors, files = manifest.get("tensors"), manifest.get("files")
        rows.append({
            "step": entry.step,
            "digest": manifest.get("digest"),
            "bytes": sum(file.get("bytes", 0) for file in files.values()) if isinstance(files, dict) else None,
            "tensors": len(tensors) if isinstance(tensors, dict) else None,
            "saved": entry.path.stat().st_mtime,
            "scores": scores.get(entry.step, []),
        })  # fmt: skip
    return rows
