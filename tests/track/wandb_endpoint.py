"""A stand-in for W&B's server on loopback: answers what its client asks, and keeps what it sends."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

ENTITY = {"id": "e", "name": "team"}


class Endpoint(ThreadingHTTPServer):
    """What was sent, by kind."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.runs: list[dict[str, Any]] = []
        self.lines: dict[str, dict[int, str]] = {}
        self.uploads: dict[str, bytes] = {}
        self.keys: set[str] = set()
        self.exit_codes: list[int] = []
        self.broken = False
        """Whether all questions are answered with an error."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows that were logged."""
        lines = self.lines.get("wandb-history.jsonl", {})
        return [json.loads(lines[number]) for number in sorted(lines)]


class _Answers(BaseHTTPRequestHandler):
    server: Endpoint
    _replies: ClassVar[dict[str, Any]] = {
        "Viewer": {"viewer": {"id": "v", "entity": "team", "username": "u", "email": "", "flags": "{}", "teams": None}}
    }

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

    def _reply(self, document: Any, status: int = 200) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Nothing is there yet."""
        self._reply({})

    def do_PUT(self) -> None:
        """Keep an uploaded file."""
        self.server.uploads[self.path.removeprefix("/upload/")] = self._body()
        self._reply({})

    def do_POST(self) -> None:
        """Answer a question, or keep lines."""
        body = self._body()
        self.server.keys.add(self.headers.get("authorization", ""))
        if self.server.broken:
            self._reply({"error": "out of order"}, 503)
        elif self.path == "/graphql":
            question = json.loads(body)
            self._reply({"data": self._answer(question["operationName"], question.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self._keep(json.loads(body))
            self._reply({})
        else:
            self._reply({})

    def _answer(self, operation: str, variables: dict[str, Any]) -> Any:
        if operation == "UpsertBucket":
            self.server.runs.append(variables)
            project = {"id": "p", "name": variables["project"], "entity": ENTITY}
            bucket = {"id": "b", "name": variables["name"], "displayName": variables["displayName"],
                      "description": None, "config": None, "sweepName": None, "project": project,
                      "historyLineCount": 0}  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.server.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return self._replies.get(operation, {})

    def _keep(self, chunk: dict[str, Any]) -> None:
        for name, part in (chunk.get("files") or {}).items():
            known = self.server.lines.setdefault(name, {})
            known |= {part["offset"] + number: line for number, line in enumerate(part["content"])}
        if chunk.get("complete"):
            self.server.exit_codes.append(chunk["exitcode"])


@contextmanager
def wandb_endpoint() -> Iterator[Endpoint]:
    """Serve on loopback."""
    with Endpoint() as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever)
        thread.start()
        try:
            yield endpoint
        finally:
            endpoint.shutdown()
            thread.join()
