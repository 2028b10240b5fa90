"""`headway tokens`: what users show to the service."""

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs, TokenFile
from headway.cli.text import duration, next_line, print_json, table
from headway.cluster.engines.scripts import replace_file
from headway.cluster.service.connection import connect, path_of
from headway.cluster.service.tokens import LONGEST_S
from headway.errors import UsageError
from headway.track import command, runs_root

app = typer.Typer(help="List, make and revoke tokens of the service.", rich_markup_mode=None)
_LIFETIME = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@app.callback(invoke_without_command=True)
def tokens(context: typer.Context, runs: Runs = None, json: Json = False) -> None:
    """List, make and revoke tokens of the service."""
    if context.invoked_subcommand is not None:
        return
    root = runs_root(runs)
    rows: list[dict[str, Any]] = connect(root).get("/api/v1/tokens")
    if json:
        print_json(rows)
        return
    cells = [(row["id"], row["user"], ",".join(row["scopes"]), _state(row), row["label"]) for row in rows]
    print("\n".join(table(("token", "user", "scopes", "state", "label"), cells)))
    print(next_line(*(command(root, words) for words in ("tokens add", "tokens revoke TOKEN"))))


@app.command()
def add(
    user: Annotated[str | None, typer.Option("--user", help="Whose it is (default: yours).")] = None,
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="read, jobs or manage; repeatable (default: all of yours).")
    ] = None,
    expires: Annotated[str, typer.Option("--expires", metavar="90d", help="Lifetime: 30m, 12h or 90d.")] = "90d",
    label: Annotated[str, typer.Option("--label", help="What it is for.")] = "",
    out: TokenFile = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Make a token. It is shown this once, and kept nowhere."""
    root = runs_root(runs)
    check_new(out)
    connection = connect(root)
    scopes = scope or connection.get("/api/v1/whoami")["scopes"]
    body = {"user": user, "scopes": scopes, "label": label, "lifetime_s": _seconds(expires)}
    row = connection.post("/api/v1/tokens", body)
    text = row.pop("token")
    if out is not None:
        replace_file(out, text + "\n", private=True)
    if json:
        print_json(row | ({"token": text} if out is None else {"file": str(out)}))
        return
    print(f"token {row['id']} of {row['user']}: {_state(row)}, scopes {', '.join(row['scopes'])}")
    print(text if out is None else f"written to {out}")
    print(next_line(f"headway login {connection.url} --token-file {out or 'FILE'}"))


@app.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of a token, as headway tokens lists it.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Revoke a token: the next request with it is refused."""
    row = connect(runs_root(runs)).delete(path_of("tokens", token))
    print_json(row) if json else print(f"token {row['id']} of {row['user']} is revoked")


def check_new(out: Path | None) -> None:
    """Raise UsageError if a token would replace a file."""
    if out is not None and out.exists():
        raise UsageError(f"{out} exists", hint="choose another file, or remove it")


def _seconds(text: str) -> float:
    """Return a lifetime in seconds."""
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise UsageError(f"--expires {text!r} is not a lifetime", hint="30m, 12h or 90d")
    lifetime_s = float(match[1]) * _SECONDS[match[2]]
    if lifetime_s > LONGEST_S:
        raise UsageError(f"--expires {text} is too long", hint=f"at most {LONGEST_S / _SECONDS['d']:.0f}d")
    return lifetime_s


def _state(row: dict[str, Any]) -> str:
    """Return whether a token can be used, in words."""
    if row["revoked"] is not None:
        return "revoked"
    if row["expires"] is None:
        return "does not expire"
    left = row["expires"] - time.time()
    return f"expires in {duration(left)}" if left > 0 else "expired"
