"""The post-training guides as a newcomer walks them: the commands that each recipe names, with fewer steps."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lazy_imports import openai

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("demo", "sft", "sft-tasks", "dpo", "orpo", "simpo", "kto", "reward", "lora", "distill")
"""In the order of the guides: each starts from what the ones before it have made."""
FEWER = ("train.warmup_steps=1", "checkpoint.every_steps=3", "eval.every_steps=3", "train.batch=2")
PROGRAM = [sys.executable, "-c", "from headway.cli.main import main; main()"]


class Newcomer:
    """A folder with nothing but the documentation and the examples of the repository, to type commands in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("docs", "examples"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADWAY_")}

    def type(self, command: str, *more: str) -> str:
        """Run a command line; return what it prints."""
        words = [word for word in shlex.split(command) if word != "headway"]
        program = [sys.executable, *words[1:]] if words[0] == "python" else [*PROGRAM, *words]
        done = subprocess.run(
            [*program, *more], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    @contextmanager
    def serving(self, *words: str) -> Iterator[Any]:
        """Serve a model; yield a client."""
        arguments = [*PROGRAM, "serve", *words, "--port", "0", "--json"]
        with subprocess.Popen(
            arguments, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stdout is not None
                address = json.loads(server.stdout.readline())["listening"]
                with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
                    yield client
                server.send_signal(signal.SIGTERM)
                assert server.wait() == 0
            finally:
                server.kill()


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    """After every recipe's commands."""
    newcomer, typed = Newcomer(tmp_path_factory.mktemp("newcomer")), set[str]()
    for name in RECIPES:
        commands = json.loads(newcomer.type(f"recipe cp {name} --json"))["next"]
        for command in commands:
            if command in typed:  # the demo's export is where several begin
                continue
            typed.add(command)
            fewer = [f"train.{'epochs=0.04' if name.startswith('sft') else 'steps=3'}", *FEWER]
            settings = [word for setting in fewer for word in ("--set", setting)] if " train " in command else []
            newcomer.type(command.replace("/*.py", "/json/*.py"), *settings)
    return newcomer


@pytest.mark.slow
def test_every_recipe_trains_after_its_commands(newcomer: Newcomer) -> None:
    runs = json.loads(newcomer.type("runs --json"))
    assert len(runs) == len(RECIPES)
    assert {run["state"] for run in runs} == {"finished"}


@pytest.mark.slow
def test_a_tuned_model_answers_chats_and_is_evaluated(newcomer: Newcomer) -> None:
    rows = [json.loads(line) for line in (newcomer.folder / "data/questions/chats.jsonl").read_text().splitlines()][:5]
    task = newcomer.folder / "questions.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = json.loads(newcomer.type("eval sft --tasks questions.jsonl --max-tokens 4 --json"))
    assert [(entry["task"], entry["questions"]) for entry in scores["tasks"]] == [("questions", 5)]
    with newcomer.serving("dpo") as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(model=model, messages=rows[0]["messages"][:1], max_tokens=4)
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 4


@pytest.mark.slow
def test_adapters_are_exported_merged_and_served_together(newcomer: Newcomer) -> None:
    newcomer.type("checkpoint export lora adapters/docs")
    newcomer.type("checkpoint merge lora models/merged")
    asked = {"prompt": "A recipe", "max_tokens": 4, "temperature": 0.0, "logprobs": 0}
    with newcomer.serving("models/merged") as client:
        merged = client.completions.create(model=client.models.list().data[0].id, **asked).choices[0]
    with newcomer.serving("models/demo", "--lora", "docs=adapters/docs", "--lora", "newest=lora") as client:
        names = [model.id for model in client.models.list()]
        assert names[1:] == ["docs", "newest"]
        answers = [client.completions.create(model=name, **asked).choices[0] for name in names[1:]]
    for answer in answers:
        assert answer.text == merged.text
        assert answer.logprobs is not None
        assert merged.logprobs is not None
        assert answer.logprobs.token_logprobs == pytest.approx(merged.logprobs.token_logprobs, abs=1e-3)
