"""`headway users`: who may use the service, in which role."""

from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import next_line, print_json, table
from headway.cluster.service.connection import connect, path_of
from headway.track import command, runs_root

app = typer.Typer(help="List, add, change and remove users of the service.", rich_markup_mode=None)
UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of a user.")]


@app.callback(invoke_without_command=True)
def users(context: typer.Context, runs: Runs = None, json: Json = False) -> None:
    """List, add, change and remove users of the service."""
    if context.invoked_subcommand is not None:
        return
    root = runs_root(runs)
    rows: list[dict[str, Any]] = connect(root).get("/api/v1/users")
    if json:
        print_json(rows)
        return
    print(
        "\n".join(table(("user", "role", "tenant"), [(row["name"], row["role"], row["tenant"] or "-") for row in rows]))
    )
    print(next_line(*(command(root, words) for words in ("users set USER --role member", "tokens add --user USER"))))


@app.command(name="set")
def set_user(
    user: UserName,
    role: Annotated[str, typer.Option("--role", help="viewer, member, tenant-admin or admin.")],
    tenant: Annotated[str | None, typer.Option("--tenant", help="Tenant; admins have none.")] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Add a user, or change its role and tenant; its tokens follow at once."""
    root = runs_root(runs)
    row = connect(root).put(path_of("users", user), {"role": role, "tenant": tenant})
    if json:
        print_json(row)
        return
    print(f"{row['name']}: {row['role']}" + (f" of tenant {row['tenant']}" if row["tenant"] else ""))
    print(next_line(command(root, f"tokens add --user {user}")))


@app.command()
def rm(user: UserName, runs: Runs = None, json: Json = False) -> None:
    """Remove a user and its tokens; its jobs go on."""
    row = connect(runs_root(runs)).delete(path_of("users", user))
    print_json(row) if json else print(f"user {user} is removed, with its tokens")
