"""The Hub, as huggingface_hub sees it, from a small server on loopback: pinned, cached, offline, safetensors only."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
from conftest import TINY

from headway.agent.launch.prepare import resolve_model
from headway.cli.model_process import model_of
from headway.errors import HeadwayError, ModelError, UsageError
from headway.recipe import Model, Recipe
from headway.track.hub import fetch_data, fetch_model, hub_of, hub_sources, parse_hub

FIRST, SECOND = "1" * 40, "2" * 40


class Hub(BaseHTTPRequestHandler):
    """What snapshot_download needs of the Hub's API."""

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def respond(self, body: bool) -> None:
        server: Any = self.server
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        server.asked.append("/".join(path))
        if path[0] == "api":
            kind, repo = path[1], "/".join(path[2:4])
            revision = path[path.index("revision") + 1] if "revision" in path else "main"
            files = server.files.get((kind, repo))
            commit = server.branches.get(revision, revision)
            if files is None or commit not in files:
                code = "RepoNotFound" if files is None else "RevisionNotFound"
                return self.answer(404, b"{}", {"X-Error-Code": code}, body)
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files[commit].items()
            ]
            if "tree" in path:
                return self.answer(200, json.dumps(listed).encode(), {}, body)
            info = {"id": repo, "sha": commit, "siblings": [{"rfilename": item["path"]} for item in listed],
                    "tags": [], "private": False, "downloads": 0, "likes": 0}  # fmt: skip
            return self.answer(200, json.dumps(info).encode(), {}, body)
        kind = "datasets" if path[0] == "datasets" else "models"
        path = path[1:] if kind == "datasets" else path
        commit, name = path[3], "/".join(path[4:])
        data = server.files[kind, "/".join(path[:2])][server.branches.get(commit, commit)][name]
        etag = hashlib.sha256(data).hexdigest()
        return self.answer(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": server.branches.get(commit, commit)}, body)

    def answer(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.branches, server.asked = {}, {"main": FIRST}, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    constants = huggingface_hub.constants
    url = f"http://127.0.0.1:{server.server_port}"
    for module in [constants, huggingface_hub.hf_api, huggingface_hub.file_download]:
        if hasattr(module, "ENDPOINT"):
            monkeypatch.setattr(module, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def model_files(tmp_path: Path, seed: int = 0) -> dict[str, bytes]:
    """A tiny Llama's folder, with a pickle and code beside it that nobody may fetch."""
    import torch

    from headway.models import empty_decoder, init_weights, write_folder

    values = {key: value for key, value in TINY["model"].items()}
    model = Recipe.model_validate({"model": {**values, "vocab_size": 64}, "data": {"path": "x"}}).model
    torch.manual_seed(seed)
    decoder = empty_decoder(model)
    init_weights(decoder, seed)
    write_folder(tmp_path / f"hf-{seed}", model, decoder)
    files = {path.name: path.read_bytes() for path in (tmp_path / f"hf-{seed}").iterdir()}
    return {**files, "pytorch_model.bin": b"pickle", "modeling_own.py": b"raise SystemExit"}
