"""HTTP to the service: JSON both ways, a bearer token, and errors as they were raised there."""

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from headway.errors import EngineError, EngineUnreachable, UsageError

ADDRESS = "service.json"
TOKEN, NODE_TOKEN = "token", "node-token"
TIMEOUT_S = 60.0


class ServiceConnection:
    """A connection per exchange, or one that is kept and opened again when it has broken; for one thread."""

    def __init__(self, url: str, token: str, timeout_s: float = TIMEOUT_S, *, keep: bool = False) -> None:
        self.url, self._token, self._timeout_s, self._keep = url, token, timeout_s, keep
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, **query: Any) -> Any:
        """The answer to a query."""
        words = urlencode({key: value for key, value in query.items() if value is not None}, doseq=True)
        return self._exchange("GET", f"{path}?{words}" if words else path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a request. It must be one that may be repeated: a broken connection repeats it once."""
        return self._exchange("POST", path, json.dumps(body or {}).encode())

    def _exchange(self, method: str, path: str, body: bytes | None) -> Any:
        for last in (False, True):
            fresh = self._connection is None
            try:
                answer = self._once(method, path, body)
                if not self._keep:
                    self.close()
                return answer
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if last or fresh:
                    raise EngineUnreachable(
                        f"the service at {self.url} does not answer: {_cause(error)}", hint="is headway up running?"
                    ) from None
        raise AssertionError

    def _once(self, method: str, path: str, body: bytes | None) -> Any:
        if self._connection is None:
            parts = urlsplit(self.url)
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self._timeout_s)
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status == 200:
            return json.loads(data)
        self.close()
        raise _error(answer.status, data, self.url)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _cause(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "its name is unknown"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _error(status: int, data: bytes, url: str) -> EngineError | UsageError:
    try:
        fields = json.loads(data)
        message, hint = fields["error"], fields.get("hint")
    except (ValueError, KeyError, TypeError):
        return EngineError(f"the service at {url} answered with status {status}")
    if status == 401:
        return UsageError(f"the service at {url} refused the token", hint="is it the service of this --runs folder?")
    return (UsageError if fields.get("kind") == "usage" else EngineError)(message, hint=hint)


def service_folder(runs: Path) -> Path:
    """The folder of the service that belongs to a folder of runs."""
    return runs.absolute() / ".service"


def connect(runs: Path, timeout_s: float = TIMEOUT_S) -> ServiceConnection:
    """Connect to the service of a folder of runs."""
    folder = service_folder(runs)
    try:
        url = json.loads((folder / ADDRESS).read_text())["url"]
        token = (folder / TOKEN).read_text().strip()
    except FileNotFoundError:
        raise EngineUnreachable(f"no service has been started for {runs}", hint="start one with headway up") from None
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"cannot read {folder}: {error}") from None
    return ServiceConnection(url, token, timeout_s)


def job_path(job: str, *verb: str) -> str:
    """The path of a job."""
    return "/".join(["/api/v1/jobs", quote(job, safe=""), *verb])
