"""Samples of a run: pictures, sound, video and texts in its folder, and the answers of its evaluations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.dashboard.run_page import check_inside
from headway.errors import HeadwayError, RunError
from headway.track import RunFolder, latest_evaluations, read_evaluation_rows

MEDIA = {
    ".png": ("image", "image/png"),
    ".jpg": ("image", "image/jpeg"),
    ".jpeg": ("image", "image/jpeg"),
    ".webp": ("image", "image/webp"),
    ".gif": ("image", "image/gif"),
    ".wav": ("audio", "audio/wav"),
    ".mp3": ("audio", "audio/mpeg"),
    ".flac": ("audio", "audio/flac"),
    ".ogg": ("audio", "audio/ogg"),
    ".mp4": ("video", "video/mp4"),
    ".webm": ("video", "video/webm"),
    ".txt": ("text", "text/plain; charset=utf-8"),
    ".md": ("text", "text/plain; charset=utf-8"),
}
"""Kinds of files that are shown, and the type each is sent as; SVG and HTML, which may have scripts, are not among
them."""
OTHER = {"events", "checkpoints", "logs", "stacks", "rendezvous", "initial", "faults", "leases", "huggingface", "evals"}
"""Folders of a run that have no samples."""
MOST = 500
DEPTH = 4
TEXT_BYTES = 64 << 10
ROWS = 24


def sample_files(run: RunFolder) -> list[dict[str, Any]]:
    """Return the samples in a run's folder, newest first."""
    entries = []
    for path in _walk(run.path, DEPTH):
        kind = MEDIA.get(path.suffix.lower())
        try:
            status = path.stat()
        except OSError:
            continue
        if kind is not None:
            relative = str(path.relative_to(run.path))
            entries.append({"path": relative, "kind": kind[0], "modified": status.st_mtime, "bytes": status.st_size})
        if len(entries) >= MOST:
            break
    return sorted(entries, key=lambda entry: (-entry["modified"], entry["path"]))


def _walk(folder: Path, depth: int, top: bool = True) -> Iterator[Path]:
    """Yield the files below the folders of a run that may have samples; links are not followed."""
    try:
        children = sorted(folder.iterdir())
    except OSError:
        return
    for child in children:
        if child.is_symlink() or child.name.startswith(".") or (top and child.name in OTHER):
            continue
        if child.is_dir():
            if depth > 1:
                yield from _walk(child, depth - 1, top=False)
        elif not top:
            yield child


def sample_path(run: RunFolder, relative: str) -> tuple[Path, str]:
    """Return a sample's file and the type that it is sent as; raise RunError for anything else in the folder."""
    path = run.path / relative
    parts = Path(relative).parts
    usable = parts and not Path(relative).is_absolute() and not any(part.startswith(".") for part in parts)
    if usable and parts[0] not in OTHER and len(parts) > 1 and (kind := MEDIA.get(path.suffix.lower())):
        try:
            check_inside(path, run)
            if path.is_file():
                return path, kind[1]
        except (HeadwayError, ValueError, OSError):
            pass
    raise RunError(f"run {run.name} has no sample {relative!r}", usage=True)


def sample_text(path: Path) -> dict[str, Any]:
    """Return the beginning of a text."""
    with path.open("rb") as file:
        data = file.read(TEXT_BYTES + 1)
    return {"text": data[:TEXT_BYTES].decode(errors="replace"), "cut": len(data) > TEXT_BYTES}


def evaluation_rows(run: RunFolder, key: str, step: int | None) -> list[dict[str, Any]]:
    """Return questions of an evaluation with what the model answered."""
    for evaluation in latest_evaluations(run):
        if evaluation.key == key and evaluation.step == step:
            return read_evaluation_rows(run, evaluation)[:ROWS]
    raise RunError(f"run {run.name} has no evaluation {key!r} at step {step}", usage=True)
