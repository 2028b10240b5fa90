"""`headway checkpoint` on small runs: what it prints, what it finds, and its exit status."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from headway.cli import checkpoint_view
from headway.cli.checkpoint import app
from headway.errors import HeadwayError, ModelError, StateError, UsageError
from headway.recipe import Recipe
from headway.state import (
    CheckpointFacts,
    FolderCheckpoint,
    Piece,
    TensorEntry,
    begin_checkpoint,
    commit,
    open_checkpoint,
    shard_name,
    sharded,
    verify_checkpoint,
    write_shard,
)
from headway.state.manifest import dump_manifest
from headway.state.object_store import open_store
from headway.state.store_checkpoint import claim_prefix

RECIPE = Recipe.model_validate(
    {
        "name": "demo",
        "data": {"path": "nowhere", "seq": 16},
        "model": {"vocab_size": 64, "layers": 1, "dim": 16, "heads": 2, "tie_embeddings": False},
    }
)
SHAPES = RECIPE.model.tensors()
MOMENT = "optimizer/layers.0.attention.q.weight/exp_avg"


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    names = {f"model/{name}": shape for name, shape in SHAPES.items()} | {MOMENT: (16, 16)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


def save(run: Path, step: int, tensors: dict[str, np.ndarray], workers: int = 2, **facts: Any) -> Path:
    """A checkpoint that each worker has some rows of every tensor of."""
    files: dict[int, list[Piece]] = {rank: [] for rank in range(workers)}
    for name, array in tensors.items():
        for part in sharded(array.shape, (workers,), [(0, 0)]).parts:
            bits = np.ascontiguousarray(array[part.box.slices((0,) * array.ndim)]).view("<u4")
            files[part.holder].append(Piece(name, "float32", array.shape, part.box.start, part.box.shape, bits))
    saving = begin_checkpoint(run / "checkpoints", step)
    shards = [write_shard(saving.partial, shard_name(rank), pieces) for rank, pieces in files.items()]
    defaults = {"cursor": 640, "chain": "ab" * 16, "data_version": "v1", "recipe": RECIPE.model_dump(mode="json")}
    mesh = {"pipeline": 1, "shard": workers, "tensor": 1}
    return commit(saving, CheckpointFacts.model_validate(defaults | {"mesh": mesh} | facts), shards, workers)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two workers that saved twice."""
    folder = tmp_path / "demo-1a2b"
    (folder / "events").mkdir(parents=True)
    (folder / "recipe.json").write_text(RECIPE.model_dump_json())
    for step in (10, 20):
        save(folder, step, arrays(step))
    return folder


def call(run: Path, *args: Any) -> tuple[str, BaseException | None]:
    """The verb's standard output and the error that would become its exit status."""
    result = CliRunner().invoke(app, [*map(str, args), "--runs", str(run.parent)])
    assert result.exception is None or isinstance(result.exception, HeadwayError | SystemExit), result.output
    return result.stdout, result.exception


def status(error: BaseException | None) -> int:
    if isinstance(error, HeadwayError):
        return error.exit_status
    return error.code if isinstance(error, SystemExit) else 0  # type: ignore[return-value]


def damage(run: Path, step: int) -> None:
    file = run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def narrow(text: str, run: Path) -> bool:
    """Whether it fits, but for how deep the folder of a test lies."""
    return max(map(len, text.replace(str(run.parent), "runs").splitlines())) <= 80


def test_ls(run: Path) -> None:
    text, error = call(run, "ls", "demo")
    assert error is None
    assert [line.split()[0] for line in text.splitlines()] == ["step", "10", "20", "next:"]
    assert narrow(text, run)
    output = json.loads(call(run, "ls", "demo", "--json")[0])
    assert output["run"] == "demo-1a2b"
    rows = [(c["step"], c["tier"], c["workers"], c["cursor"]) for c in output["checkpoints"]]
    assert rows == [(10, "disk", 2, 640), (20, "disk", 2, 640)]
    assert output["checkpoints"][0]["bytes"] == sum(
        path.stat().st_size for path in (run / "checkpoints/step-00000010").glob("*.safetensors")
    )


def test_ls_lists_damage_and_nothing(run: Path) -> None:
    (run / "checkpoints/step-00000010/manifest.json").write_text("{}")
    (run / "checkpoints/step-00000020/rank-00001.safetensors").unlink()
    text, error = call(run, "ls", "demo")
    assert error is None
    assert "      10  disk    " in text
    assert "checksum is wrong" in text
    assert "step-00000020/rank-00001.safetensors cannot be read" in text
    assert all("damage" in row for row in json.loads(call(run, "ls", "demo", "--json")[0])["checkpoints"])
    (run.parent / "empty-0000" / "events").mkdir(parents=True)
    assert call(run, "ls", "empty")[0] == "empty-0000 has no checkpoint yet\n"


def test_ls_counts_files_that_two_checkpoints_share(run: Path) -> None:
    before = open_checkpoint(run / "checkpoints/step-00000020")
    weights = np.ones((4, 4), np.float32).view("<u4")
    piece = Piece("model/still", "float32", (4, 4), (0, 0), (4, 4), weights)
    for step in (30, 40):
        saving = begin_checkpoint(run / "checkpoints", step)
        shard = write_shard(saving.partial, shard_name(0, frozen=True), [piece], before=before)
        before = open_checkpoint(
            commit(saving, CheckpointFacts(cursor=0, chain="c", data_version="v"), [shard], workers=1)
        )
    rows = json.loads(call(run, "ls", "demo", "--json")[0])["checkpoints"]
    size = (run / "checkpoints/step-00000040/rank-00000-still.safetensors").stat().st_size
    assert [row["shared_bytes"] for row in rows] == [0, 0, 0, size]
    assert "are files shared with an older checkpoint" in call(run, "ls", "demo")[0]


def test_verify(run: Path) -> None:
    text, error = call(run, "verify", "demo")
    assert error is None
    assert text.startswith("step 10: ok, ")
    assert "step 20: ok, " in text
    damage(run, 10)
    text, error = call(run, "verify", "demo")
    assert isinstance(error, StateError)
    assert "1 of 2 checkpoints of demo-1a2b is damaged: step 10" in error.message
    assert "step 20: ok" in text
    assert "rank-00000.safetensors is damaged: the checksum of tensor" in text
    text, error = call(run, "verify", "demo@20", "--json")
    assert status(error) == 0
    assert [(c["step"], c["ok"]) for c in json.loads(text)["checkpoints"]] == [(20, True)]
    text, error = call(run, "verify", "demo", "--json")
    assert status(error) == 1
    assert json.loads(text)["ok"] is False
    _, error = call(run, "verify", "demo@11")
    assert isinstance(error, StateError)
    assert "has no checkpoint of step 11" in error.message


def test_verify_accepts_a_folder(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "checkpoints/step-00000010", tmp_path / "elsewhere")
    text, error = call(run, "verify", tmp_path / "elsewhere")
    assert error is None
    assert text.startswith(f"{tmp_path / 'elsewhere'}: ok, ")
    (tmp_path / "elsewhere/rank-00001.safetensors").unlink()
    _, error = call(run, "verify", tmp_path / "elsewhere")
    assert isinstance(error, StateError)
    _, error = call(run, "verify", tmp_path / "nowhere")
    assert isinstance(error, UsageError)
    assert "no folder" in error.message


def test_progress_counts_every_byte(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "checkpoints/step-00000010"
    progress: list[tuple[int, int]] = []
    verify_checkpoint(checkpoint_view.CountingSource(FolderCheckpoint(path), lambda *now: progress.append(now)))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert progress[-1] == (size, size)
    monkeypatch.setattr(checkpoint_view, "PATIENCE_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with checkpoint_view.progress_bar("checking", quiet=False) as draw:
        draw(1, 2)
        draw(2, 2)


def test_show(run: Path) -> None:
    text, error = call(run, "show", "demo")
    assert error is None
    assert narrow(text, run)
    tensors = arrays(20)
    weights = sum(array.nbytes for name, array in tensors.items() if name.startswith("model/"))
    for words in (
        "step       20, saved 20",
        f"digest     {verify_checkpoint(run / 'checkpoints/step-00000020').digest}",
        f"chain      {'ab' * 16}",
        "cursor     640 samples",
        "data       version v1",
        "recipe     demo",
        "mesh       shard 2, 2 workers",
        f"weights    {weights / 1000:.4g} kB in {len(SHAPES)} tensors: float32 {weights / 1000:.4g} kB",
        "optimizer  1.024 kB in 1 tensor: float32 1.024 kB",
        "files      rank-00000.safetensors  ",
        "           rank-00001.safetensors  ",
    ):
        assert words in text
    output = json.loads(call(run, "show", "demo@10", "--json")[0])
    assert (output["step"], output["cursor"], output["workers"]) == (10, 640, 2)
    assert output["recipe"] == RECIPE.model_dump(mode="json")
    assert output["num_tensors"] == len(tensors)
    assert output["files"] == {
        path.name: path.stat().st_size for path in (run / "checkpoints/step-00000010").glob("*.safetensors")
    }


def test_show_lists_tensors(run: Path) -> None:
    text, error = call(run, "show", "demo", "--tensors")
    assert error is None
    assert narrow(text, run)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "model/embed.weight float32 64x16 2 x rows 4.096 kB" in lines
    assert "model/norm.weight float32 16 2 x rows 64 B" in lines
    assert MOMENT in " ".join(lines)
    output = json.loads(call(run, "show", run / "checkpoints/step-00000010", "--tensors", "--json")[0])
    assert {row["name"]: (row["shape"], row["bytes"]) for row in output["tensors"]} == {
        name: (list(array.shape), array.nbytes) for name, array in arrays(10).items()
    }


@pytest.mark.parametrize(
    ("shape", "mesh", "cuts", "words"),
    [
        ((8, 8), (1,), [], "whole"),
        ((), (1,), [], "whole"),
        ((8, 8), (2,), [(0, 0)], "2 x rows"),
        ((8, 8), (3,), [(0, 1)], "3 x columns"),
        ((8, 8), (2, 4), [(0, 0), (1, 1)], "rows x columns 2 x 4"),
        ((8, 8, 8), (2, 4), [(0, 0), (1, 2)], "rows x dim 2 2 x 4"),
        ((8, 8), (2, 2), [(0, 0), (1, 0)], "4 x rows"),
        ((5, 8), (4,), [(0, 0)], "3 x rows"),
    ],
)
def test_how_a_tensor_is_cut(shape: Any, mesh: Any, cuts: Any, words: str) -> None:
    def piece(box: Any) -> dict[str, Any]:
        return {"file": shard_name(0), "offset": 0, "start": box.start, "shape": box.shape, "xxh3": []}

    boxes = {part.box for part in sharded(shape, mesh, cuts).parts}
    entry = {"dtype": "float32", "shape": shape, "digest": "0" * 16, "pieces": [piece(box) for box in boxes]}
    assert checkpoint_view.cut_of(TensorEntry.model_validate(entry)) == words


def test_uneven_pieces_are_counted() -> None:
    boxes = [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]
    pieces = [{"file": shard_name(0), "offset": 0, "start": a, "shape": n, "xxh3": []} for a, n in boxes]
    entry = {"dtype": "float32", "shape": (4, 4), "digest": "0" * 16, "pieces": pieces}
    assert checkpoint_view.cut_of(TensorEntry.model_validate(entry)) == "3 pieces"


def test_diff(run: Path) -> None:
    other = run.parent / "other-2b3c"
    (other / "events").mkdir(parents=True)
    same = save(other, 20, arrays(20), workers=3)
    text, error = call(run, "diff", "demo", "other")
    assert error is None
    assert text.startswith("step 20 of demo-1a2b and step 20 of other-2b3c: equal, ")
    assert "same digest" in text.replace("\n  ", " ")
    assert "mesh       shard 2 | shard 3" in text

    changed = arrays(20)
    changed[MOMENT][3, 4] += 0.5
    changed["model/norm.weight"][:2] *= 2
    recipe = RECIPE.model_copy(update={"seed": 7}).model_dump(mode="json")
    save(other, 30, changed, cursor=650, recipe=recipe)
    text, error = call(run, "diff", "demo@20", "other@30")
    assert status(error) == 1
    assert narrow(text, run)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "2 differ" in " ".join(lines)
    assert any(line.endswith("1 of 256 0.5 " + f"{ratio(20, changed):.2g}") for line in lines)
    assert any(line.startswith("model/norm.weight 2 of 16 ") and line.endswith(" 0.5") for line in lines)
    assert lines[-3:] == ["step 20 | 30", "cursor 640 | 650", "recipe seed: 0 | 7"]
    output = json.loads(call(run, "diff", same, "other@30", "--json")[0])
    assert (output["equal"], output["by"], len(output["differing"])) == (False, "contents", 2)
    assert status(call(run, "diff", "demo@10", "demo@20")[1]) == 1


def ratio(seed: int, changed: dict[str, np.ndarray]) -> float:
    """The relative distance of the moment's one changed element."""
    a, b = (float(array[MOMENT][3, 4]) for array in (arrays(seed), changed))
    return abs(a - b) / max(abs(a), abs(b))


def test_diff_of_other_tensors(run: Path) -> None:
    tensors = {name: array for name, array in arrays(20).items() if name != "model/norm.weight"}
    tensors["model/embed.weight"] = np.zeros((8, 8), np.float32)
    tensors |= {f"extra/{i}": np.zeros(2, np.float32) for i in range(5)}
    save(run, 30, tensors)
    text, error = call(run, "diff", "demo@20", "demo@30")
    assert status(error) == 1
    assert narrow(text, run)
    assert "only in step 20 of demo-1a2b: model/norm.weight" in text
    assert "only in step 30 of demo-1a2b: extra/0, extra/1, extra/2 and 2 more" in text
    assert "model/embed.weight: float32 64x16 | float32 8x8" in text


def test_diff_shows_the_largest_twenty(run: Path) -> None:
    tensors = {f"model/{i}": np.zeros(3, np.float32) for i in range(30)}
    save(run, 30, tensors)
    save(run, 40, {name: array + i for i, (name, array) in enumerate(tensors.items())})
    text, _ = call(run, "diff", "demo@30", "demo@40")
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  model/")]
    assert shown == [f"model/{i}" for i in range(29, 9, -1)]
    assert "  and 9 more (--json lists all)" in text
    assert len(json.loads(call(run, "diff", "demo@30", "demo@40", "--json")[0])["differing"]) == 29


def test_export(run: Path, tmp_path: Path) -> None:
    text, error = call(run, "export", "demo@10", tmp_path / "out")
    assert error is None
    assert text.startswith(f"{tmp_path / 'out'}: step 10 of demo-1a2b, {len(SHAPES)} tensors\nnext: transformers.")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == {RECIPE.model.hf_name(name) for name in SHAPES}
    for name in SHAPES:
        np.testing.assert_array_equal(written[RECIPE.model.hf_name(name)], arrays(10)[f"model/{name}"])
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 16
    output = json.loads(call(run, "export", "demo", tmp_path / "more", "--json")[0])
    assert (output["step"], output["tensors"]) == (20, len(SHAPES))
    _, error = call(run, "export", "demo", tmp_path / "more")
    assert isinstance(error, ModelError)
    assert "already exists" in error.message


def test_export_of_a_damaged_checkpoint_leaves_nothing(run: Path, tmp_path: Path) -> None:
    file = run / "checkpoints/step-00000020/rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    place = open_checkpoint(file.parent).manifest.tensors["model/norm.weight"].pieces[1].offset
    content[place] ^= 1
    file.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    _, error = call(run, "export", "demo", tmp_path / "out")
    assert isinstance(error, StateError)
    assert "rank-00001.safetensors is damaged: the checksum of tensor model/norm.weight is wrong" in error.message
    assert sorted(tmp_path.iterdir()) == before


def test_export_uses_the_runs_recipe_if_the_checkpoint_has_none(run: Path, tmp_path: Path) -> None:
    save(run, 30, arrays(30), recipe={})
    assert call(run, "export", "demo@30", tmp_path / "out")[1] is None
    shutil.move(run / "checkpoints/step-00000030", tmp_path / "alone")
    _, error = call(run, "export", tmp_path / "alone", tmp_path / "none")
    assert isinstance(error, HeadwayError)
    assert "recipe.json: No such file" in error.message


def test_custom_models_are_not_exported(run: Path, tmp_path: Path) -> None:
    own = {"name": "own", "model": {"class": "a.b:C"}, "data": {"path": "x"}}
    save(run, 30, arrays(30), recipe=own)
    _, error = call(run, "export", "demo", tmp_path / "out")
    assert isinstance(error, ModelError)
    assert "only Headway's own decoders" in error.message


# -- addresses in a store


@pytest.fixture
def stored(run: Path, tmp_path: Path) -> str:
    """The address of the run in a store, with both of its checkpoints."""
    url = f"{(tmp_path / 'store').as_uri()}/demo"
    for folder in sorted((run / "checkpoints").iterdir()):
        manifest = open_checkpoint(folder).manifest
        files = {
            name: file.model_copy(update={"key": f"{folder.name}-writer/{name}"})
            for name, file in manifest.files.items()
        }
        for name, file in files.items():
            open_store(url).put(file.key, memoryview((folder / name).read_bytes()))
        content = dump_manifest(manifest.model_copy(update={"files": files}))
        open_store(url).put(f"{folder.name}.json", memoryview(content))
    return url


def test_ls_of_a_store_shows_workers_and_digests(run: Path, stored: str) -> None:
    on_disk = json.loads(call(run, "ls", run.name, "--json")[0])["checkpoints"]
    rows = json.loads(call(run, "ls", stored, "--json")[0])["checkpoints"]
    for key in ("step", "workers", "digest", "chain", "tensors", "bytes"):
        assert [row[key] for row in rows] == [row[key] for row in on_disk], key
    table, error = call(run, "ls", stored)
    assert error is None
    assert [line.split()[-1] for line in table.splitlines()[1:3]] == [row["digest"][:16] for row in rows]
    assert f"next: headway checkpoint verify {stored}" in table
    (only,) = json.loads(call(run, "ls", f"{stored}/step-20", "--json")[0])["checkpoints"]
    assert only["step"] == 20
    path = Path(stored.removeprefix("file://")) / "step-00000010.json"
    path.write_text("{")
    damaged, intact = json.loads(call(run, "ls", stored, "--json")[0])["checkpoints"]
    assert "damaged" in damaged["damage"]
    assert "damage" not in intact


@pytest.mark.parametrize("end", ["", "/", "/step-20", "/step-00000020/", "@20"])
def test_verify_and_show_take_any_address_of_a_run_or_step(run: Path, stored: str, end: str) -> None:
    output, error = call(run, "verify", stored + end, "--json")
    assert getattr(error, "code", 0) == 0, output
    results = json.loads(output)["checkpoints"]
    assert [result["step"] for result in results] == ([20] if "20" in end else [10, 20])
    assert {result["workers"] for result in results} == {2}
    digest = open_checkpoint(run / "checkpoints" / "step-00000020").manifest.digest
    assert results[-1]["digest"] == digest
    text, _ = call(run, "verify", stored + end)
    assert f"ok, 2 workers, {results[-1]['tensors']} tensors" in text
    assert digest[:16] in text
    assert json.loads(call(run, "show", stored + end, "--json")[0])["digest"] == digest


def test_verify_of_a_store_names_damage_and_absence(run: Path, stored: str) -> None:
    shard = next(Path(stored.removeprefix("file://")).glob("step-00000020-*/rank-00001.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    output, error = call(run, "verify", stored)
    assert "step 10: ok" in output
    assert "rank-00001.safetensors is damaged" in output
    assert isinstance(error, StateError)
    assert "1 of 2 checkpoints" in error.message
    for verb in ("verify", "ls", "show"):
        _, error = call(run, verb, f"{stored}-none")
        assert isinstance(error, StateError)
        assert ("there is no checkpoint at" in error.message, error.exit_status) == (True, 2), verb
    assert claim_prefix(open_store(f"{stored}-new"), "new-0001")
    output, error = call(run, "ls", f"{stored}-new")
    assert (error, output.endswith("-new has no checkpoint yet\n")) == (None, True), "a run that has saved nothing"
