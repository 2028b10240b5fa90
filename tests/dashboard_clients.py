"""Clients of a dashboard over hand-written runs, in the process of the test: fixtures of tests/dashboard.

Not a conftest.py there: tests import helpers from the one of all tests by that name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from starlette.testclient import TestClient


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty folder of runs."""
    root = tmp_path / "runs"
    root.mkdir()
    return root


@pytest.fixture
def stranger(runs: Path, tmp_path: Path) -> "Iterator[TestClient]":
    """A client without the token."""
    from starlette.testclient import TestClient
    from written_runs import TOKEN

    from headway.dashboard import make_app

    app = make_app(runs, TOKEN, data=tmp_path / "data")
    with TestClient(app, base_url="http://127.0.0.1:8321", follow_redirects=False) as client:
        yield client


@pytest.fixture
def client(stranger: "TestClient") -> "TestClient":
    """A client that has opened the printed address."""
    from written_runs import TOKEN

    assert stranger.get(f"/?token={TOKEN}").status_code == 200
    return stranger
