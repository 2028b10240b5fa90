"""`headway sample` from a run's folder to text, through the real process."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from headway.cli.sample import sample as sample_command
from headway.data.tokenizer import TextTokenizer, train_tokenizer
from headway.errors import HeadwayError, ModelError, RunError, StateError, UsageError
from headway.inference.request_process import answer_request
from headway.inference.sample import SampleRequest, sample
from headway.models import Decoder, empty_decoder, init_weights
from headway.recipe import Data, Model, Recipe, Train
from headway.state import CheckpointFacts, begin_checkpoint, commit, shard_name, write_shard
from headway.state.tensors import named_state, pieces
from headway.track import create_run
from lazy_imports import openai

MODEL = Model(vocab_size=320, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)
TEXT = "def headway(steps):\n    return steps + 1  # Zeit läuft\n"


class Fixture:
    """A run with checkpoints of steps 1 and 2, each with weights of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, create_run(root, "tiny", "tiny-1").path
        data = Data(path=str(root / "data"))
        recipe = Recipe(name="tiny", model=MODEL, data=data, train=Train(device="cpu"))
        (self.path / "recipe.json").write_text(recipe.model_dump_json())
        self.tokenizer: TextTokenizer = train_tokenizer([TEXT] * 3, vocab_size=300)
        (self.path / "tokenizer.json").write_bytes(self.tokenizer.to_bytes())
        (self.path / "data.json").write_text(json.dumps({"end_of_text": self.tokenizer.end_of_text}))
        self.decoders = {step: self.save(step) for step in (1, 2)}

    def save(self, step: int) -> Decoder:
        decoder = empty_decoder(MODEL)
        init_weights(decoder, seed=step)
        checkpoints = self.path / "checkpoints"
        save = begin_checkpoint(checkpoints, step)
        shard = write_shard(save.partial, shard_name(0), pieces(named_state(decoder)))
        commit(save, CheckpointFacts(cursor=0, chain="", data_version="0" * 16), [shard], 1)
        return decoder

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:08d}"

    def greedy(self, step: int, prompt: str, max_tokens: int) -> str:
        ids = self.tokenizer.encode(prompt).tolist() or [self.tokenizer.end_of_text]
        generated: list[int] = []
        for _ in range(max_tokens):
            with torch.no_grad():
                logits = self.decoders[step](torch.tensor([[*ids, *generated]]))[0, -1]
            token = int(logits[: self.tokenizer.vocab_size].argmax())
            if token == self.tokenizer.end_of_text:
                break
            generated.append(token)
        whole = self.tokenizer.decode([*ids, *generated])
        return whole[len(self.tokenizer.decode(ids)) :]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return Fixture(tmp_path_factory.mktemp("runs"))


def ask(run: Fixture, step: int, prompts: list[str], **changes: Any) -> list[str]:
    request = SampleRequest(
        run=run.path,
        checkpoint=run.checkpoint(step),
        prompts=prompts,
        max_tokens=12,
        temperature=0,
        **changes,
    )
    texts = [""] * len(prompts)
    for piece in sample(request):
        texts[piece["prompt_index"]] += piece["text"]
    return texts


@pytest.mark.parametrize("step", [1, 2])
def test_text_is_the_model_s(run: Fixture, step: int) -> None:
    prompts = ["def head", "", "# Zeit"]
    assert ask(run, step, prompts) == [run.greedy(step, prompt, 12) for prompt in prompts]


def test_the_end_of_text_is_the_data_s_whatever_its_name(run: Fixture) -> None:
    first = next(iter(run.tokenizer.encode(run.greedy(1, "def", 12)).tolist()))
    data = run.path / "data.json"
    before = data.read_text()
    data.write_text(json.dumps({"end_of_text": first}))
    try:
        assert ask(run, 1, ["def"]) == [""], "the first token made ends the text"
        data.write_text("{}")
        with pytest.raises(RunError, match=r"data.json is not a valid dataset manifest"):
            ask(run, 1, ["def"])
    finally:
        data.write_text(before)


def test_checkpoint_of_another_model_is_refused(run: Fixture, tmp_path: Path) -> None:
    recipe = json.loads((run.path / "recipe.json").read_text())
    recipe["model"]["layers"] = 3
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    for name in ("tokenizer.json", "data.json"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    with pytest.raises(ModelError, match="does not match the model in the run's recipe"):
        list(sample(SampleRequest(run=tmp_path, checkpoint=run.checkpoint(1), prompts=["x"])))
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(RunError, match="not a valid recipe: data: ") as caught:
        list(sample(SampleRequest(run=tmp_path, checkpoint=run.checkpoint(1), prompts=["x"])))
    assert "\n" not in caught.value.message


def test_the_process_reports_errors_as_its_last_line(
    run: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"run": str(tmp_path), "checkpoint": str(run.checkpoint(1)), "prompts": ["x"]}

    class Stdin:
        class buffer:  # noqa: N801
            read = staticmethod(lambda: json.dumps(request).encode())

    monkeypatch.setattr("sys.stdin", Stdin)
    assert answer_request(SampleRequest, sample) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "recipe.json" in last["error"]
    assert "\n" not in last["error"]


def command(run: Fixture, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(sample_command)
    return CliRunner().invoke(app, [*arguments, "--runs", str(run.root)])


def test_the_command_prints_prompt_and_text(run: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(request: dict[str, Any]) -> Iterator[tuple[int, str]]:
        return ((piece["prompt_index"], piece["text"]) for piece in sample(SampleRequest(**request)))

    monkeypatch.setattr("headway.cli.sample._ask", in_this_process)
    result = command(run, "tiny@1", "--prompt", "def head", "--prompt", "#", "--max-tokens", "9", "--temperature", "0")
    assert result.exit_code == 0, result.exception
    first, second = (prompt + run.greedy(1, prompt, 9) for prompt in ("def head", "#"))
    assert result.stdout == f"{first}\n\n{second}\n"


@pytest.mark.slow
def test_the_command_asks_the_process(run: Fixture) -> None:
    result = command(run, "last", "--prompt", "def", "--max-tokens", "9", "--temperature", "0", "--json")
    samples = [{"prompt": "def", "text": run.greedy(2, "def", 9)}]
    assert json.loads(result.stdout) == {"run": "tiny-1", "step": 2, "samples": samples}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tiny@7"], StateError),
        (["tiny", "--step", "7"], StateError),
        (["tiny@1", "--step", "2"], UsageError),
    ],
)
def test_wrong_steps_are_refused_before_anything_starts(
    run: Fixture, arguments: list[str], error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert isinstance(command(run, *arguments).exception, error)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("cat > /dev/null; echo out of luck >&2; kill -9 $$", "the sampling process failed with signal 9: out of luck"),
        ("cat > /dev/null; exit 3", "the sampling process failed with exit status 3: no output"),
        ("exec 0<&-; sleep 0.2; exit 4", "the sampling process failed with exit status 4: no output"),
        ("""cat > /dev/null; echo '{"error": "no such thing", "hint": "try"}'; exit 2""", "no such thing"),
    ],
)
def test_failed_process_is_reported_in_one_sentence(
    run: Fixture, script: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\n{script}\n")
    stub.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stub))
    error = command(run, "tiny", "--prompt", "x" * 100_000).exception  # more than a pipe holds
    assert isinstance(error, HeadwayError)
    assert (error.message, error.exit_status) == (message, 2 if error.hint else 1)


@pytest.mark.slow
def test_serve_answers_and_finishes_what_is_under_way_when_it_is_told_to_end(run: Fixture) -> None:
    """The command itself, from a run to the real client; SIGTERM comes in the middle of a stream."""
    words = ["serve", "tiny@2", "--port", "0", "--json", "--runs", str(run.root)]
    program = [sys.executable, "-c", "from headway.cli.main import main; main()", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            facts = json.loads(server.stdout.readline())
            client = openai.OpenAI(base_url=facts["listening"], api_key="none", max_retries=0)
            asked = {"model": "tiny-1@2", "prompt": "def", "temperature": 0}
            assert client.completions.create(**asked, max_tokens=12).choices[0].text == run.greedy(2, "def", 12)
            stream = client.completions.create(**asked, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
            events = iter(stream)
            next(events)
            server.send_signal(signal.SIGTERM)
            rest = list(events)
            assert rest[-1].choices[0].finish_reason == "length"
            assert len(rest) == 399, "no token of the answer is missing"
            assert server.wait() == 0
        finally:
            server.kill()
