"""The Hub, as huggingface_hub sees it, from a small server on loopback: pinned, cached, offline, safetensors only."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.hf_api
import numpy as np
import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from headway.agent.launch.resolve import resolve_model
from headway.cli.checkpoint import app as checkpoint_app
from headway.cli.model_process import model_of
from headway.data import BuildOptions, build_dataset
from headway.errors import ModelError, UsageError
from headway.recipe import Recipe
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
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    constants = huggingface_hub.constants
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(sys.modules["huggingface_hub.hf_api"].api, "endpoint", url)  # type: ignore[attr-defined]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def model_files() -> dict[str, bytes]:
    """A tiny Llama's folder, with a pickle and code beside it that must not be fetched."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 64,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu"}  # fmt: skip
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": b"weights"}
    return {**files, "pytorch_model.bin": b"pickle", "modeling_own.py": b"raise SystemExit"}


def test_model_is_pinned_cached_and_found_offline(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model_files()
    hub.files["models", "org/tiny"] = {FIRST: first, SECOND: {**first, "config.json": b"{}"}}
    folder = fetch_model(parse_hub("hf:org/tiny"))
    assert hub_of(folder) == f"hf:org/tiny@{FIRST}"
    assert {path.name for path in folder.iterdir()} == first.keys() - {"pytorch_model.bin", "modeling_own.py"}
    assert not [path for path in hub.asked if "pytorch_model" in path or "modeling" in path]
    assert (folder / "config.json").read_bytes() == first["config.json"]

    source, _ = model_of("hf:org/tiny@main", None)
    assert Path(source["folder"]) == folder
    resolved = resolve_model(base_model(), tmp_path)
    assert resolved.init is not None
    assert hub_of(resolved.init) == f"hf:org/tiny@{FIRST}"
    assert resolved.dim == 32

    hub.branches["main"] = SECOND
    assert fetch_model(parse_hub(f"hf:org/tiny@{FIRST}")) == folder
    assert hub_of(fetch_model(parse_hub("hf:org/tiny"))) == f"hf:org/tiny@{SECOND}"

    asked = len(hub.asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch_model(parse_hub(f"hf:org/tiny@{FIRST}")) == folder
    assert fetch_model(parse_hub("hf:org/tiny")).name == SECOND
    with pytest.raises(ModelError, match="not in the cache"):
        fetch_model(parse_hub("hf:org/other"))
    assert len(hub.asked) == asked


def base_model() -> Any:
    return Recipe.model_validate({"model": {"init": "hf:org/tiny"}, "data": {"path": "x"}}).model


def test_interrupted_download_is_completed(hub: Any, tmp_path: Path) -> None:
    first = model_files()
    hub.files["models", "org/tiny"] = {FIRST: first}
    folder = fetch_model(parse_hub("hf:org/tiny"))
    weights = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    weights.resolve().unlink()
    weights.unlink()
    assert fetch_model(parse_hub(f"hf:org/tiny@{FIRST}")) == folder
    assert weights.read_bytes() == first[weights.name]


def test_weights_that_could_execute_code_are_refused(hub: Any) -> None:
    hub.files["models", "org/old"] = {FIRST: {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}
    with pytest.raises(ModelError, match="no weights in safetensors"):
        fetch_model(parse_hub("hf:org/old"))
    assert not [path for path in hub.asked if "pytorch_model" in path]


def test_files_of_a_dataset_are_sources(hub: Any, tmp_path: Path) -> None:
    rows = b"".join(json.dumps({"text": f"row {number} of a small text"}).encode() + b"\n" for number in range(40))
    files = {"train/a.jsonl": rows, "train/b.txt": b"some text", "load.py": b"raise SystemExit", "README.md": b"#"}
    hub.files["datasets", "org/rows"] = {FIRST: files}
    found = fetch_data(parse_hub("hf:org/rows"))
    assert [path.name for path in found] == ["a.jsonl", "b.txt"]
    assert [path.name for path in fetch_data(parse_hub("hf:org/rows@main:train/*.txt"))] == ["b.txt"]
    assert hub_sources(["x.txt", "hf:org/rows:*.jsonl"]) == ["x.txt", str(found[0])]
    build_dataset(tmp_path / "data", [str(path) for path in found], BuildOptions(vocab_size=280))
    recorded = json.loads((tmp_path / "data" / "sources.json").read_bytes())["files"]
    assert {hub_of(file["path"]) for file in recorded} == {f"hf:org/rows@{FIRST}"}
    with pytest.raises(UsageError, match="no file that matches"):
        fetch_data(parse_hub("hf:org/rows:*.parquet"))


def test_what_is_not_there_is_a_sentence(hub: Any) -> None:
    hub.files["models", "org/tiny"] = {FIRST: {}}
    for ref, message in (("hf:org/none", "there is no hf:org/none"), ("hf:org/tiny@v9", "has no revision 'v9'")):
        with pytest.raises(ModelError, match=message):
            fetch_model(parse_hub(ref))


@pytest.mark.parametrize("ref", ["hf:", "hf:a/b/c", "hf:../x", "hf:org/na me", "hf:org/x@", "hf:org/x@a/../b", "org/x"])
def test_malformed_addresses_are_refused(ref: str) -> None:
    with pytest.raises(UsageError, match="no address on the Hub"):
        parse_hub(ref)


def test_paths_outside_of_the_cache_are_not_the_hubs() -> None:
    assert hub_of("/a/models--org--x/snapshots/main") is None
    assert hub_of("/a/b") is None
    assert hub_of(f"/c/models--org--a-b/snapshots/{FIRST}/x.json") == f"hf:org/a-b@{FIRST}"
    assert hub_of(f"/c/models--gpt2/snapshots/{FIRST}") == f"hf:gpt2@{FIRST}"


def tiny_weights() -> bytes:
    """Weights of the tiny Llama of `model_files`, all different."""
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        parts = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
                 "self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32),
                 "mlp.down_proj": (32, 64), "input_layernorm": (32,), "post_attention_layernorm": (32,)}  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    draw = np.random.default_rng(0)
    return save({name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def headway(hub: Any, home: Path, *words: str) -> Any:
    """Run a command as a user does, with the Hub's address and cache in the environment only."""
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home),
           "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "headway", *words, "--json"], env=env, cwd=home, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_commands_take_addresses_and_the_environment_says_where_the_hub_is(hub: Any, tmp_path: Path) -> None:
    files = {**model_files(), "model.safetensors": tiny_weights()}
    hub.files["models", "org/tiny"] = {FIRST: files}
    plan = headway(hub, tmp_path, "plan", "hf:org/tiny", "--serve", "--on", "h200x1", "--prompt", "8", "--output", "8")
    assert plan["name"] == f"hf:org/tiny@{FIRST}"
    assert plan["model"]["dim"] == 32
    imported = headway(hub, tmp_path, "checkpoint", "import", f"hf:org/tiny@{FIRST}", "--runs", str(tmp_path / "runs"))
    assert imported["run"] == "tiny"
    assert imported["tensors"] == 20
    assert not [path for path in hub.asked if "pytorch_model" in path or "modeling" in path]


def test_base_of_adapters_may_be_on_the_hub(hub: Any, tmp_path: Path) -> None:
    hub.files["models", "org/tiny"] = {FIRST: {**model_files(), "model.safetensors": tiny_weights()}}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    adapter = {name.format("A"): np.ones((2, 32), np.float32), name.format("B"): np.ones((32, 2), np.float32)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "bias": "none",
              "layers_to_transform": [0], "base_model_name_or_path": "elsewhere", "task_type": "CAUSAL_LM"}  # fmt: skip
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(save(adapter))
    out = tmp_path / "out"
    result = CliRunner().invoke(checkpoint_app, ["merge", str(folder), str(out), "--base", "hf:org/tiny", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    merged = {key: value for path in out.glob("*.safetensors") for key, value in load(path.read_bytes()).items()}
    base = load(tiny_weights())
    key = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(merged[key], base[key] + 2.0, rtol=1e-6)  # 1 @ 1 over rank 2, scaled by 2 / 2
    np.testing.assert_array_equal(merged["model.norm.weight"], base["model.norm.weight"])
