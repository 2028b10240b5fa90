"""The server, asked by tools of others: a fuzzer of its OpenAPI description, and an evaluation harness."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from served_model import MODEL, TEXT, Served

from headway.data.tokenizer import train_tokenizer
from headway.inference.load import load_model
from headway.models import empty_decoder, init_weights, write_folder
from own_environment import python_with

TASK = """\
task: pairs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.mark.slow
def test_fuzzer_finds_no_internal_error(tmp_path: Path) -> None:
    """schemathesis sends what the description allows and what it forbids; a 5xx fails it."""
    python = python_with("schemathesis==4.32.5")
    server = Served(max_sequences=8)
    try:
        ended = subprocess.run(
            [str(python.parent / "schemathesis"), "run", f"{server.url}/openapi.json", "--checks=not_a_server_error",
             "--max-examples=60", "--seed=1", "--phases=examples,coverage,fuzzing", "--request-timeout=60"],
            cwd=tmp_path, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
        assert "/v1/chat/completions" in server.app.openapi()["paths"]
        assert server.service.alive
        assert server.engine.pool.free == server.engine.pool.count
    finally:
        server.close()


def write_task(folder: Path, questions: int) -> None:
    """A multiple-choice task of pieces of the tokenizer's own text."""
    draw, rows = random.Random(0), []
    for _ in range(questions):
        places = [draw.randrange(len(TEXT) - 12) for _ in range(5)]
        pieces = [TEXT[place : place + draw.randint(3, 12)] for place in places]
        rows.append({"question": pieces[0], "choices": [f" {text}" for text in pieces[1:]], "label": draw.randrange(4)})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pairs.yaml").write_text(TASK.format(file=folder / "pairs.jsonl"))


def evaluate(python: Path, folder: Path, model: str, arguments: str) -> tuple[dict[str, float], list[list[float]]]:
    """Run lm-eval; return its scores, and the log-likelihood of every choice."""
    target = folder / model
    ended = subprocess.run(
        [str(python), "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", "pairs",
         "--include_path", str(folder), "--output_path", str(target), "--log_samples", "--device", "cpu"],
        cwd=folder, capture_output=True, text=True, timeout=800,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": "none"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    (results,) = target.rglob("results_*.json")
    (samples,) = target.rglob("samples_*.jsonl")
    scores: dict[str, Any] = json.loads(results.read_text())["results"]["pairs"]
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    likelihoods = [[float(answer[0]) for answer in row["filtered_resps"]] for row in rows]
    return {key: value for key, value in scores.items() if key.startswith("acc")}, likelihoods


@pytest.mark.slow
def test_evaluation_harness_gives_the_score_of_transformers(tmp_path: Path) -> None:
    """lm-eval's local-completions against our server, and its own transformers on the same folder."""
    python = python_with("lm-eval[api]==0.4.13", "accelerate==1.15.0", "peft==0.21.2")
    write_task(tmp_path, questions=25)
    decoder = empty_decoder(MODEL.model_copy(update={"vocab_size": 300}))
    init_weights(decoder, seed=0)
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer([TEXT] * 3, vocab_size=300).to_bytes())
    write_folder(tmp_path / "model", decoder.model, decoder.state_dict(), tmp_path / "tokenizer.json", seq=256)
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    theirs = evaluate(python, tmp_path, "hf", f"pretrained={tmp_path / 'model'},dtype=float32")
    server = Served(loaded=load_model(tmp_path / "model", device="cpu"))
    try:
        address = f"{server.url}/v1/completions"
        arguments = f"model=tiny,base_url={address},tokenizer={tmp_path / 'model'},num_concurrent=4,max_retries=1"
        ours = evaluate(python, tmp_path, "local-completions", arguments)
    finally:
        server.close()
    assert ours[0] == theirs[0]
    assert len(ours[1]) == 25
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine == pytest.approx(other, abs=1e-3)
