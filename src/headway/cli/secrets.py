"""`headway secrets`: values that jobs of a tenant get, and that are never shown."""

import sys
import time
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import duration, next_line, plural, print_json, table
from headway.cluster.service.connection import ServiceConnection, connect, path_of
from headway.errors import UsageError
from headway.track import command, runs_root

app = typer.Typer(help="List, set and remove secrets of tenants.", rich_markup_mode=None)
SecretName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the variable.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose jobs get it (default: your tenant).")]


@app.callback(invoke_without_command=True)
def secrets(context: typer.Context, runs: Runs = None, json: Json = False) -> None:
    """List, set and remove secrets of tenants."""
    if context.invoked_subcommand is None:
        ls(runs, json)


@app.command(name="set")
def set_secret(name: SecretName, tenant: Tenant = None, runs: Runs = None, json: Json = False) -> None:
    """Set a secret; the value is read from standard input, up to its end."""
    root = runs_root(runs)
    if sys.stdin.isatty():
        print(f"value of {name}, then Ctrl-D:", file=sys.stderr)
    value = sys.stdin.read().removesuffix("\n")
    if not value:
        raise UsageError(f"no value for {name} on standard input", hint=f"headway secrets set {name} <FILE")
    connection = connect(root)
    row = connection.put(path_of("secrets", _tenant(connection, tenant), name), {"value": value})
    if json:
        print_json(row)
        return
    print(f"secret {name} of tenant {row['tenant']} is set")
    print(next_line(f"{command(root, 'submit')} --secret {name} -- COMMAND"))


@app.command()
def ls(runs: Runs = None, json: Json = False) -> None:
    """List the names of secrets. No verb shows values."""
    rows: list[dict[str, Any]] = connect(runs_root(runs)).get("/api/v1/secrets")
    if json:
        print_json(rows)
        return
    now = time.time()
    cells = [
        (row["tenant"], row["name"], "(inherited)" if row.get("inherited") else row["user"], _ago(now - row["changed"]))
        for row in rows
    ]
    print("\n".join(table(("tenant", "secret", "set by", "ago"), cells)))


@app.command()
def rm(name: SecretName, tenant: Tenant = None, runs: Runs = None, json: Json = False) -> None:
    """Remove a secret; jobs that run keep it."""
    connection = connect(runs_root(runs))
    row = connection.delete(path_of("secrets", _tenant(connection, tenant), name))
    print_json(row) if json else print(f"secret {name} of tenant {row['tenant']} is removed")


@app.command()
def rekey(runs: Runs = None, json: Json = False) -> None:
    """Seal all stored secrets with a new key."""
    counts = connect(runs_root(runs)).post("/api/v1/secrets:rekey")
    if json:
        print_json(counts)
        return
    sealed = f"{plural(counts['tenants'], 'secret')} of tenants, and those of {plural(counts['jobs'], 'job')}"
    print(f"sealed with a new key: {sealed}")
    if counts["unreadable"]:
        print(f"note: {counts['unreadable']} were sealed with a key that is lost: set them again", file=sys.stderr)


def _ago(seconds: float) -> str:
    return duration(max(seconds, 0))


def _tenant(connection: ServiceConnection, stated: str | None) -> str:
    """Return the tenant that is meant: the stated one, else the user's own, else the only one."""
    if stated is not None:
        return stated
    identity = connection.get("/api/v1/whoami")
    if identity["tenant"] is None and len(identity["tenants"]) != 1:
        raise UsageError("no tenant given", hint=f"--tenant with one of {', '.join(identity['tenants'])}")
    return str(identity["tenant"] or identity["tenants"][0])
