"""The planner's error on published runs against its goals, and the scores by hand."""

import csv
import json
from pathlib import Path

import pytest

from headway.errors import UsageError
from headway.plan.accuracy.score import AccuracyReport, as_json, score, score_file

TABLES = Path(__file__).parents[2] / "benchmarks/plan"


@pytest.fixture(scope="module")
def runs() -> AccuracyReport:
    return score_file(TABLES / "published_runs.csv")


@pytest.fixture(scope="module")
def iterations() -> AccuracyReport:
    return score_file(TABLES / "a100_iterations.csv")


def test_unseen_dense_runs(runs: AccuracyReport) -> None:
    full = runs.tables["groups"]["unseen: dense, fully specified"]
    assert full.count >= 150
    assert full.mean <= 0.09
    assert full.median <= 0.06
    assert full.p90 <= 0.20
    every = runs.tables["groups"]["unseen: dense, all modelled"]
    assert every.count >= 200
    assert every.mean <= 0.12


def test_calibrated_runs(runs: AccuracyReport) -> None:
    rest = runs.tables["groups"]["calibrated: the rest"]
    assert rest.mean <= 0.05
    assert rest.median <= 0.03
    seen = [row for row in runs.rows if row.fitted]
    assert len(seen) == 10 * len(runs.tables["calibrated"])


def test_runs_with_experts_and_other_chips(runs: AccuracyReport) -> None:
    assert runs.tables["groups"]["unseen: experts or other chips"].mean <= 0.20


def test_order_within_a_source(runs: AccuracyReport) -> None:
    for table in ("unseen", "calibrated", "fitted on all"):
        ranks = [scores.spearman for scores in runs.tables[table].values() if scores.spearman is not None]
        assert ranks
        assert min(ranks) >= 0.9


def test_memory(runs: AccuracyReport) -> None:
    memory = runs.tables["groups"]["memory"]
    assert memory.median <= 0.08
    assert memory.mean <= 0.12


def test_runs_that_ran_are_predicted_to_fit(runs: AccuracyReport) -> None:
    assert [row.row for row in runs.rows if row.fits is False] == []


@pytest.mark.slow
def test_iterations(iterations: AccuracyReport) -> None:
    rest = iterations.tables["groups"]["calibrated: the rest"]
    assert rest.count == 721 - 72
    assert rest.mean <= 0.05
    assert rest.median <= 0.03
    assert rest.p90 <= 0.12
    first = iterations.rows[0]
    assert first.measured == pytest.approx(410.490577)


def test_json_has_the_documented_keys(runs: AccuracyReport) -> None:
    document = json.loads(json.dumps(as_json(runs)))
    assert len(document["rows"]) == 385
    keys = {"row", "source", "chip", "tok_s_per_gpu", "predicted", "error", "mem_gb", "predicted_mem_gb", "skipped"}
    assert all(keys <= set(row) for row in document["rows"])
    assert [row["row"] for row in document["rows"]] == list(range(385))
    for row in document["rows"]:
        if row["skipped"] is None:
            assert row["error"] == pytest.approx(row["predicted"] / row["tok_s_per_gpu"] - 1)
        else:
            assert row["predicted"] is None


def test_calibration_rows_depend_only_on_the_seed(tmp_path: Path) -> None:
    with (TABLES / "published_runs.csv").open(newline="", encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if "A100 40GB" in line["source"]]
    file = tmp_path / "some.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)

    def seen(seed: int) -> list[int]:
        return [row.row for row in score_file(file, calibrated_on=5, seed=seed).rows if row.fitted]

    assert seen(1) == seen(1) != seen(2)
    assert len(seen(1)) == 5


def test_scores_by_hand() -> None:
    scores = score([(100, 110), (100, 80), (200, 200), (50, 50)])
    assert scores is not None
    assert scores.mean == pytest.approx(0.075)
    assert scores.median == pytest.approx(0.05)
    assert scores.p90 == pytest.approx(0.17)
    assert scores.bias == pytest.approx(-0.025)
    assert scores.spearman is None
    assert score([]) is None


def test_ranks_by_hand() -> None:
    """Eight values of which two neighbours are swapped: 1 - 6 * 2 / (8 * 63)."""
    swapped = score(list(zip(range(1, 9), (1, 2, 4, 3, 5, 6, 7, 8), strict=True)))
    assert swapped is not None
    assert swapped.spearman == pytest.approx(1 - 12 / 504)


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        score_file(tmp_path / "none.csv")
    empty = tmp_path / "empty.csv"
    empty.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="no rows"):
        score_file(empty)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(UsageError, match="source"):
        score_file(other)
