"""`headway tenants`: who shares the cluster, with which guarantees, limits and budgets."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import next_line, print_json, table
from headway.cluster.service.connection import connect, path_of
from headway.errors import UsageError
from headway.track import command, runs_root

app = typer.Typer(help="List, add, change and remove tenants of the service.", rich_markup_mode=None)
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Name of a tenant.")]
NONE = "none"


@app.callback(invoke_without_command=True)
def tenants(context: typer.Context, runs: Runs = None, json: Json = False) -> None:
    """List, add, change and remove tenants of the service."""
    if context.invoked_subcommand is not None:
        return
    root = runs_root(runs)
    rows: list[dict[str, Any]] = connect(root).get("/api/v1/tenants")
    if json:
        print_json(rows)
        return
    print("\n".join(tenant_table(rows)))
    print(
        next_line(*(command(root, words) for words in ("tenants set TENANT --guarantee N", "budget TENANT GPU-HOURS")))
    )


@app.command(name="set")
def set_tenant(
    tenant: TenantName,
    parent: Annotated[str | None, typer.Option("--parent", help="Tenant above it; none puts it at the top.")] = None,
    guarantee: Annotated[int | None, typer.Option("--guarantee", min=0, help="GPUs it gets when it asks.")] = None,
    borrow: Annotated[
        str | None, typer.Option("--borrow", metavar="GPUS", help="GPUs above its guarantee, at most; none: no limit.")
    ] = None,
    lend: Annotated[
        str | None, typer.Option("--lend", metavar="GPUS", help="GPUs of its guarantee for others; none: no limit.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Add a tenant, or change it: what is not given stays. Running jobs go on."""
    limits = {"borrow": borrow, "lend": lend}
    change: dict[str, Any] = {key: _limit(key, text) for key, text in limits.items() if text is not None}
    change |= {} if guarantee is None else {"guarantee": guarantee}
    change |= {} if parent is None else {"parent": None if parent == NONE else parent}
    row = connect(runs_root(runs)).put(path_of("tenants", tenant), change)
    print_json(row) if json else print("\n".join(tenant_table([row])))


@app.command()
def rm(tenant: TenantName, runs: Runs = None, json: Json = False) -> None:
    """Remove a tenant that has no jobs, users or sub-tenants."""
    row = connect(runs_root(runs)).delete(path_of("tenants", tenant))
    print_json(row) if json else print(f"tenant {tenant} is removed")


def tenant_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per tenant; those below another one follow it, indented."""
    cells = list[tuple[str, ...]]()
    for row, depth in _as_tree(rows):
        hours = f"{row['spent_gpu_h']:,.1f}" + (f" of {row['budget_gpu_h']:,g}" if row["budget_gpu_h"] else "")
        limits = ["-" if row[key] is None else f"{row[key]:,}" for key in ("borrow", "lend")]
        name = "  " * depth + row["name"]
        cells.append((name, f"{row['guarantee']:,}", *limits, f"{row['gpus']:,}", f"{row['wanted_gpus']:,}", hours))
    month = rows[0]["month"] if rows else ""
    return table(("tenant", "guarantee", "borrow", "lend", "GPUs", "wait", f"GPU-hours {month}"), cells)


def _as_tree(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row and its depth: after its parent and that one's children before it."""
    names = {row["name"] for row in rows}
    left = [(row, 0) for row in reversed(rows) if row["parent"] not in names]
    while left:
        row, depth = left.pop()
        yield row, depth
        left += [(child, depth + 1) for child in reversed(rows) if child["parent"] == row["name"]]


def _limit(key: str, text: str) -> int | None:
    if text == NONE:
        return None
    if not text.isdecimal():
        raise UsageError(f"--{key} {text!r} is not a number of GPUs", hint="a whole number, or none")
    return int(text)
