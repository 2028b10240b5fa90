"""A process that answers one request: JSON on stdin, JSON lines on stdout."""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel

from headway.errors import HeadwayError

Request = TypeVar("Request", bound=BaseModel)


def answer_request(kind: type[Request], answer: Callable[[Request], Iterable[dict[str, Any]]]) -> int:
    """Print the messages that answer the request on stdin, or at last its error and hint; return the exit status."""
    try:
        request = kind.model_validate_json(sys.stdin.buffer.read())
        for message in answer(request):
            print(json.dumps(message), flush=True)
    except HeadwayError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return error.exit_status
    return 0
