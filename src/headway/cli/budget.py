"""`headway budget`: GPU-hours that tenants may use per calendar month."""

from typing import Annotated

import typer

from headway.cli.options import Json, Runs
from headway.cli.tenants import NONE, tenant_table
from headway.cli.text import print_json
from headway.cluster.service.connection import connect, path_of
from headway.errors import UsageError, suggest
from headway.track import runs_root


def budget(
    tenant: Annotated[str | None, typer.Argument(metavar="TENANT", help="Name of a tenant.")] = None,
    gpu_hours: Annotated[
        str | None, typer.Argument(metavar="GPU-HOURS", help="Per calendar month (UTC), its children's included; none.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show what tenants have spent of their monthly budgets, or set the budget of one."""
    connection = connect(runs_root(runs))
    rows = connection.get("/api/v1/tenants")
    names = [row["name"] for row in rows]
    if tenant is not None and tenant not in names:
        raise UsageError(f"unknown tenant '{tenant}'", hint=suggest(tenant, names, "headway tenants lists them"))
    if tenant is not None and gpu_hours is not None:
        rows = [connection.put(path_of("tenants", tenant), {"budget_gpu_h": _hours(gpu_hours)})]
    else:
        rows = [row for row in rows if tenant in (None, row["name"])]
    print_json(rows) if json else print("\n".join(tenant_table(rows)))


def _hours(text: str) -> float | None:
    try:
        return None if text == NONE else float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number of GPU-hours", hint="for example 20000, or none") from None
