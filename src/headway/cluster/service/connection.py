"""HTTP to the service: JSON both ways, a bearer token, and errors as they were raised there.

Over TLS the service is known by its fingerprint, the SHA-256 of its certificate: no authority, name or clock is
trusted, and nothing is sent before it was compared. Without a fingerprint the certificate must be one that this
machine trusts.
"""

import hashlib
import http.client
import json
import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from headway.cluster.service.login import login_file, read_login
from headway.errors import EngineError, EngineUnreachable, Forbidden, UnknownNode, UsageError

ADDRESS = "service.json"
TOKEN, NODE_TOKEN = "token", "node-token"
UNKNOWN_NODE = "unknown node"
"""Kind of an answer: the cluster does not have the node that reports."""
TIMEOUT_S = 60.0


class ServiceConnection:
    """A connection per exchange, or one that is kept and opened again when it has broken; for one thread."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_s: float = TIMEOUT_S,
        *,
        keep: bool = False,
        fingerprint: str | None = None,
        certificate: Path | None = None,
    ) -> None:
        """`fingerprint` is that of the service; `certificate` is a file with one and its key, which nodes show instead
        of a token. It is read for each connection, since it is renewed."""
        self.url, self._token, self._timeout_s, self._keep = url, token, timeout_s, keep
        self._fingerprint, self._certificate = fingerprint, certificate
        self._connection: http.client.HTTPConnection | None = None

    def another(self) -> "ServiceConnection":
        """A connection as the same caller, kept open, for another thread."""
        return ServiceConnection(
            self.url,
            self._token,
            self._timeout_s,
            keep=True,
            fingerprint=self._fingerprint,
            certificate=self._certificate,
        )

    def get(self, path: str, **query: Any) -> Any:
        """The answer to a query."""
        words = urlencode({key: value for key, value in query.items() if value is not None}, doseq=True)
        return self._exchange("GET", f"{path}?{words}" if words else path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a request. It must be one that may be repeated: a broken connection repeats it once."""
        return self._exchange("POST", path, json.dumps(body or {}).encode())

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a request that sets something."""
        return self._exchange("PUT", path, json.dumps(body).encode())

    def put_bytes(self, path: str, data: bytes) -> Any:
        """The answer to a request that stores a file."""
        return self._exchange("PUT", path, data)

    def get_bytes(self, path: str) -> bytes:
        """A file."""
        answer: bytes = self._exchange("GET", path, None, parsed=False)
        return answer

    def delete(self, path: str) -> Any:
        """The answer to a request that removes something."""
        return self._exchange("DELETE", path, None)

    def _exchange(self, method: str, path: str, body: bytes | None, *, parsed: bool = True) -> Any:
        for last in (False, True):
            fresh = self._connection is None
            try:
                answer = self._once(method, path, body, parsed)
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

    def _once(self, method: str, path: str, body: bytes | None, parsed: bool) -> Any:
        if self._connection is None:
            self._connection = self._open()
        headers = {"content-type": "application/json"}
        headers |= {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status == 200:
            return json.loads(data) if parsed else data
        self.close()
        raise answer_error(answer.status, data, self.url)

    def _open(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme != "https":
            return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self._timeout_s)
        context = ssl.create_default_context()
        if self._fingerprint is not None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self._certificate is not None:
            context.load_cert_chain(self._certificate)
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=self._timeout_s, context=context
        )
        try:
            connection.connect()
            if self._fingerprint is not None:
                _check_fingerprint(connection.sock, self._fingerprint, self.url)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise EngineError(
                f"the certificate of the service at {self.url} is not trusted: {error.verify_message}",
                hint="--fingerprint with what headway up printed",
            ) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _check_fingerprint(channel: ssl.SSLSocket, expected: str, url: str) -> None:
    actual = hashlib.sha256(channel.getpeercert(binary_form=True) or b"").hexdigest()
    if actual != expected:
        raise EngineError(
            f"the service at {url} has the fingerprint {actual}, not {expected}",
            hint="compare with what headway up prints there: another machine may be answering",
        )


def read_fingerprint(text: str) -> str:
    """A fingerprint as it is compared: 64 lower-case hexadecimal digits; with colons and capitals it is the same."""
    digits = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise UsageError(f"{text!r} is no fingerprint", hint="64 hexadecimal digits, as headway up prints them")
    return digits


def _cause(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "its name is unknown"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def answer_error(status: int, data: bytes, url: str) -> EngineError | UsageError:
    """What an answer other than 200 says, as the error that it was there."""
    try:
        fields = json.loads(data)
        message, hint = fields["error"], fields.get("hint")
    except (ValueError, KeyError, TypeError):
        return EngineError(f"the service at {url} answered with status {status}")
    if status == 401:
        return UsageError(f"the service at {url} refused the token", hint="headway login URL --token-file FILE")
    if status == 403:
        return Forbidden(message, hint=hint)
    kinds = {"usage": UsageError, UNKNOWN_NODE: UnknownNode}
    return kinds.get(fields.get("kind"), EngineError)(message, hint=hint)


def service_folder(runs: Path) -> Path:
    """The folder of the service that belongs to a folder of runs."""
    return runs.absolute() / ".service"


def service_started_for(runs: Path) -> str | None:
    """The URL of the service that was started for a folder of runs, which counts before a login; None if none was."""
    try:
        return str(json.loads((service_folder(runs) / ADDRESS).read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def connect(runs: Path, timeout_s: float = TIMEOUT_S) -> ServiceConnection:
    """Connect to the service of a folder of runs, else to the one that the user has logged in to."""
    folder = service_folder(runs)
    login = None if (folder / ADDRESS).exists() else read_login(login_file())
    if login is not None:
        return ServiceConnection(login.url, login.token, timeout_s, fingerprint=login.fingerprint)
    try:
        address = json.loads((folder / ADDRESS).read_text())
        url, fingerprint = address["url"], address.get("fingerprint")
        token = (folder / TOKEN).read_text().strip()
    except FileNotFoundError:
        raise EngineUnreachable(
            f"no service has been started for {runs}", hint="start one with headway up, or headway login URL"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"cannot read {folder}: {error}") from None
    return ServiceConnection(url, token, timeout_s, fingerprint=fingerprint)


def path_of(kind: str, *names: str) -> str:
    """The path of something by its names, such as a user's."""
    return "/".join([f"/api/v1/{kind}", *(quote(name, safe="") for name in names)])


def node_path(node: str, *verb: str) -> str:
    """The path of a node."""
    return "/".join(["/api/v1/nodes", quote(node, safe=""), *verb])


def job_path(job: str, *verb: str) -> str:
    """The path of a job."""
    return "/".join(["/api/v1/jobs", quote(job, safe=""), *verb])
