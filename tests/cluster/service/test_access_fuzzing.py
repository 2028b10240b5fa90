"""The OpenAPI document is what the service does: requests made from it are never a bug's answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from access_world import NODE_TOKEN, NOW, AccessWorld, access_world
from hypothesis import HealthCheck, given, settings

from headway.cluster.service.access_guard import GuardSettings
from headway.cluster.service.api_document import ERRORS
from headway.cluster.service.roles import OPEN, PERMISSIONS, Permission


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AccessWorld]:
    guard = GuardSettings(NODE_TOKEN, requests_per_s=1e9, requests_burst=1e9, wall_clock=lambda: NOW)
    with access_world(tmp_path, guard) as world:
        yield world


def test_document_lists_every_route_with_its_role_and_errors(world: AccessWorld) -> None:
    document = world.ask("red-viewer", "GET", "/openapi.json").json()
    listed = {
        f"{method.upper()} {path}": operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert set(listed) == set(PERMISSIONS) - {"GET /openapi.json"}
    for row, operation in listed.items():
        need = PERMISSIONS[row]
        assert operation["security"] == ([] if need == OPEN else [{"token": []}])
        if isinstance(need, Permission):
            assert (operation["x-role"], operation["x-scope"]) == (need.role, need.scope)
        assert {str(status) for status in ERRORS} | {"200"} == set(operation["responses"])
    assert "ErrorAnswer" in document["components"]["schemas"]


def test_unknown_paths_and_methods_are_told_in_the_same_form(world: AccessWorld) -> None:
    for method, path, status in (("GET", "/api/v1/none", 404), ("DELETE", "/api/v1/jobs", 405)):
        answer = world.ask("red-viewer", method, path)
        assert (answer.status_code, set(answer.json())) == (status, {"error", "hint", "kind"})
        assert world.ask(None, method, path).status_code == 401


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_request_made_from_the_document_is_a_server_error(world: AccessWorld) -> None:
    """As admin and as node: every answer is one that the document lists, and has the form that it says."""
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
    own = {"host": "localhost", "authorization": f"Bearer {world.tokens['root']}"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", world.app, headers=own)
    tried, failures = 0, list[str]()
    for result in schema.get_all_operations():
        operation = result.ok()
        row = f"{operation.method.upper()} {operation.path}"
        token = world.tokens["root"] if isinstance(PERMISSIONS[row], Permission) else NODE_TOKEN
        try:
            tried += fuzz(operation, own | {"authorization": f"Bearer {token}"}, checks)
        except Exception as error:
            failures.append(f"{row}: {error!r} {error} {getattr(error, 'exceptions', '')}")
    assert not failures, "\n\n".join(failures)
    assert tried > 500


def fuzz(operation: Any, headers: dict[str, str], checks: list[Any]) -> int:
    """Ask for an operation in many ways; return in how many."""
    tried = 0

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        nonlocal tried
        tried += 1
        case.validate_response(case.call(headers=headers), checks=checks)

    ask()
    return tried
