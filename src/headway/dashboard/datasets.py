"""Datasets: their versions, who trained on them, and samples with what the loss counts marked."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.dashboard.recorded import RecordedRuns, read_json
from headway.dashboard.sheets import clip_page
from headway.data import open_dataset
from headway.data.chat_samples import ROLES
from headway.data.manifest import MANIFEST, DatasetManifest, read_manifest
from headway.data.media.manifest import is_media, read_media_manifest
from headway.data.prompts import PromptReader
from headway.data.shards import Dataset
from headway.errors import HeadwayError, UsageError
from headway.track import list_runs

SHOWN = 6
TOKENS = 512
"""Of a sample, at most."""


def dataset_list(recorded: RecordedRuns, data: Path) -> list[dict[str, Any]]:
    """Return the datasets of a folder and those that recorded runs name, each with its runs."""
    rows = []
    for key, (folder, runs) in _folders(recorded, data).items():
        row: dict[str, Any] = {"id": key, "path": _shown(folder), "runs": sorted(runs)}
        try:
            rows.append(row | _facts(read_manifest(folder)))
        except (HeadwayError, OSError) as error:
            rows.append(row | (_media_facts(folder) or {"problem": str(error)}))
    return sorted(rows, key=lambda row: (-len(row["runs"]), row["path"]))


def _media_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a dataset of images or video; None for another folder."""
    try:
        manifest = read_media_manifest(folder)
    except (HeadwayError, OSError):
        return None
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "documents": manifest.clips,
        "bytes": manifest.bytes,
        "media": True,
        "seconds": manifest.duration_s if manifest.kind == "video" else None,
    }


def folder_of(recorded: RecordedRuns, data: Path, key: str) -> Path:
    """Return the folder of a dataset by the name that addresses use."""
    folders = _folders(recorded, data)
    if key not in folders:
        raise UsageError(f"no dataset {key!r}")
    return folders[key][0]


def dataset_samples(recorded: RecordedRuns, data: Path, key: str, first: int) -> dict[str, Any]:
    """Return some documents of a dataset, cut into pieces that the loss counts or not; or some of its clips."""
    folder = folder_of(recorded, data, key)
    if is_media(folder):
        return {"path": _shown(folder), **clip_page(folder, first)}
    dataset = open_dataset(folder, verify="sizes")
    total = dataset.manifest.documents
    numbers = range(first, min(first + SHOWN, total))
    return {
        "path": _shown(folder),
        "count": total,
        "first": first,
        "samples": [_sample(dataset, number) for number in numbers],
    }


def _folders(recorded: RecordedRuns, data: Path) -> dict[str, tuple[Path, set[str]]]:
    """Return the known datasets by a name for addresses, so that no client names a path."""
    folders: dict[str, tuple[Path, set[str]]] = {}
    here = [path.parent for path in sorted(data.glob(f"*/{MANIFEST}"))] if data.is_dir() else []
    named = [
        (folder, run.name) for run in list_runs(recorded.root) for folder in _of_recipe(read_json(run.recipe_file))
    ]
    for folder, run_name in [*((folder, None) for folder in here), *named]:
        absolute = folder.absolute()
        if run_name is not None and not (absolute / MANIFEST).is_file():
            continue
        key = hashlib.sha256(str(absolute).encode()).hexdigest()[:12]
        runs = folders.setdefault(key, (absolute, set()))[1]
        if run_name is not None:
            runs.add(run_name)
    return folders


def _of_recipe(recipe: dict[str, Any]) -> Iterator[Path]:
    data = recipe.get("data")
    if not isinstance(data, dict):
        return
    parts = data.get("mixture")
    sections = [data, *(parts.values() if isinstance(parts, dict) else ())]
    for section in sections:
        if isinstance(section, dict) and isinstance(path := section.get("path"), str):
            yield Path(path)


def _shown(folder: Path) -> str:
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def _facts(manifest: DatasetManifest) -> dict[str, Any]:
    chat = manifest.chat
    return {
        "version": manifest.version,
        "kind": "text" if chat is None else chat.kind,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "trained_tokens": None if chat is None else chat.trained_tokens,
        "vocab_size": manifest.vocab_size,
        "shards": len(manifest.shards()),
        "bytes": sum(file.bytes for file in manifest.all_files()),
    }


def _sample(dataset: Dataset, number: int) -> dict[str, Any]:
    document = dataset.document(number)
    tokenizer = dataset.tokenizer(special_tokens=True)
    ids = document.ids.tolist()
    pieces = []
    for start, end, role, trained in _spans(dataset, number, len(ids), document.prompt):
        if start < TOKENS:
            text = tokenizer.decode(ids[start : min(end, TOKENS)])
            pieces.append({"text": text, "role": role, "trained": trained, "tokens": end - start})
    sample: dict[str, Any] = {"document": number, "tokens": len(ids), "cut": len(ids) > TOKENS, "pieces": pieces}
    return sample if dataset.kind != "prompts" else sample | {"fields": PromptReader(dataset).prompt(number).fields}


def _spans(dataset: Dataset, number: int, length: int, prompt: int) -> Iterator[tuple[int, int, str | None, bool]]:
    """Yield (start, end, role, whether the loss counts it) of the pieces of a document, without gaps."""
    if not dataset.spans:
        if prompt:
            yield 0, prompt, "prompt", False
        if prompt < length:
            yield prompt, length, None, dataset.kind != "prompts"
        return
    shard = 0
    while number >= len(dataset.samples[shard]):
        number -= len(dataset.samples[shard])
        shard += 1
    ends = dataset.samples[shard]["spans_end"]
    first, last = int(ends[number - 1]) if number else 0, int(ends[number])
    at = 0
    for start, end, role, trained in dataset.spans[shard][first:last].tolist():
        if start > at:
            yield at, start, None, False
        yield start, end, ROLES[role] if role < len(ROLES) else "other", bool(trained)
        at = end
    if at < length:
        yield at, length, None, False
