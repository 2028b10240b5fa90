"""`headway data diff A B`: what differs between two datasets."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from headway.cli.progress import terminal_bars
from headway.cli.text import columns, plural, print_json, shortened
from headway.data import open_dataset
from headway.data.compare_versions import DocumentDifference, VersionDiff, compare_versions

FILES = 5
"""Files that are printed of each kind."""


def diff_datasets(first: Path, second: Path, json: bool) -> None:
    """Print the difference; exit with 1 if there is one."""
    datasets = open_dataset(first), open_dataset(second)
    with terminal_bars("{task.description}", "Bar", "TaskProgress") as bars:
        task = bars.add_task("comparing documents") if sys.stderr.isatty() else None

        def show(done: int, total: int) -> None:
            if task is not None:
                bars.update(task, completed=done, total=total)

        diff = compare_versions(*datasets, show)
    if json:
        print_json({"paths": [str(first), str(second)], "equal": diff.equal, **asdict(diff)})
    else:
        print("\n".join(_lines(diff, first, second)))
    if not diff.equal:
        raise typer.Exit(1)


def _lines(diff: VersionDiff, first: Path, second: Path) -> list[str]:
    if diff.equal:
        return [f"{first} and {second} are the same version, {diff.versions[0]}"]
    rows: list[tuple[str, ...]] = [("", shortened(str(first), 22), shortened(str(second), 22))]
    rows += [("version", *diff.versions)]
    for name, pair in (("tokens", diff.tokens), ("documents", diff.documents), ("shards", diff.shards)):
        rows.append((name, *(f"{value:,}" for value in pair)))
    rows += [(key, *(shortened(_shown(value), 22) for value in pair)) for key, pair in diff.settings.items()]
    widths = [max(len(row[index]) for row in rows) for index in range(2)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]
    lines.append(f"\n{plural(diff.same_shards, 'shard')} with the same content")
    lines += _files("-", diff.sources_removed, "removed")
    lines += _files("+", diff.sources_added, "added")
    lines += _files("~", diff.sources_changed, "changed")
    if diff.removed is None or diff.added is None:
        lines.append("documents are not compared: the tokenizers differ")
        return lines
    lines.append(f"{plural(diff.common, 'document')} in both")
    for sign, part, path in (("-", diff.removed, first), ("+", diff.added, second)):
        lines += _documents(sign, part, path)
    return lines


def _files(sign: str, paths: Sequence[str], what: str) -> list[str]:
    if not paths:
        return []
    shown = [f"  {sign} {_tail(path)}" for path in paths[:FILES]]
    more = [f"  {sign} {len(paths) - FILES:,} more"] if len(paths) > FILES else []
    return [f"{plural(len(paths), 'source')} {what}", *shown, *more]


def _documents(sign: str, part: DocumentDifference, path: Path) -> list[str]:
    if not part.documents:
        return []
    shown = [f"  {sign} {number:,}  {_tail(name, 14)}" for number, name in part.examples]
    more = [f"  {sign} {part.documents - len(shown):,} more"] if part.documents > len(shown) else []
    return [f"{plural(part.documents, 'document')} only in {path}, {part.tokens:,} tokens", *shown, *more]


def _tail(text: str, besides: int = 4) -> str:
    width = columns() - besides
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
