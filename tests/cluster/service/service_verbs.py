"""Verbs that are typed against a service in the process of the test, by any of its users."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from access_world import AccessWorld

from headway.cli.main import main
from headway.cluster.service.connection import ServiceConnection, answer_error
from headway.cluster.service.login import Login, login_file, write_login

URL = "http://127.0.0.1:8324"


@dataclass(frozen=True)
class Printed:
    """How a verb ended, and what it printed."""

    status: int
    out: str
    err: str


class Terminal:
    """Types verbs as users of a service, whose answers and errors are read as those of a socket are."""

    def __init__(
        self, world: AccessWorld, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def once(connection: ServiceConnection, method: str, path: str, body: bytes | None, parsed: bool) -> Any:
            headers = {"authorization": f"Bearer {connection._token}", "content-type": "application/json"}
            answer = world.client.request(method, path, content=body, headers=headers)
            if answer.status_code != 200:
                raise answer_error(answer.status_code, answer.content, connection.url)
            return json.loads(answer.content) if parsed else answer.content

        self._world, self._patch, self._capsys = world, patch, capsys
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("HEADWAY_RUNS", str(folder / "runs"))
        patch.delenv("HEADWAY_LOGIN", raising=False)
        patch.setattr(ServiceConnection, "_once", once)

    def type(self, user: str, *words: str) -> Printed:
        """Run a verb as a user of the service, who is logged in."""
        write_login(login_file(), Login(URL, self._world.tokens[user]))
        self._patch.setattr(sys, "argv", ["headway", *words])
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        out, err = self._capsys.readouterr()
        return Printed(status, out, err)
