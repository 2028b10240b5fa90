"""What pages ask for: from good runs, broken ones, and runs that are gone."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from packed_plots import unpack
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner
from written_runs import STARTUP_NS, STEP_NS, WALL, falling, lines, opening, step, write_broken_run, write_run

from headway.cli.main import app as cli
from headway.dashboard import recorded, sheets
from headway.data import BuildOptions, build_dataset
from headway.data.media.build import MediaOptions, build_media
from headway.track import RunFolder
from headway.track.registry import add_note, tag
from headway.track.store import Labels, compact, read_labels, write_labels

OF_A_RUN = ["run", "ledger", "recipe", "logs", "stacks", "samples", "rollouts", "compare"]


def ask(client: TestClient, path: str, status: int = 200, **params: Any) -> Any:
    answer = client.get(f"/api/{path}", params=params)
    assert answer.status_code == status, answer.text
    return answer.json()


def write_checkpoint(run: RunFolder, number: int, digest: str) -> None:
    folder = run.checkpoints / f"step-{number:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": number, "digest": digest}))


def plots(client: TestClient, **params: Any) -> dict[str, Any]:
    answer = client.get("/api/series", params=params)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = unpack(answer.content)["plots"]
    return document


def test_list_has_every_run_with_its_numbers(client: TestClient, runs: Path) -> None:
    write_run(runs, "good", falling(20), grad_norm=2.5)
    write_run(runs, "killed", falling(7), outcome=None)
    rows = {row["name"]: row for row in ask(client, "runs")["runs"]}
    assert rows["good"]["state"] == "finished"
    assert (rows["good"]["step"], rows["good"]["total_steps"]) == (20, 20)
    assert rows["good"]["loss"] == pytest.approx(falling(20)[-1])
    assert rows["good"]["grad_norm"] == 2.5
    assert rows["good"]["tokens_per_s"] == pytest.approx(128)
    assert rows["good"]["mfu"] == pytest.approx(0.128)
    assert rows["killed"]["state"] == "interrupted"


def test_runs_that_failed_before_a_step_are_listed_apart(client: TestClient, runs: Path) -> None:
    write_run(runs / ".failed", "early", [])
    assert [row["name"] for row in ask(client, "runs")["runs"]] == [".failed/early"]
    assert ask(client, "run", run=".failed/early")["step"] == 0


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("", {"a-1", "a-2", "b"}),
        ("a-*", {"a-1", "a-2"}),
        ("-2", {"a-2"}),
        ("train.lr > 5e-3", {"b"}),
        ("state = interrupted or step < 5", {"a-2", "b"}),
    ],
)
def test_filter_takes_patterns_and_queries(client: TestClient, runs: Path, where: str, names: set[str]) -> None:
    write_run(runs, "a-1", falling(9))
    write_run(runs, "a-2", falling(9), outcome=None)
    recipe = json.loads((runs / "a-1" / "recipe.json").read_text())
    recipe["train"]["lr"] = 1e-2
    write_run(runs, "b", falling(4), recipe=recipe)
    answer = ask(client, "runs", where=where)
    assert {row["name"] for row in answer["runs"]} == names
    assert answer["problem"] is None


def test_query_that_does_not_parse_says_so_and_keeps_the_list(client: TestClient, runs: Path) -> None:
    write_run(runs, "a", falling(3))
    answer = ask(client, "runs", where="loss <")
    assert [row["name"] for row in answer["runs"]] == ["a"]
    assert "query" in answer["problem"]


def test_accounts_sum_to_the_allocation(client: TestClient, runs: Path) -> None:
    write_run(runs, "good", falling(20))
    ledger = ask(client, "ledger", run="good")
    assert ledger["total_s"] == (STARTUP_NS + 20 * STEP_NS) / 1e9
    accounts = {account["name"]: account["seconds"] for account in ledger["accounts"]}
    assert sum(accounts.values()) == pytest.approx(ledger["total_s"])
    assert accounts["start-up"] == pytest.approx(2.0)
    assert accounts["compute"] == pytest.approx(19.0)
    assert accounts["data stall"] == pytest.approx(1.0)
    assert ledger["clock"]["steps"] == list(range(1, 21))
    assert ledger["clock"]["walls"][0] == pytest.approx(WALL + 3.0)


def test_incidents_have_the_step_before_them(client: TestClient, runs: Path) -> None:
    folder = write_run(runs, "restarted", falling(5), outcome=None)
    agent = folder / "events" / "0001-agent.jsonl"
    crash = STARTUP_NS + 5 * STEP_NS + STEP_NS // 2
    agent.write_text(agent.read_text() + lines(
        {"kind": "exit", "t": crash, "rank": 0, "code": -9},
        {"kind": "end", "t": crash, "outcome": "failed", "reason": "worker 0 was killed"},
    ))  # fmt: skip
    wall = WALL + 60
    (folder / "events" / "0002-agent.jsonl").write_text(lines(
        opening("agent", 2, wall), {"kind": "attempt", "t": 0, "workers": 1, "device": "cpu", "from_step": 3},
        {"kind": "end", "t": STARTUP_NS + 4 * STEP_NS, "outcome": "finished", "reason": ""},
    ))  # fmt: skip
    (folder / "events" / "0002-rank-0.jsonl").write_text(lines(
        opening("rank-0", 2, wall), {"kind": "resumed", "t": STARTUP_NS, "step": 3},
        *(step(number, 1.0, first=4) for number in range(4, 8)),
    ))  # fmt: skip
    incidents = ask(client, "ledger", run="restarted")["incidents"]
    assert [incident["step"] for incident in incidents] == [5, 3]
    assert "killed by signal 9" in incidents[0]["text"]
    assert "resumed after step 3, 2 steps to redo" in incidents[1]["text"]
    plot = plots(client, run="restarted", key="loss")["loss"]
    assert plot["steps"] == list(range(1, 8))
    assert plot["lines"]["restarted"][3:] == [1.0] * 4


def test_recipe_marks_what_the_parent_had_otherwise(client: TestClient, runs: Path) -> None:
    parent = write_run(runs, "parent", falling(3))
    recipe = json.loads((parent / "recipe.json").read_text())
    recipe["train"]["lr"] = 5e-4
    recipe["model"]["init"] = str(runs / "parent" / "checkpoints" / "step-00000003")
    write_run(runs, "child", falling(3), recipe=recipe)
    answer = ask(client, "recipe", run="child")
    assert answer["parent"] == {"run": "parent", "step": 3, "here": True}
    changed = {row["key"]: (row["before"], row["value"]) for row in answer["rows"] if row["changed"]}
    assert changed == {"train.lr": (1e-3, 5e-4), "model.init": (None, recipe["model"]["init"])}


def test_comparison_names_the_only_difference(client: TestClient, runs: Path) -> None:
    write_run(runs, "a", falling(3))
    recipe = json.loads((runs / "a" / "recipe.json").read_text())
    write_run(runs, "b", falling(4), recipe={**recipe, "train": {**recipe["train"], "lr": 1e-2}})
    answer = ask(client, "compare", run=["a", "b"])
    assert answer["differs"] == [{"key": "train.lr", "values": {"a": 1e-3, "b": 1e-2}}]
    assert answer["verdict"] == "cause: train.lr (the only difference)"
    write_run(runs, "c", falling(4), recipe={**recipe, "seed": 3, "train": {**recipe["train"], "lr": 1e-2}})
    assert ask(client, "compare", run=["a", "c"])["verdict"] == "confounded: 2 keys differ"


def test_logs_are_read_from_their_end(client: TestClient, runs: Path) -> None:
    folder = write_run(runs, "good", falling(3))
    log = folder / "logs" / "0001-rank-0.log"
    log.write_text("first\n" + "x" * 300_000 + "\nlast\n")
    part = ask(client, "logs", run="good", file=log.name)
    assert part["text"].endswith("\nlast\n")
    assert "first" not in part["text"]
    with log.open("a") as file:
        file.write("more <b>é\n")
    assert ask(client, "logs", run="good", file=log.name, offset=part["end"])["text"] == "more <b>é\n"
    log.write_text("new\n")  # shorter than what was read
    assert ask(client, "logs", run="good", file=log.name, offset=part["end"])["text"] == "new\n"


def test_unknown_runs_are_a_sentence(client: TestClient, runs: Path) -> None:
    write_run(runs, "good", falling(3))
    for path in ("run", "ledger", "recipe", "logs", "stacks", "samples", "rollouts", "compare"):
        answer = ask(client, path, 404, run="none")
        assert "no run 'none'" in answer["error"]
    assert plots(client, run="none", key="loss")["loss"]["lines"] == {}
    assert ask(client, "run", 404, run="last")["error"]


def test_run_that_is_deleted_while_pages_are_open(client: TestClient, runs: Path) -> None:
    folder = write_run(runs, "going", falling(3))
    for path in OF_A_RUN:
        ask(client, path, run="going")
    shutil.rmtree(folder)
    for path in ("run", "ledger", "logs", "samples"):
        assert ask(client, path, 404, run="going")["hint"] == "it may have been renamed or deleted"
    assert plots(client, run="going", key="loss")["loss"]["lines"] == {}
    assert ask(client, "runs")["runs"] == []


def test_broken_run_shows_what_it_can(client: TestClient, runs: Path) -> None:
    write_broken_run(runs)
    (row,) = ask(client, "runs")["runs"]
    assert row["name"] == "broken"
    for path in OF_A_RUN:
        answer = client.get(f"/api/{path}", params={"run": "broken"})
        assert answer.status_code in (200, 404, 500), path
        if answer.status_code != 200:
            assert answer.json()["error"]
    plot = plots(client, run="broken", key="loss")["loss"]
    assert plot["lines"]["broken"][:5] == [pytest.approx(value, rel=1e-5) for value in falling(5)]
    assert any("unreadable" in text for text in ask(client, "ledger", run="broken")["warnings"])
    assert ask(client, "models")["models"][0]["checkpoints"][0]["digest"] is None
    ask(client, "datasets")


def test_records_not_yet_compacted_are_drawn_one_after_the_other(
    client: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer waits for one record at most, however many there are, and says what is still to come."""
    monkeypatch.setattr(recorded, "PATIENCE_S", 0.0)
    monkeypatch.setattr(compact, "BEHIND_BYTES", 100)
    names = ["a", "b", "c"]
    for name in names:
        write_run(runs, name, falling(9))
    drawn = []
    for pending in (2, 1, 0):
        answer = unpack(client.get("/api/series", params={"run": names, "key": "loss"}).content)
        assert len(answer["pending"]) == pending
        drawn.append(set(answer["plots"]["loss"]["lines"]))
        assert drawn[-1] | set(answer["pending"]) == set(names)
    assert [len(lines) for lines in drawn] == [1, 2, 3]


def test_losses_that_are_no_numbers_are_gaps(client: TestClient, runs: Path) -> None:
    write_run(runs, "nan", [1.0, None, 3.0])
    plot = plots(client, run="nan", key="loss")["loss"]
    assert plot["lines"]["nan"] == [1.0, None, 3.0]


@pytest.mark.parametrize(
    "params",
    [{}, {"run": "x"}, {"run": "x", "key": "loss", "buckets": 1}, {"run": "x", "key": "loss", "first": "a"},
     {"run": ["x"] * 1000, "key": "loss"}],
)  # fmt: skip
def test_wrong_questions_are_refused(client: TestClient, params: dict[str, Any]) -> None:
    assert ask(client, "series", 400, **params)["error"]


def test_clips_of_a_dataset_have_a_contact_sheet(client: TestClient, tmp_path: Path) -> None:
    for name, color, half in (("red", (255, 0, 0), (32, 32)), ("blue", (0, 0, 255), (64, 16))):
        image = Image.new("RGB", (64, 32), "white")
        image.paste(color, (0, 0, *half))
        image.save(tmp_path / f"{name}.png")
    build_media(tmp_path / "data" / "pictures", [str(tmp_path / "*.png")], MediaOptions("image"))
    (dataset,) = ask(client, "datasets")["datasets"]
    assert (dataset["kind"], dataset["documents"], dataset["media"]) == ("image", 2, True)
    page = ask(client, "dataset", id=dataset["id"])
    assert {clip["name"]: (clip["width"], clip["height"]) for clip in page["clips"]} == {
        "red.png": (64, 32), "blue.png": (64, 32),
    }  # fmt: skip
    answer = client.get("/sheet", params={"id": dataset["id"]})
    assert answer.headers["content-type"] == "image/png"
    drawn = {color for _, color in Image.open(io.BytesIO(answer.content)).convert("RGB").getcolors(1 << 20) or []}
    assert {(255, 0, 0), (0, 0, 255)} <= drawn
    assert client.get("/sheet", params={"id": "none"}).status_code == 400


def test_clip_that_ends_its_decoder_is_a_sentence(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (64, 32), "red").save(tmp_path / "red.png")
    build_media(tmp_path / "data" / "pictures", [str(tmp_path / "*.png")], MediaOptions("image"))
    (dataset,) = ask(client, "datasets")["datasets"]
    monkeypatch.setattr(sheets.sys, "executable", "/bin/false")
    answer = client.get("/sheet", params={"id": dataset["id"]})
    assert answer.status_code == 500
    assert "could not be drawn" in answer.json()["error"]


def test_labels_are_those_of_the_command_line(client: TestClient, runs: Path) -> None:
    folder = RunFolder(write_run(runs, "good", falling(3)))
    write_labels(folder, Labels(("old", "kept"), "before", archived=True))
    change = {"tags": ["kept", "new"], "note": "better\x1b[31m <b>"}
    answer = client.post("/api/labels", params={"run": "good"}, json=change)
    assert answer.status_code == 200, answer.text
    labels = read_labels(folder)
    assert labels.tags == ("kept", "new")
    assert "\x1b" not in labels.note
    assert labels.archived
    assert ask(client, "run", run="good")["tags"] == ["kept", "new"]
    for wrong in ({"tags": ["a b"], "note": ""}, {"tags": []}, {"tags": [], "note": "x" * 3000}):
        assert client.post("/api/labels", params={"run": "good"}, json=wrong).status_code == 400
    assert client.post("/api/labels", params={"run": "../good"}, json=change).status_code == 404
    assert read_labels(folder) == labels


def test_names_and_lineage_of_models(client: TestClient, runs: Path) -> None:
    parent = RunFolder(write_run(runs, "parent", falling(3)))
    write_checkpoint(parent, 3, "a" * 32)
    recipe = json.loads(parent.recipe_file.read_text())
    recipe["model"]["init"] = str(parent.checkpoints / "step-00000003")
    write_run(runs, "child", falling(3), recipe=recipe)
    tag(runs, "prod", parent, 3, "a" * 32)
    add_note(runs, "prod", "the first")
    (name,) = ask(client, "models")["names"]
    assert (name["name"], name["run"], name["step"], name["here"]) == ("prod", "parent", 3, True)
    assert [note["text"] for note in name["notes"]] == ["the first"]
    lineage = ask(client, "lineage", of="parent@3")
    assert [branch["name"] for branch in lineage["came_from"]] == ["parent"]
    assert {(branch["kind"], branch["name"]) for branch in lineage["became"]} == {("run", "child"), ("name", "prod")}
    assert [branch["name"] for branch in ask(client, "lineage", of="prod")["came_from"]] == ["parent@3"]
    shutil.rmtree(parent.checkpoints)
    assert ask(client, "models")["names"][0]["here"] is False
    for wrong in ("none", "parent@9", "..", str(runs / "parent"), "../runs/parent"):
        assert ask(client, "lineage", 404, of=wrong)["error"]


def test_dataset_shows_what_the_loss_counts(client: TestClient, runs: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 50)
    build_dataset(tmp_path / "data" / "tiny", [text], BuildOptions(vocab_size=300))
    (dataset,) = ask(client, "datasets")["datasets"]
    assert dataset["kind"] == "text"
    page = ask(client, "dataset", id=dataset["id"])
    piece = page["samples"][0]["pieces"][0]
    assert piece["trained"]
    assert piece["text"].startswith("one two three four five six seven eight nine ten\n")
    for wrong in ("none", "../data", str(tmp_path)):
        assert "no dataset" in ask(client, "dataset", 400, id=wrong)["error"] or len(wrong) > 32


def test_page_tells_what_stands_out_with_its_step(client: TestClient, runs: Path) -> None:
    losses: list[float | None] = [5 - 0.001 * number for number in range(200)]
    losses[120] = 55.0
    write_run(runs, "spiky", losses, cursor=None)
    (spike,) = ask(client, "ledger", run="spiky")["insights"]
    assert (spike["kind"], spike["step"]) == ("loss spike", 121)
    assert spike["evidence"]["loss"] == 55.0


def test_divergence_is_a_warning_and_not_told_twice(client: TestClient, runs: Path) -> None:
    write_run(runs, "risen", [5 - 0.01 * number for number in range(200)] + [30.0] * 200)
    document = ask(client, "ledger", run="risen")
    assert any("loss" in text for text in document["warnings"])
    assert [insight["kind"] for insight in document["insights"]] == []


def test_slower_run_names_the_one_before(client: TestClient, runs: Path) -> None:
    """Alike but for its speed; which run was the last before it is looked for again when one is deleted."""
    for name, wall in (("first", 1.7e9), ("second", 1.8e9)):
        write_run(runs, name, falling(40), tokens=128 if name == "first" else 64)
        for record in (runs / name / "events").glob("*.jsonl"):
            head, _, rest = record.read_text().partition("\n")
            record.write_text(json.dumps(json.loads(head) | {"wall": wall}) + "\n" + rest)
    (insight,) = ask(client, "ledger", run="second")["insights"]
    assert (insight["kind"], insight["evidence"]["run"]) == ("below previous", "first")
    shutil.rmtree(runs / "first")
    agent = runs / "second" / "events" / "0001-agent.jsonl"
    agent.write_text(agent.read_text() + "\n")
    assert ask(client, "ledger", run="second")["insights"] == []


def test_documents_of_a_step_are_those_that_explain_names(client: TestClient, runs: Path, tmp_path: Path) -> None:
    """As `headway explain --json` prints them, and the text of each is in the source it names."""
    source = tmp_path / "text.jsonl"
    texts = [f"document {number} " + f"word{number} " * 30 for number in range(40)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_dataset(tmp_path / "data" / "tiny", [source], BuildOptions(vocab_size=300))
    recipe = {
        "name": "tiny", "model": {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1},
        "data": {"path": str(tmp_path / "data" / "tiny"), "seq": 32}, "train": {"steps": 5, "batch": 4},
    }  # fmt: skip
    folder = write_run(runs, "explained", falling(3), recipe=recipe)
    page = ask(client, "documents", run="explained", step=2)
    assert (page["done"], page["last_step"], page["count"]) == (True, 5, len(page["parts"]))
    printed = CliRunner().invoke(cli, ["explain", "explained", "2", "--runs", str(runs), "--json"])
    expected = json.loads(printed.output)["documents"]
    keys = ("row", "dataset", "document", "first", "end", "tokens")
    assert [[part[key] for key in keys] for part in page["parts"]] == [[row[key] for key in keys] for row in expected]
    assert {part["row"] for part in page["parts"]} == set(range(4))
    for part in page["parts"]:
        file, _, line = part["source"].rpartition(":")
        assert Path(file).name == "text.jsonl"
        assert part["text"][:20] in texts[int(line) - 1] + " "
    assert not any(part["stands_out"] for part in page["parts"]), "all are alike"
    assert ask(client, "documents", run="explained", step=4)["done"] is False
    assert "no step 6" in ask(client, "documents", 400, run="explained", step=6)["error"]
    write_broken_run(runs)
    assert "recipe.json" in ask(client, "documents", run="broken", step=1)["problem"]
    shutil.rmtree(tmp_path / "data")
    assert "tiny" in ask(client, "documents", run=folder.name, step=2)["problem"]
