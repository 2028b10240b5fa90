"""`headway whoami`: shows who the service takes one for."""

import time
from typing import Any

from headway.cli.options import Json, Runs
from headway.cli.text import duration, print_json
from headway.cluster.service.connection import connect
from headway.track import runs_root


def whoami(runs: Runs = None, json: Json = False) -> None:
    """Show your user, role and tenants at the service, and what your token may do."""
    identity = connect(runs_root(runs)).get("/api/v1/whoami")
    print_json(identity) if json else print("\n".join(identity_lines(identity)))


def identity_lines(identity: dict[str, Any]) -> list[str]:
    """Return who somebody is, in lines."""
    of = f" of tenant {identity['tenant']}" if identity["tenant"] else ""
    left = None if identity["expires"] is None else max(identity["expires"] - time.time(), 0.0)
    expires = "does not expire" if left is None else f"expires in {duration(left)}"
    return [
        f"{identity['user']}: {identity['role']}{of}",
        f"sees {', '.join(identity['tenants']) or 'no tenant'}",
        f"token {identity['token']} {expires}; scopes {', '.join(identity['scopes'])}",
    ]
