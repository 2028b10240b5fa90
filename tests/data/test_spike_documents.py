"""The documents behind a loss spike: one that was planted is named, and none where none is unlike the others."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import Lab
from headway.cli.main import app
from headway.data import BuildOptions, build_dataset
from headway.data.corpus import open_corpus
from headway.data.explain import Explainer
from headway.data.spike_documents import documents_behind, name_documents
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.track import Header, Record, RunFolder, read_run
from headway.track.insights import Insight, find_insights
from track_runs import plain_run

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "it",
    "that",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
]
STEPS, BATCH, SEQ = 60, 4, 32


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of 120 texts; in one of them number 70 is hexadecimal digits."""
    folder, rng = tmp_path_factory.mktemp("spikes"), random.Random(1)
    texts = [sentence(rng) for _ in range(120)]
    bad = "".join(rng.choice("0123456789abcdef") for _ in range(300))
    for name, planted in (("good", texts), ("bad", [*texts[:70], bad, *texts[71:]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in planted))
        build_dataset(folder / name, [folder / f"{name}.jsonl"], BuildOptions(vocab_size=300))
    return folder


def recipe_of(data: Path) -> Any:
    values = {"model": {"layers": 1, "dim": 32, "heads": 2}, "data": {"path": str(data), "seq": SEQ}, "seed": 5}
    return parse_recipe(values | {"train": {"steps": STEPS, "batch": BATCH}}, {}, "test")


def steps_with(explainer: Explainer, document: int) -> list[int]:
    """Return the steps that trained on the better part of a row of a document, by looking at all steps."""
    return [
        step
        for step in range(1, STEPS + 1)
        if any(part.document == document and part.end - part.first > SEQ // 2 for part in explainer.step(step))
    ]


def test_planted_document_stands_out_in_each_of_its_batches(folder: Path) -> None:
    explainer = Explainer(open_corpus(recipe_of(folder / "bad")))
    steps = steps_with(explainer, 70)
    assert len(steps) > 1
    for spike in documents_behind(explainer, steps):
        assert {document.part.document for document in spike.outstanding} == {70}
        assert {document.spikes for document in spike.outstanding} == {len(steps)}
        parts = {(part.row, part.document, part.first) for part in explainer.step(spike.step)}
        assert {(each.part.row, each.part.document, each.part.first) for each in spike.documents} == parts


def test_alike_documents_do_not_stand_out(folder: Path) -> None:
    explainer = Explainer(open_corpus(recipe_of(folder / "good")))
    assert not [spike for spike in documents_behind(explainer, range(1, STEPS, 3)) if spike.outstanding]


def records(spikes: list[int]) -> list[Record]:
    steps = [
        {"kind": "step", "t": 0, "step": step, "loss": 9.0 if step in spikes else 3.0, "cursor": BATCH * step}
        for step in range(1, STEPS + 1)
    ]
    return [Record(Header(1, "rank-0"), steps)]


def test_insight_names_source_and_evidence(folder: Path) -> None:
    recipe = recipe_of(folder / "bad")
    step = next(step for step in steps_with(Explainer(open_corpus(recipe)), 70) if 10 < step < STEPS)
    (insight,) = name_documents(find_insights(records([step])), recipe)
    assert f"{folder}/bad.jsonl:71 stands out: " in insight.text
    first = insight.evidence["documents"][0]
    assert (first["document"], first["stands_out"]) == (70, True)
    assert first["bits"] > insight.evidence["bits_around"][1]
    (plain,) = name_documents(find_insights(records([step])), recipe_of(folder / "good"))
    assert "none unlike those around" in plain.text
    assert not any(document["stands_out"] for document in plain.evidence["documents"])


def test_data_that_is_gone_is_said(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "good", tmp_path / "data")
    recipe = recipe_of(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    (insight,) = name_documents(find_insights(records([30])), recipe)
    assert "the documents behind it are not known: " in insight.text
    assert "\n" not in insight.text
    other = [Insight("straggler", "slow", None)]
    assert name_documents(other, recipe) == other


def test_report_names_the_document(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder / "bad")
    step = next(step for step in steps_with(Explainer(open_corpus(recipe)), 70) if 10 < step < STEPS)
    run: RunFolder = plain_run(tmp_path, [9.0 if number == step else 3.0 for number in range(1, STEPS + 1)])
    run.recipe_file.write_text(recipe.model_dump_json())
    shown = CliRunner().invoke(app, ["report", "plain", "--runs", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "bad.jsonl:71 stands out:" in " ".join(shown.stdout.split())
    listed = CliRunner().invoke(app, ["report", "plain", "--runs", str(tmp_path), "--json"])
    (insight,) = [each for each in json.loads(listed.stdout)["insights"] if each["kind"] == "loss spike"]
    assert insight["evidence"]["documents"][0]["document"] == 70


@pytest.mark.slow
def test_spikes_of_a_training_run_name_the_document_that_was_planted(
    tmp_path: Path, lab: Lab, recipe: Callable[..., Recipe]
) -> None:
    rng = random.Random(2)
    texts = [sentence(rng) for _ in range(150)]
    texts[90] = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(300))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_dataset(tmp_path / "data", [tmp_path / "texts.jsonl"], BuildOptions(vocab_size=400))
    values = {"data.path": str(tmp_path / "data"), "train.steps": 120, "train.batch": 2, "train.warmup_steps": 5}
    lived = lab.train(recipe(values))
    assert lived.outcome.state == "finished", lived.outcome
    insights = name_documents(find_insights(read_run(lived.run)), recipe(values))
    spikes = [insight for insight in insights if insight.kind == "loss spike" and insight.step is not None]
    assert spikes
    for spike in spikes:
        assert f"{tmp_path}/texts.jsonl:91 stands out: " in spike.text
