"""`headway login`: says which service the verbs ask, and who one is there."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json
from headway.cli.text import print_json
from headway.cli.whoami import identity_lines
from headway.cluster.service.connection import ServiceConnection, read_fingerprint, service_started_for
from headway.cluster.service.login import Login, check_url, login_file, write_login
from headway.errors import UsageError
from headway.track import runs_root


def login(
    url: Annotated[str, typer.Argument(metavar="URL", help="The service, as headway up prints it.")],
    token_file: Annotated[Path, typer.Option("--token-file", metavar="FILE", help="File with a token; - reads it.")],
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", metavar="SHA256", help="Of the service's certificate.")
    ] = None,
    json: Json = False,
) -> None:
    """Log in to a service: verbs ask it from now on, unless a service was started for their --runs folder.

    URL, token and fingerprint are kept in ~/.config/headway/login.json, for you only.
    """
    wanted = Login(check_url(url), _read(token_file), None if fingerprint is None else read_fingerprint(fingerprint))
    connection = ServiceConnection(wanted.url, wanted.token, fingerprint=wanted.fingerprint)
    identity = connection.get("/api/v1/whoami")
    write_login(login_file(), wanted)
    root = runs_root(None)
    instead = service_started_for(root)
    if json:
        print_json(identity | {"url": wanted.url, "asked_instead": instead})
        return
    print("\n".join([f"logged in to {wanted.url}", *identity_lines(identity)]))
    if instead is not None:
        print(f"note: with the runs in {root}, verbs still ask the service that was started there: {instead}")
        print("hint: --runs or HEADWAY_RUNS with another folder")
    print("next: headway queue, headway submit -- COMMAND")


def _read(file: Path) -> str:
    """Return the token in a file, or on standard input."""
    try:
        token = (sys.stdin.readline() if str(file) == "-" else file.read_text()).strip()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    if not token or not token.isascii() or len(token.split()) != 1:
        raise UsageError(f"{file} has no token", hint="headway tokens add prints one")
    return token
