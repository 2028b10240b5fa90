"""`headway eval` and lm-eval on the same files and the same model folder: the same scores."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.data.tokenizer import train_tokenizer
from headway.inference import LLM, EngineOptions
from headway.models import empty_decoder, init_weights, write_folder
from headway.recipe import Model
from own_environment import python_with

MODEL = Model(vocab_size=300, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)
TEXT = "def headway(steps):\n    return steps + 1  # Zeit läuft 時間 🎉\n"
LENGTH = 256
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
YAML = {
    "pairs": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
""",
    "words": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [")", "\\n"], max_gen_toks: 12, do_sample: false}
filter_list: [{name: clean, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
""",
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}
TOML = 'data = "words.jsonl"\nmetric = "exact_match"\nstop = [")", "\\n"]\nmax_tokens = 12\n'


def make_model(folder: Path) -> Path:
    decoder = empty_decoder(MODEL)
    init_weights(decoder, seed=0)
    (folder / "tokenizer.json").write_bytes(train_tokenizer([TEXT] * 3, vocab_size=300).to_bytes())
    write_folder(folder / "model", decoder.model, decoder.state_dict(), folder / "tokenizer.json", seq=LENGTH)
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    return folder / "model"


def write_tasks(folder: Path, model: Path) -> None:
    """Pieces of the tokenizer's own text; every second word is what our engine answers, for lm-eval to agree or not."""
    draw = random.Random(0)

    def piece(longest: int = 12) -> str:
        place = draw.randrange(len(TEXT) - longest)
        return TEXT[place : place + draw.randint(3, longest)].strip() or "x"

    llm = LLM(model, device="cpu", options=EngineOptions(cache_tokens=4000))
    prompts = [piece() for _ in range(24)]
    answers = llm.generate(prompts, llm.params(max_tokens=12, temperature=0, stop=(")", "\n")))
    pairs = [
        {"question": piece(), "choices": [piece() for _ in range(4)], "label": draw.randrange(4)} for _ in range(40)
    ]
    words = [
        {"question": prompt, "answer": answer.text.strip() if number % 2 else f"no {number}"}
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    texts = [{"text": " ".join(piece() for _ in range(count))} for count in (1, 3, 20, 60, 140, 300)]
    for name, rows in (("pairs", pairs), ("words", words), ("texts", texts)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, file=file) + YAML[name])
    (folder / "words.toml").write_text(TOML)


def run_lm_eval(python: Path, folder: Path, model: Path) -> tuple[dict[str, Any], list[list[float]]]:
    """Return its scores by task, and the log-likelihoods of the choices."""
    # Their windows count what is predicted, ours leave room for the token that the engine samples.
    arguments = f"pretrained={model},dtype=float32,max_length={LENGTH - 2}"
    ended = subprocess.run(
        [str(python), "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--tasks", "pairs,words,texts",
         "--include_path", str(folder), "--output_path", str(folder / "theirs"), "--log_samples", "--device", "cpu"],
        cwd=folder, capture_output=True, text=True, timeout=800,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    (results,) = (folder / "theirs").rglob("results_*.json")
    (samples,) = (folder / "theirs").rglob("samples_pairs_*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return json.loads(results.read_text())["results"], [[float(r[0]) for r in row["filtered_resps"]] for row in rows]


def run_headway(folder: Path, model: Path) -> tuple[dict[str, Any], list[list[float]]]:
    command = [sys.executable, "-m", "headway", "eval", str(model), "--tasks", "pairs.jsonl,words.toml,texts.jsonl"]
    ended = subprocess.run(
        [*command, "--json", "--out", "rows.jsonl", "--device", "cpu"],
        cwd=folder, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    tasks = json.loads(ended.stdout)["tasks"]
    scores = {task["task"]: {metric["name"]: metric["value"] for metric in task["metrics"]} for task in tasks}
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pairs = sorted((row for row in rows if row["task"] == "pairs"), key=lambda row: row["index"])
    return scores, [row["logprobs"] for row in pairs]


@pytest.mark.slow
def test_scores_are_those_of_lm_eval_on_the_same_files(tmp_path: Path) -> None:
    python = python_with("lm-eval[api]==0.4.13", "accelerate==1.15.0", "peft==0.21.2")
    model = make_model(tmp_path)
    write_tasks(tmp_path, model)
    scores, likelihoods = run_headway(tmp_path, model)
    expected, expected_likelihoods = run_lm_eval(python, tmp_path, model)
    assert len(likelihoods) == 40
    for mine, other in zip(likelihoods, expected_likelihoods, strict=True):
        assert mine == pytest.approx(other, abs=1e-3)
    for metric in ("acc", "acc_norm", "acc_bytes"):
        assert scores["pairs"][metric] == expected["pairs"][f"{metric},none"]
    assert 0 < scores["pairs"]["acc"] < 1
    assert scores["words"]["exact_match"] == expected["words"]["exact_match,clean"] == 0.5
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert scores["texts"][metric] == pytest.approx(expected["texts"][f"{metric},none"], rel=1e-4)
