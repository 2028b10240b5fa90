"""The OpenAPI document of the service: beside what routes return, who may call them and how they refuse."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from headway.cluster.service.roles import OPEN, PERMISSIONS, Permission
from headway.errors import what_is_wrong

ERRORS = {
    400: "What was asked for cannot be: the sentence says why.",
    401: "The token is missing, unknown, expired or revoked.",
    403: "The user or its token may not do this.",
    404: "There is no such path.",
    409: "Not in this state.",
    413: "The request is too large.",
    422: "The request is not as this document says.",
    429: "Too many requests: Retry-After says when.",
    503: "The database or the scheduler does not answer.",
}
"""What every route may answer beside what it returns."""
LONGEST_QUOTED = 40
_PLACES = frozenset({"body", "query", "path"})
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_WORDS = {
    "missing": "this is missing",
    "extra_forbidden": "there is no such field",
    "json_invalid": "this is no JSON",
    "too_short": "this is too short",
}


class ErrorAnswer(BaseModel):
    """Why a request was refused."""

    error: str
    hint: str | None
    kind: str
    """usage, engine, access or other."""


_SCHEMA = {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}
ERROR_ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _SCHEMA}}}
    for status, text in ERRORS.items()
}


def complete_document(app: FastAPI) -> None:
    """Add errors, tokens, roles and scopes to the document of an application, when it is asked for."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        components = document.setdefault("components", {})
        components.setdefault("schemas", {})[ErrorAnswer.__name__] = ErrorAnswer.model_json_schema()
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                need = PERMISSIONS.get(f"{method.upper()} {path}")
                operation["security"] = [] if need == OPEN else [{"token": list[str]()}]
                if isinstance(need, Permission):
                    operation |= {"x-role": need.role, "x-scope": need.scope}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def sentence_of(mistake: Mapping[str, Any]) -> str:
    """One of pydantic's mistakes in the words of who asked. Values are quoted where a choice or a bound is missed: such
    are no secrets."""
    place = [str(part) for part in mistake["loc"] if part not in _PLACES and not isinstance(part, int)]
    field = ".".join(place) or "the request"
    given, limits = mistake.get("input"), mistake.get("ctx", {})
    if mistake["type"] == "literal_error":
        return f"{field} {str(given)[:LONGEST_QUOTED]!r}: one of {limits['expected'].replace(chr(39), '')}"
    for bound, words in _BOUNDS.items():
        if bound in limits and isinstance(given, int | float | str):
            return f"{field} {str(given)[:LONGEST_QUOTED]}: {words} {limits[bound]:,g}"
    return f"{field}: {_WORDS.get(mistake['type']) or what_is_wrong(mistake)}"


def no_such_route(_: Request, error: Exception) -> JSONResponse:
    """The answer for a path or method that does not exist."""
    assert isinstance(error, HTTPException)
    answer = ErrorAnswer(error=str(error.detail), hint="/openapi.json lists what there is", kind="usage")
    return JSONResponse(answer.model_dump(), status_code=error.status_code, headers=error.headers)


def plain_answer(value: Any) -> Response:
    """An answer of a thousand plain values: for FastAPI to check and convert each would take ten times as long."""
    return Response(to_json(value), media_type="application/json")
