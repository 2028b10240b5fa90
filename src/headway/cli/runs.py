"""`headway runs`: lists runs, by queries and in any order; tags, notes, rename, archive and delete."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Run, Runs, complete_run
from headway.cli.progress import Counting
from headway.cli.run_sync import fetch_all, is_elsewhere
from headway.cli.runs_view import column_table, run_table
from headway.cli.sweep_results_view import show_importance, show_pareto
from headway.cli.text import byte_size, first_names, next_line, plural, print_json, wrap_lines
from headway.errors import UsageError
from headway.track import FAILED, command, list_runs, runs_root
from headway.track.store import (
    Labels,
    Name,
    RunRow,
    change_note,
    change_tags,
    known_keys,
    parse_name,
    read_labels,
    read_rows,
    select_runs,
    value_of,
    write_labels,
)
from headway.track.store.edits import delete_run, find_whole, match_runs, rename_run, size_of

app = typer.Typer(invoke_without_command=True)

RunNames = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", autocompletion=complete_run, help="Runs: names, `last`, or patterns like 'demo-*'."
    ),
]

SomeRuns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN...]", autocompletion=complete_run, help="Runs: names, or patterns like 'grid-*'; by default all."
    ),
]
Where = Annotated[str, typer.Option("--where", metavar="QUERY", help="Only runs that satisfy it.")]


@app.callback()
def runs(
    context: typer.Context,
    where: Annotated[
        str,
        typer.Option(
            "--where",
            metavar="QUERY",
            help="Only runs that satisfy it: 'loss < 3 and train.lr > 1e-3', 'state = failed and age < 2d', "
            "'tags contains good or name glob \"demo-*\"'.",
        ),
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="Sort by keys, with - from large to small: -mfu,created.")
    ] = "",
    shown: Annotated[
        str,
        typer.Option("--columns", metavar="KEYS", help="Show these: loss,train.lr,'min(eval_loss)',mfu,tags."),
    ] = "",
    archived: Annotated[bool, typer.Option("--archived", help="List archived runs too.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List the keys that queries may name.")] = False,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="List the runs of an object store; syncs their records first."),
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """List runs, most recently active first, or change their labels.

    Keys are those of the run (state, tags, created ...), of its recipe, and metrics: loss, min(loss), mean(loss).
    """
    if context.invoked_subcommand is not None:
        return
    root = runs_root(runs)
    if store is not None:
        with Counting("syncing records") as counting:
            root = fetch_all(store, counting.show)
    if keys:
        _print_keys(root, json)
        return
    names = [(text, parse_name(text)) for text in _split(shown)]
    now = time.time()
    with Counting("reading metrics of runs") as counting:
        rows = select_runs(
            root,
            where,
            sort=_split(sort),
            archived=archived,
            columns=[name for _, name in names],
            now=now,
            progress=counting.show,
        )
    if json:
        print_json([_document(row, names, now) for row in rows])
    elif rows:
        table = column_table(rows, names, now) if names else run_table(rows)
        print("\n".join([*table, *_outdated(root, rows), *_set_aside(root), _next(root, where)]))
    else:
        print("\n".join([*_none_listed(root, where, archived), *_set_aside(root)]))


@app.command("tag")
def tag_command(
    run: Run,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Tags to add, or with --remove to remove.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove them.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Add tags to a run, or remove them."""
    labels = _relabel(run, runs, json, lambda old: change_tags(old, **{"remove" if remove else "add": tags}))
    if not json:
        print(f"{run}: tags {', '.join(labels.tags) or 'none'}")


@app.command("note")
def note_command(
    run: Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note; an empty one removes it.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Replace a run's note."""
    labels = _relabel(run, runs, json, lambda old: change_note(old, text))
    if not json:
        print(f"{run}: note {'written' if labels.note else 'removed'}")


@app.command("rename")
def rename_command(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its new name.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Rename a run that is not running."""
    folder = find_whole(runs_root(runs), run)
    renamed = rename_run(folder, name)
    if json:
        print_json({"run": renamed.name, "before": folder.name})
    else:
        print(f"{folder.name} is now {renamed.name}")


@app.command("archive")
def archive_command(
    names: RunNames,
    undo: Annotated[bool, typer.Option("--undo", help="List them again.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Leave runs out of lists; nothing of them is removed."""
    folders = match_runs(runs_root(runs), names, whole=True)
    for folder in folders:
        write_labels(folder, replace(read_labels(folder), archived=not undo))
    if json:
        print_json({"runs": [folder.name for folder in folders], "archived": not undo})
        return
    print(f"{first_names([folder.name for folder in folders])}: {'listed again' if undo else 'archived'}")
    print(next_line(command(runs_root(runs), "runs" if undo else "runs --archived")))


@app.command("importance")
def importance_command(
    names: SomeRuns = None,
    by: Annotated[
        str, typer.Option("--by", metavar="KEY", help="The result: loss, min(eval_loss), or -mfu where more is better.")
    ] = "loss",
    where: Where = "",
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show which keys of the recipe matter to a result.

    The share is that of the variance between the runs of a sweep which a key's values explain, one key at a time.
    """
    show_importance(runs_root(runs), names or (), where, by, json)


@app.command("pareto")
def pareto_command(
    names: SomeRuns = None,
    by: Annotated[
        str, typer.Option("--by", metavar="KEYS", help="Results: less is better, or with - more: loss,-tokens_per_s.")
    ] = "loss,-tokens_per_s",
    where: Where = "",
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Plot two results into a .png, .svg or .pdf file.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """List the runs that no other beats in all results.

    Of a sweep, or of any runs that are named.
    """
    show_pareto(runs_root(runs), names or (), where, by, plot, json)


@app.command("delete", hidden=True)
@app.command("rm")
def delete_command(
    names: RunNames,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Remove runs and their checkpoints, unless live or submitted."""
    folders = match_runs(runs_root(runs), names, whole=True)
    size = sum(size_of(folder) for folder in folders)
    what = f"{plural(len(folders), 'run')} ({first_names([folder.name for folder in folders])}), {byte_size(size)}"
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"removing {what} needs a yes", hint="--yes removes without asking")
        if not typer.confirm(f"remove {what}?", err=True):
            raise typer.Exit(1)
    for folder in folders:
        delete_run(folder, other_machines=is_elsewhere)
    if json:
        print_json({"deleted": [folder.name for folder in folders], "bytes": size})
    else:
        print(f"removed {what}")


def _relabel(ref: str, runs: Path | None, json: bool, change: Callable[[Labels], Labels]) -> Labels:
    """Change a run's labels; print and return them."""
    run = find_whole(runs_root(runs), ref)
    labels = change(read_labels(run))
    write_labels(run, labels)
    if json:
        print_json({"run": run.name, **asdict(labels)})
    return labels


def _print_keys(root: Path, json: bool) -> None:
    """Print every key that a query over the runs may name."""
    names = known_keys(read_rows(root, metrics=True))
    print_json(names) if json else print("\n".join(names))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _document(row: RunRow, names: Sequence[tuple[str, Name]], now: float) -> dict[str, Any]:
    content = asdict(row.summary) | asdict(row.labels) | {"created": row.created}
    return content | ({"values": {text: value_of(row, name, now) for text, name in names}} if names else {})


def _none_listed(root: Path, where: str, archived: bool) -> list[str]:
    """Return that there are no runs, or why none is listed, and what to do next."""
    hidden = 0 if archived else len(select_runs(root, where, archived=True))
    if hidden:
        which = f"all {plural(hidden, 'run')} in {root} {'that satisfy the query ' if where else ''}are archived"
        return [*wrap_lines(which.replace("all 1 run in", "the only run in").replace(" are ", " is ")
                            if hidden == 1 else which), next_line(command(root, "runs --archived"))]  # fmt: skip
    what = f"no run in {root} satisfies the query" if where else f"no runs in {root}"
    return [what, next_line(command(root, "runs") if where else command(root, "train RECIPE"))]


def _next(root: Path, where: str) -> str:
    return f"next: {command(root, 'report last')}" if not where else next_line(command(root, "compare RUN RUN"))


def _outdated(root: Path, rows: Sequence[RunRow]) -> list[str]:
    """Return a note if machines that do not share this folder may be further on."""
    names = [row.folder.name for row in rows if row.summary.state != "finished" and is_elsewhere(row.folder)]
    if not names:
        return []
    what = f"{names[0]} is" if len(names) == 1 else f"{len(names)} runs are"
    which = names[0] if len(names) == 1 else "RUN"
    text = f"note: {what} on other machines and may be further on: {command(root, 'fetch', which)}"
    return wrap_lines(text)


def _set_aside(root: Path) -> list[str]:
    """Return a note on runs that failed before their first step."""
    count = len(list_runs(root / FAILED))
    if not count:
        return []
    text = f"note: {plural(count, 'run')} failed before the first step: {command(root / FAILED, 'runs')}"
    return wrap_lines(text)
