"""`python -m headway.inference.server`: the process behind `headway serve`.

Reads one JSON object from stdin. Writes JSON lines to stdout: {"listening", ...} once it answers, then {"running", ...}
every second while it has work, {"draining"} with the number of requests once it is told to end, and {"stopped"} with
those that are left "unfinished"; on an error a last {"error", "hint"} and the error's exit status. SIGTERM and SIGINT
end it after the requests under way.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import Field

from headway.errors import HeadwayError
from headway.http_server import Server, listen, read_key
from headway.inference.load import ModelSource
from headway.inference.server.app import make_app
from headway.inference.server.service import EngineService
from headway.inference.text_engine import EngineOptions, TextEngine
from headway.state.parent_process import end_with_parent

DRAIN_S = 30
"""How long requests under way may take once the server is told to end."""
LEAST_KEY = 8
"""Characters of an API key."""


class ServeRequest(ModelSource):
    """What to serve, where, and how much it may take."""

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    max_waiting: int = 1024
    options: dict[str, Any] = Field(default_factory=dict)
    """Of `EngineOptions`."""


def main() -> int:
    """Serve until told to end; return the exit status."""
    try:
        serve(ServeRequest.model_validate_json(sys.stdin.buffer.read()))
    except HeadwayError as error:
        _say(error=error.message, hint=error.hint)
        return error.exit_status
    return 0


def serve(request: ServeRequest) -> None:
    """Load the model, listen and answer."""
    key = None if request.api_key_file is None else read_key(request.api_key_file, LEAST_KEY)
    listener = listen(
        request.host, request.port, backlog=2048
    )  # before the model is loaded: a port that is taken is told at once
    engine = TextEngine(request.load(), EngineOptions(**request.options))
    service = EngineService(engine, max_waiting=request.max_waiting)
    config = uvicorn.Config(
        make_app(service, request.name, key), log_level="warning", timeout_graceful_shutdown=DRAIN_S, lifespan="off"
    )
    server = _Server(config, service)
    _say(**_facts(service, request.name, listener))
    threading.Thread(target=_report, args=(service,), name="report", daemon=True).start()
    asyncio.run(server.serve(sockets=[listener]))
    service.close()


class _Server(Server):
    """Refuses new requests as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, service: EngineService) -> None:
        super().__init__(config, self._drain)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the requests under way."""
        _say(draining=self._service.open)
        await super().shutdown(sockets)
        _say(stopped=True, unfinished=self._service.open)

    def _drain(self) -> None:
        self._service.draining = True


def _facts(service: EngineService, name: str, listener: socket.socket) -> dict[str, Any]:
    """Return what is served, and where."""
    loaded, engine = service.engine.loaded, service.engine.engine
    host, port = listener.getsockname()[:2]
    weights = list(loaded.module.parameters())
    return {
        "listening": f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1",
        "model": name,
        "parameters": sum(weight.numel() for weight in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "cached": loaded.takes_cache,
        "cache_tokens": engine.pool.count * engine.pool.size,
        "max_model_len": engine.model.max_length,
        "chat": loaded.chat_template is not None,
        "adapters": [] if loaded.adapters is None else list(loaded.adapters.names),
    }


def _report(service: EngineService) -> None:
    """Say every second how things stand, while there is work."""
    before, idle = service.engine.engine.counts.output_tokens, True
    while True:
        time.sleep(1)
        engine = service.engine.engine
        busy, generated = engine.busy, engine.counts.output_tokens - before
        before += generated
        if busy or not idle:
            _say(
                running=len(engine.running),
                waiting=len(engine.waiting),
                cache=round(1 - engine.pool.free / engine.pool.count, 3),
                hits=round(engine.counts.shared_tokens / max(engine.counts.prompt_tokens, 1), 3),
                tokens_per_s=generated,
            )
        idle = not busy


def _say(**facts: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the command has been killed; requests under way still finish
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    status = main()
    os._exit(status)  # tearing down torch takes seconds, and nothing is left to write
