"""Hugging Face folders in and out of checkpoints, in little memory; the `safetensors` library tells what is in them."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headway.cli.checkpoint import app
from headway.errors import HeadwayError, ModelError
from headway.recipe import Model, Recipe
from headway.state import (
    CheckpointFacts,
    Piece,
    begin_checkpoint,
    commit,
    open_checkpoint,
    shard_name,
    sharded,
    write_shard,
)
from headway.state.hf_import import import_run
from headway.state.huggingface import LazyWeight, saved_weights, write_folder
from headway.state.safetensors_file import plan_file
from headway.track import RunFolder, read_recipe, summarize
from lazy_imports import transformers

SMALL = Model(vocab_size=96, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, tie_embeddings=False)

# Run in a process of its own: what importing costs is no part of what streaming costs.
MEASURED = """
import sys, tokenizers
import headway.cli.checkpoint_view, headway.data, headway.plan, headway.state.hf_import, headway.cli.text
from headway.cli.checkpoint import app

def kb(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

before = kb("VmRSS")
app(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules, (kb("VmHWM") - before) * 1024, file=sys.stderr)
"""


def hf_folder(
    folder: Path, model: Model, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> dict[str, torch.Tensor]:
    """A folder as `transformers` would write it, of random bits; returns its tensors by their names."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        SMALL.hf_name(name): torch.randn(shape, generator=generator).to(dtype)
        for name, shape in model.tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.to_config(128) | config))
    return tensors


def call(*args: str | Path, runs: Path) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(app, [*map(str, args), "--runs", str(runs)])
    assert result.exception is None or isinstance(result.exception, HeadwayError | SystemExit), result.output
    return result.stdout, result.exception


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read by the library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and bytes_of(a[name]) == bytes_of(b[name])
        for name in a
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_there_and_back(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    model = SMALL.model_copy(update={"tie_embeddings": tied, "qk_norm": True})
    tensors = hf_folder(tmp_path / "in", model, dtype)
    text, error = call("import", tmp_path / "in", "--name", "m", runs=tmp_path / "runs")
    assert error is None
    assert f"m: {len(tensors)} tensors" in text
    saved = load_file(tmp_path / "runs/m/checkpoints/step-00000000/rank-00000.safetensors")
    names = {f"model/{name}": SMALL.hf_name(name) for name in model.tensors()}
    assert same({names[name]: tensor for name, tensor in saved.items()}, tensors)
    assert call("verify", "m", runs=tmp_path / "runs")[1] is None
    assert call("export", "m", tmp_path / "out", runs=tmp_path / "runs")[1] is None
    assert same(stored(tmp_path / "out"), tensors)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert config["tie_word_embeddings"] is tied
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_sharded_folder_comes_in_whole(tmp_path: Path) -> None:
    tensors = hf_folder(tmp_path / "in", SMALL)
    (tmp_path / "in/model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / "in" / file)
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert call("import", tmp_path / "in", "--name", "m", runs=tmp_path / "runs")[1] is None
    assert call("export", "m", tmp_path / "out", runs=tmp_path / "runs")[1] is None
    assert same(stored(tmp_path / "out"), tensors)


def test_what_follows_from_other_tensors_stays_behind(tmp_path: Path) -> None:
    tied = SMALL.model_copy(update={"tie_embeddings": True})
    tensors = hf_folder(tmp_path / "in", tied)
    derived = {"lm_head.weight": torch.zeros(96, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | derived, tmp_path / "in/model.safetensors")
    assert call("import", tmp_path / "in", "--name", "m", runs=tmp_path / "runs")[1] is None
    assert call("export", "m", tmp_path / "out", runs=tmp_path / "runs")[1] is None
    assert same(stored(tmp_path / "out"), tensors)


def cut_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of four workers that share matrices by rows and columns, and the rest by rows."""
    files: dict[int, list[Piece]] = {rank: [] for rank in range(4)}
    for name, tensor in tensors.items():
        shape, bits = tuple(tensor.shape), tensor.view(torch.int16).numpy().view("<u2")
        cuts = [(0, 0), (1, 1)] if len(shape) > 1 else [(0, 0)]
        for part in sharded(shape, (2, 2), cuts).parts:
            if len(shape) > 1 or part.holder % 2 == 0:
                data = np.ascontiguousarray(bits[part.box.slices((0,) * len(shape))])
                files[part.holder].append(
                    Piece(f"model/{name}", "bfloat16", shape, part.box.start, part.box.shape, data)
                )
    files[0].append(Piece("optimizer/x", "float32", (1,), (0,), (1,), np.zeros(1, "<u4")))
    save = begin_checkpoint(folder, 7)
    shards = [write_shard(save.partial, shard_name(rank), pieces) for rank, pieces in files.items()]
    recipe = Recipe.model_validate({"name": "cut", "model": SMALL, "data": {"path": "none", "seq": 77}})
    facts = CheckpointFacts(cursor=0, chain="c", data_version="v", recipe=recipe.model_dump(mode="json"))
    return commit(save, facts, shards, workers=4)


@pytest.mark.parametrize("band", [100, 32 << 20])
def test_pieces_become_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, band: int) -> None:
    monkeypatch.setattr("headway.state.read_checkpoint._BAND_BYTES", band)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in SMALL.tensors().items()}
    checkpoint = cut_checkpoint(tmp_path / "checkpoints", tensors)
    text, error = call("export", checkpoint, tmp_path / "out", runs=tmp_path / "none")
    assert error is None
    assert f"{len(tensors)} tensors" in text
    assert same(stored(tmp_path / "out"), {SMALL.hf_name(name): tensor for name, tensor in tensors.items()})
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 77


def test_large_models_are_written_as_several_files(tmp_path: Path) -> None:
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in SMALL.tensors().items()}
    checkpoint = open_checkpoint(cut_checkpoint(tmp_path / "checkpoints", tensors))
    reports: list[tuple[int, int]] = []
    weights = saved_weights(checkpoint, SMALL.tensors())
    write_folder(tmp_path / "out", SMALL, weights, shard_bytes=9_000, progress=lambda *now: reports.append(now))
    truth = {SMALL.hf_name(name): tensor for name, tensor in tensors.items()}
    assert same(stored(tmp_path / "out"), truth)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    assert reports[-1] == (total, total)
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == held.keys()
        assert sum(tensor.nbytes for tensor in held.values()) <= 9_000


def import_of(folder: Path, runs: Path, *options: str) -> HeadwayError:
    """The error of an import that is refused; nothing of it is left."""
    before = sorted(runs.iterdir()) if runs.exists() else []
    error = call("import", folder, *options, runs=runs)[1]
    assert isinstance(error, HeadwayError)
    assert (sorted(runs.iterdir()) if runs.exists() else []) == before
    return error


def test_folders_that_cannot_be_imported_are_told_apart(tmp_path: Path) -> None:
    folder, runs = tmp_path / "in", tmp_path / "runs"
    tensors = hf_folder(folder, SMALL)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert "model.safetensors is damaged: its tensors have" in import_of(folder, runs).message
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(missing, file)
    assert import_of(folder, runs).message == f"{folder} lacks model.norm.weight"
    save_file(tensors | {"model.norm.weight": torch.zeros(33)}, file)
    assert "norm.weight of shape (33,), the model's is (32,)" in import_of(folder, runs).message
    save_file(tensors | {"what.weight": torch.zeros(33)}, file)
    assert "has what.weight, which the model does not have" in import_of(folder, runs).message
    file.rename(folder / "pytorch_model.bin")
    assert "never opened" in import_of(folder, runs).message
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "gone.safetensors is missing" in import_of(folder, runs).message
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "unknown model_type" in import_of(folder, runs).message


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = hf_folder(tmp_path / "in", SMALL)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "in/more.safetensors")
    index = dict.fromkeys(tensors, "model.safetensors") | {"model.norm.weight": "more.safetensors"}
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "model.norm.weight in two files" in import_of(tmp_path / "in", tmp_path / "runs").message


def test_names_of_imported_runs(tmp_path: Path) -> None:
    hf_folder(tmp_path / "Small Model", SMALL)
    runs = tmp_path / "runs"
    result = json.loads(call("import", tmp_path / "Small Model", "--json", runs=runs)[0])
    assert (result["run"], result["step"], result["tokenizer"]) == ("Small-Model", 0, False)
    assert "run Small-Model already exists" in import_of(tmp_path / "Small Model", runs).message
    assert "invalid run name" in import_of(tmp_path / "Small Model", runs, "--name", "../up").message
    assert [path.name for path in runs.iterdir()] == ["Small-Model"]


def test_an_import_that_fails_midway_leaves_nothing(tmp_path: Path) -> None:
    """And the next one clears away what a killed one could not."""
    runs = tmp_path / "runs"
    (runs / ".import-dead/m/events").mkdir(parents=True)
    (runs / ".import-alive").mkdir()
    alive = os.open(runs / ".import-alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)

    def blocks() -> Iterator[memoryview]:
        yield memoryview(bytes(4))
        raise ModelError("the file is gone")

    weights = {name: LazyWeight("float32", shape, blocks) for name, shape in SMALL.tensors().items()}
    with pytest.raises(ModelError, match="is gone"):
        import_run(runs, "m", SMALL, weights, source="x", seq=8)
    assert [path.name for path in runs.iterdir()] == [".import-alive"]
    os.close(alive)
    assert call("ls", "m", runs=runs)[1] is not None


def test_an_imported_run_says_what_it_is(tmp_path: Path) -> None:
    hf_folder(tmp_path / "in", SMALL)
    assert call("import", tmp_path / "in", "--name", "m", runs=tmp_path / "runs")[1] is None
    run = RunFolder(tmp_path / "runs/m")
    summary = summarize(run)
    assert (summary.state, summary.step, summary.reason) == ("finished", 0, f"imported from {tmp_path / 'in'}")
    recipe = read_recipe(run)
    assert recipe.model == SMALL
    assert (recipe.name, recipe.data.seq, recipe.data.path) == ("m", 128, str(run.path / "no-data"))
    manifest = open_checkpoint(run.checkpoints / "step-00000000").manifest
    assert manifest.recipe == recipe.model_dump(mode="json")
    assert manifest.extra == {"imported": str(tmp_path / "in")}


def big_folder(folder: Path) -> None:
    """600 MB of bfloat16 weights, half of them one tensor, written without ever having them all."""
    model = Model(vocab_size=150_000, layers=9, dim=1024, heads=8, hidden=4096)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.to_config(256)))
    layout = plan_file((SMALL.hf_name(name), "bfloat16", shape) for name, shape in model.tensors().items())
    noise = np.random.default_rng(0).integers(0, 2**16, 1 << 23, dtype=np.uint16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(layout.header)
        for number, place in enumerate(layout.spans.values()):
            left = place.end - place.begin
            shift = 2 * number
            while left:
                shift += 2
                block = memoryview(noise).cast("B")[shift : shift + left]
                file.write(block)
                left -= len(block)


@pytest.mark.slow
def test_export_and_import_need_little_memory(tmp_path: Path) -> None:
    big_folder(tmp_path / "in")
    size = (tmp_path / "in/model.safetensors").stat().st_size
    assert size > 600e6
    for args in (["import", "in", "--name", "big"], ["export", "big", "out"]):
        command = [sys.executable, "-c", MEASURED, *args, "--runs", "runs"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        torch_too, used = done.stderr.split()[-2:]
        assert torch_too == "False"
        assert int(used) < 256e6
    assert_same_bytes(tmp_path / "in/model.safetensors", tmp_path / "out/model.safetensors")


def assert_same_bytes(first: Path, second: Path) -> None:
    """Every tensor of two files, read by the library one at a time."""
    with safe_open(first, framework="pt") as a, safe_open(second, framework="pt") as b:
        assert set(a.keys()) == set(b.keys())
        for name in a.keys():  # noqa: SIM118  (not a dict)
            x, y = a.get_tensor(name), b.get_tensor(name)
            assert x.dtype == y.dtype == torch.bfloat16
            assert torch.equal(x.view(torch.int16), y.view(torch.int16)), name


def test_experts_go_out_one_by_one(tmp_path: Path) -> None:
    """Each from its own slice of a checkpoint's pieces, whichever worker held it."""
    model = Model(family="mixtral", vocab_size=96, layers=2, dim=32, heads=4, hidden=48, experts=4, top_k=2)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in model.tensors().items()}
    checkpoint = open_checkpoint(cut_checkpoint(tmp_path / "checkpoints", tensors))
    write_folder(tmp_path / "out", model, saved_weights(checkpoint, model.tensors()))
    written = stored(tmp_path / "out")
    for layer in range(2):
        for expert in range(4):
            for hf_name, own_name in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
                name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{hf_name}.weight"
                assert torch.equal(written[name], tensors[f"layers.{layer}.mlp.experts.{own_name}"][expert])


def test_experts_come_in_one_by_one(tmp_path: Path) -> None:
    """However small each of them is beside the blocks that checksums are taken of."""
    hf_model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, sliding_window=None,
    ))  # fmt: skip
    hf_model.save_pretrained(tmp_path / "in")
    assert call("import", tmp_path / "in", "--name", "m", runs=tmp_path / "runs")[1] is None
    assert call("export", "m", tmp_path / "out", runs=tmp_path / "runs")[1] is None
    assert same(stored(tmp_path / "out"), stored(tmp_path / "in"))
