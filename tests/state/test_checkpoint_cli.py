import io
import json

import pytest
from typer.testing import CliRunner

from headway.cli.checkpoint import app
from headway.errors import HeadwayError, ModelError, StateError
from headway.recipe import Recipe
from headway.state import Facts, begin, commit, write_shard

FACTS = Facts(cursor=640, chain="ab" * 16, data_version="v")


@pytest.fixture
def run(tmp_path):
    """A run that saved a tiny model twice."""
    import torch

    from headway.models import Decoder, init_weights
    from headway.state.tensors import named_state, pieces

    recipe = Recipe.model_validate(
        {
            "data": {"path": "nowhere", "seq": 16},
            "model": {"vocab_size": 64, "layers": 1, "dim": 16, "heads": 2, "tie_embeddings": False},
        }
    )
    folder = tmp_path / "demo-1a2b"
    (folder / "events").mkdir(parents=True)
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    torch.set_num_threads(1)
    model = Decoder(recipe.model)
    for step in (10, 20):
        init_weights(model, step)
        write_shard(begin(folder / "checkpoints", step), 0, pieces(named_state(model)))
        commit(folder / "checkpoints", step, FACTS, workers=1)
    return folder


def call(run, *args):
    """The verb's standard output and the error that would become its exit status."""
    result = CliRunner().invoke(app, [*args, "--runs", str(run.parent)])
    assert result.exception is None or isinstance(result.exception, HeadwayError), result.output
    return result.stdout, result.exception


def damage(run, step):
    file = run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_ls(run):
    text, error = call(run, "ls", "demo")
    assert error is None
    assert [line.split()[0] for line in text.splitlines()] == ["step", "10", "20", "next:"]
    assert all(len(line) <= 80 for line in text.splitlines())
    found = json.loads(call(run, "ls", "demo", "--json")[0])
    assert found["run"] == "demo-1a2b"
    assert [(c["step"], c["workers"], c["cursor"]) for c in found["checkpoints"]] == [(10, 1, 640), (20, 1, 640)]
    assert found["checkpoints"][0]["bytes"] == sum(
        path.stat().st_size for path in (run / "checkpoints/step-00000010").glob("*.safetensors")
    )


def test_ls_lists_damage_and_nothing(run):
    (run / "checkpoints/step-00000010/manifest.json").write_text("{}")
    text, error = call(run, "ls", "demo")
    assert error is None
    assert "checksum is wrong" in text
    (run.parent / "empty-0000" / "events").mkdir(parents=True)
    assert call(run, "ls", "empty")[0] == "empty-0000 has no checkpoint yet\n"


def test_verify(run):
    text, error = call(run, "verify", "demo")
    assert error is None
    assert text.startswith("step 10: ok, ")
    assert "step 20: ok, " in text
    damage(run, 20)
    text, error = call(run, "verify", "demo")
    assert isinstance(error, StateError)
    assert "1 of 2 checkpoints of demo-1a2b damaged: step 20" in error.message
    assert "step 10: ok" in text
    assert "rank-00000.safetensors is damaged: the checksum of tensor" in text
    text, error = call(run, "verify", "demo@10", "--json")
    assert error is None
    assert [(c["step"], c["ok"]) for c in json.loads(text)["checkpoints"]] == [(10, True)]
    text, error = call(run, "verify", "demo", "--json")
    assert json.loads(text)["ok"] is False
    assert "has no checkpoint of step 11" in call(run, "verify", "demo@11")[1].message


def test_export_writes_the_weights(run, tmp_path, monkeypatch, capsys):
    import torch

    from headway.models import export, read_weights
    from headway.state.tensors import read_tensors

    source = run / "checkpoints" / "step-00000020"
    request = {"checkpoint": str(source), "recipe": str(run / "recipe.json"), "tokenizer": None}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request | {"folder": str(tmp_path / "out")})))
    assert export.main() == 0
    answer = json.loads(capsys.readouterr().out)
    weights, truth = read_weights(tmp_path / "out"), read_tensors(source)
    assert (answer["step"], answer["tensors"]) == (20, len(truth))
    assert weights.keys() == truth.keys()
    assert all(torch.equal(weights[name], truth[name]) for name in truth)

    damage(run, 20)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request | {"folder": str(tmp_path / "other")})))
    assert export.main() == 1
    assert "rank-00000.safetensors is damaged" in json.loads(capsys.readouterr().out)["error"]
    assert not (tmp_path / "other").exists()


def test_export_says_what_the_process_said(run, tmp_path, monkeypatch):
    """A process that answers, complains or dies, without the seconds that importing torch takes."""
    script = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(script))

    def process(body):
        script.write_text(f"#!/bin/sh\ncat > {tmp_path}/request\n{body}\n")
        script.chmod(0o755)
        return call(run, "export", "demo@10", str(tmp_path / "out"))

    text, error = process("""echo '{"step": 10, "tensors": 12, "folder": "out", "digest": "d"}'""")
    assert error is None
    assert "step 10 of demo-1a2b, 12 tensors" in text
    request = json.loads((tmp_path / "request").read_text())
    assert request["checkpoint"] == str(run / "checkpoints" / "step-00000010")
    assert request["tokenizer"] is None
    error = process("""echo '{"error": "no room", "hint": "free some"}'; exit 1""")[1]
    assert isinstance(error, ModelError)
    assert (error.message, error.hint) == ("no room", "free some")
    assert process("kill -9 $$")[1].message == "the export stopped with exit status -9"
    assert "has no checkpoint of step 11" in call(run, "export", "demo@11", "out")[1].message


@pytest.mark.slow
def test_export_end_to_end(run, tmp_path):
    text, error = call(run, "export", "demo", str(tmp_path / "out"), "--json")
    assert error is None
    assert json.loads(text)["step"] == 20
    assert (tmp_path / "out" / "config.json").exists()
