"""`headway model tag | ls | note | remove`: names of checkpoints, accepted wherever a model is."""

import time
from pathlib import Path

from headway.cli.text import columns, plural, print_json, shortened
from headway.errors import UsageError
from headway.state import find_checkpoint, open_checkpoint
from headway.track import find_run, split_ref
from headway.track.registry import RegisteredModel, add_note, as_document, is_gone, read_registry, remove_name, tag


def tag_checkpoint(root: Path, model: str, name: str, note: str | None, json: bool) -> None:
    """Give a checkpoint a name."""
    if "/" in model or ":" in model:
        raise UsageError(f"{model} is no run's checkpoint", hint="headway checkpoint import makes a run of a folder")
    ref, step = split_ref(root, model)
    run = find_run(root, ref)
    manifest = open_checkpoint(find_checkpoint(run.checkpoints, step)).manifest
    before = read_registry(root).get(name)
    entry = tag(root, name, run, manifest.step, manifest.digest)
    if note is not None:
        entry = add_note(root, name, note)
    if json:
        print_json(as_document(name, entry))
        return
    was = f", before {before.run}@{before.step}" if before is not None and before.at != entry.at else ""
    print(f"{name} is {entry.run}@{entry.step}{was}")
    print(f"next: headway serve {name}")


def list_names(root: Path, json: bool) -> None:
    """Print all names."""
    names = read_registry(root)
    if json:
        print_json([as_document(name, names[name]) | {"gone": is_gone(root, names[name])} for name in sorted(names)])
    elif names:
        print("\n".join(_rows(root, names)))
    else:
        print(f"no model in {root} has a name")
        print("next: headway model tag RUN@STEP NAME")


def note_name(root: Path, name: str, text: str, json: bool) -> None:
    """Add a note."""
    entry = add_note(root, name, text)
    if json:
        print_json(as_document(name, entry))
    else:
        print(f"{name}: {plural(len(entry.notes), 'note')}")


def remove_named(root: Path, name: str, json: bool) -> None:
    """Remove a name."""
    entry = remove_name(root, name)
    if json:
        print_json(as_document(name, entry))
    else:
        print(f"{name} was {entry.run}@{entry.step}, which no longer has this name")


def _rows(root: Path, names: dict[str, RegisteredModel]) -> list[str]:
    table = [("name", "model", "since", "note")]
    for name, entry in sorted(names.items()):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.at))
        note = " ".join(entry.notes[-1].text.split()) if entry.notes else ""
        table.append(
            (name, f"{entry.run}@{entry.step}{' gone' if is_gone(root, entry) else ''}", since, _printable(note))
        )
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in table
    ]
    return [shortened(line.rstrip(), columns()) for line in lines]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
