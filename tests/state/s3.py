"""An S3 server of our own and a bad road to it, for tests: moto's server as a process, and a proxy that does harm.

    pytest_plugins = ["s3"]      in a test module gives it the fixtures below

`bucket` is the url of a fresh bucket, with an environment that leads to it through `proxy`; the proxy passes all on
until `proxy.harm` is set: a function that looks at a request and says what shall happen to it.

PYTEST_DONT_REWRITE: tests import this module before pytest hears of it.
"""

import contextlib
import http.client
import http.server
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eventually import eventually

UNAVAILABLE = "503, and the server has not seen it"
FORBIDDEN = "403, and the server has not seen it"
CONFLICT = "409, and the server has not seen it"
RESET = "the connection is reset, and the server has not seen it"
LATE = "the server does it, and the answer comes later than anybody waits"
CUT = "the server does it, and half of the answer's body comes"
DROPPED = "the server does it, and the connection is reset instead of an answer"

SECRETS = ("an-id-of-somebody", "what-only-they-know")
"""What no message may hold."""

_REFUSALS = {UNAVAILABLE: (503, "SlowDown"), FORBIDDEN: (403, "AccessDenied"), CONFLICT: (409, "OperationAborted")}
_numbers = itertools.count(1)  # of buckets
_NOT_PASSED_ON = {"connection", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True)
class Request:
    """What the proxy has been asked for."""

    method: str
    path: str
    """Of the object, without the bucket."""
    query: str
    conditional: bool
    """Only if there is none yet."""


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a server, or does them harm; remembers them all."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, target: int, late_s: float = 1.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.late_s = target, late_s
        self.closing = threading.Event()
        self.one_at_a_time = threading.Lock()
        self.calm()

    def calm(self) -> None:
        """Forget all requests, and do no more harm."""
        self.harm: Callable[[Request], str | None] = lambda _: None
        self.seen: list[Request] = []
        self.harmed: list[Request] = []

    def every_second(self, harm: str) -> None:
        """Do this harm to the first request, the third, and so on."""
        numbers = itertools.count()
        self.harm = lambda _: harm if next(numbers) % 2 == 0 else None

    def first(self, harm: str, method: str = "", query: str = "") -> None:
        """Do this harm to the first request that has this method, and this in its query."""
        numbers = itertools.count()
        self.harm = lambda r: harm if method in r.method and query in r.query and next(numbers) == 0 else None

    def count(self, method: str, end: str = "") -> int:
        """How many requests with this method there were for objects whose key ends so."""
        return sum(request.method == method and request.path.endswith(end) for request in self.seen)

    def handle_error(self, *_: object) -> None:
        """A client that has hung up is what these tests are about."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            return super().handle_one_request()
        self.close_connection = True
        return None

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        key = path.lstrip("/").partition("/")[2]
        request = Request(self.command, key, query, "If-None-Match" in self.headers)
        self.server.seen.append(request)
        harm = self.server.harm(request)
        if harm:
            self.server.harmed.append(request)
        if harm in _REFUSALS:
            status, code = _REFUSALS[harm]
            return self.answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
        if harm == RESET:
            return self.reset()
        # of two at once moto would let both create an object, which S3 does not
        with self.server.one_at_a_time if request.conditional else contextlib.nullcontext():
            status, headers, content = self.ask(body)
        if harm == DROPPED:
            return self.reset()
        if harm == LATE:
            self.server.closing.wait(self.server.late_s)
        return self.answer(status, headers, content, cut=harm == CUT)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=120)) as there:
            there.request(self.command, self.path, body, dict(self.headers))
            answer = there.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _NOT_PASSED_ON}
            length = answer.getheader("Content-Length")
            content = answer.read()
        if self.command == "HEAD":
            headers["Content-Length"] = length or "0"
        return answer.status, headers, content

    def answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut and content:
            self.close_connection = True

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing: the tests say what matters."""


@contextlib.contextmanager
def moto_server(log: Path) -> Iterator[int]:
    """A server that speaks S3 on a port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            eventually(lambda: _answers(port, process, log), log.read_text)
            yield port
        finally:
            process.kill()


def _answers(port: int, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def running_proxy(target: int) -> Iterator[Proxy]:
    """A proxy to a port of this machine."""
    with Proxy(target) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield proxy
        proxy.closing.set()
        proxy.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the one server of all tests."""
    with moto_server(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    """The way to the server."""
    with running_proxy(s3_port) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_port: int, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """The url of a new bucket; the environment leads to it through the proxy."""
    name = f"bucket-{next(_numbers)}"
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", s3_port, timeout=120)) as server:
        server.request("PUT", f"/{name}")
        assert server.getresponse().status == 200
    for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRETS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    return f"s3://{name}/runs/a"
