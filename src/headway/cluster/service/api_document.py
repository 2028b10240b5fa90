"""The OpenAPI document of the service: beside what routes return, who may call them and how they refuse."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from headway.cluster.service.roles import OPEN, PERMISSIONS, Permission

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


def no_such_route(_: Request, error: Exception) -> JSONResponse:
    """The answer for a path or method that does not exist."""
    assert isinstance(error, HTTPException)
    answer = ErrorAnswer(error=str(error.detail), hint="/openapi.json lists what there is", kind="usage")
    return JSONResponse(answer.model_dump(), status_code=error.status_code, headers=error.headers)
