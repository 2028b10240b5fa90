"""Every page in a real Chromium, with a good, a live and a broken run: no error, nothing that axe calls serious.

Needs Debian's chromium (or $CHROMIUM), node, and `npm ci` in src/headway/dashboard/app.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from written_runs import falling, lines, step, write_broken_run, write_run

import headway.dashboard
from headway.data import BuildOptions, build_dataset
from headway.data.media.build import MediaOptions, build_media
from headway.rl.rollout import AnswerScore, Rollout
from headway.rl.rollout_files import BatchHeader, RolloutBatch, RolloutFiles
from headway.track import RunFolder, lock_run
from headway.track.registry import add_note, tag
from headway.track.store import Labels, read_labels, write_labels

APP = Path(headway.dashboard.__file__).parent / "app"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
NEEDED = {
    "chromium (apt-get install chromium, or $CHROMIUM)": Path(CHROMIUM).exists(),
    "node": shutil.which("node") is not None,
    "playwright-core (npm ci in src/headway/dashboard/app)": (APP / "node_modules" / "playwright-core").is_dir(),
}
MISSING = [name for name, present in NEEDED.items() if not present]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]

HOSTILE = "<img src=x onerror=window.injected=1><script>window.injected=1</script>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind: live, broken, with hostile texts, of reinforcement learning."""
    folder = tmp_path_factory.mktemp("dashboard")
    runs, data = folder / "runs", folder / "data"
    data.mkdir()
    (folder / "text.txt").write_text("one two three four five six seven\n" * 200)
    build_dataset(data / "tiny", [folder / "text.txt"], BuildOptions(vocab_size=300))
    demo = write_run(runs, "demo", falling(3000), grad_norm=1.0)
    (demo / "logs" / "0001-rank-0.log").write_text("\x1b[31mred\x1b[0m " + HOSTILE + "\n")
    (demo / "stacks" / "0001-rank-0.txt").write_text("File loop.py, line 3 " + HOSTILE)
    (demo / "samples" / "step-10").mkdir(parents=True)
    (demo / "samples" / "step-10" / "text.txt").write_text(HOSTILE)
    spiky: list[float | None] = [5 - 0.001 * number for number in range(200)]
    spiky[120] = 55.0
    trained = json.loads((demo / "recipe.json").read_text())
    trained["data"] = {"path": str(data / "tiny"), "seq": 32}
    trained["train"] = {**trained.get("train", {}), "steps": len(spiky)}
    write_run(runs, "spiky", spiky, recipe=trained)
    write_run(runs, "live", falling(50), outcome=None)
    write_broken_run(runs)
    hostile = json.loads((demo / "recipe.json").read_text()) | {"name": HOSTILE}
    agent = write_run(runs, "hostile", falling(9), recipe=hostile, outcome="failed") / "events" / "0001-agent.jsonl"
    agent.write_text(agent.read_text().replace("as told", HOSTILE.replace('"', "")))
    _write_policy_run(runs)
    _write_pictures(folder, data)
    saved = demo / "checkpoints" / "step-00003000"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps({"format": 1, "step": 3000, "digest": "a" * 32}))
    child = write_run(runs, "child", falling(9), recipe=trained | {"model": trained["model"] | {"init": str(saved)}})
    (child / "checkpoints" / "step-00000009").mkdir()
    (child / "checkpoints" / "step-00000009" / "manifest.json").write_text(
        json.dumps({"format": 1, "step": 9, "digest": "b" * 32})
    )
    tag(runs, "prod", RunFolder(demo), 3000, "a" * 32)
    add_note(runs, "prod", HOSTILE)
    write_labels(RunFolder(demo), Labels(("good",), HOSTILE))
    return folder


def _write_pictures(folder: Path, data: Path) -> None:
    captions = folder / "captions.jsonl"
    with captions.open("w") as file:
        for number in range(6):
            image = Image.new("RGB", (64, 48), "white")
            image.paste((40 * number, 90, 160), (8 * number, 0, 64, 48 - 6 * number))
            image.save(folder / f"{number}.png")
            file.write(json.dumps({"file": f"{number}.png", "caption": HOSTILE}) + "\n")
    build_media(data / "pictures", [str(folder / "*.png")], MediaOptions("image", captions=(str(captions),)))


def _write_policy_run(runs: Path) -> None:
    recipe: dict[str, Any] = {
        "name": "policy", "data": {"path": "none", "seq": 64}, "train": {"steps": 4, "batch": 4},
        "model": {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1},
        "objective": {"kind": "grpo"}, "rl": {"rewards": ["own:reward"], "samples": 2, "max_tokens": 16},
    }  # fmt: skip
    folder = write_run(runs, "policy", falling(4), recipe=recipe, reward=0.5)
    rollouts = tuple(
        Rollout(prompt=sample, sample=sample, answer=answer, prompt_ids=(1, 2), token_ids=(3, 4),
                logprobs=(-1.0, -2.0), written=((0, 2),), finish="stop", version=0, text=HOSTILE,
                score=AnswerScore(float(answer), {"own": 1.0}))
        for sample in range(2) for answer in range(2)
    )  # fmt: skip
    RolloutFiles(RunFolder(folder)).finish(RolloutBatch(BatchHeader(1, 0, "0" * 32, 0), 2, rollouts))


@contextmanager
def dashboard(folder: Path, *options: str) -> Iterator[str]:
    """Run `headway ui` on the folder's runs; yield its address."""
    command = [sys.executable, "-m", "headway", "ui", "--port", "0", "--json", "--runs", "runs", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        assert server.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += server.stdout.readline()
        try:
            yield json.loads(text)["address"]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with lock_run(RunFolder(root / "runs" / "live")), dashboard(root) as found:
        yield found


def visit(address: str, *views: dict[str, Any]) -> list[dict[str, Any]]:
    """Open pages, act on them, and return what was seen."""
    request = json.dumps({"do": "visit", "address": address, "views": list(views)})
    driver = Path(__file__).parent / "browser.mjs"
    done = subprocess.run(["node", str(driver), request], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


PAGES = {
    "runs": {"path": "/", "expect": ["table.runs .spark svg"]},
    "demo": {"path": "/run/demo?smooth=0.9", "expect": [".chart canvas", ".ledger tfoot"]},
    "live": {"path": "/run/live", "expect": [".state.running", ".chart canvas"]},
    "broken": {"path": "/run/broken", "expect": [".chart canvas", ".warning"]},
    "samples": {"path": "/run/demo?tab=samples", "expect": [".sample pre"]},
    "logs": {"path": "/run/demo?tab=logs&file=0001-rank-0.log", "expect": [".log pre"]},
    "stacks": {"path": "/run/demo?tab=stacks", "expect": [".log pre"]},
    "recipe": {"path": "/run/hostile?tab=recipe", "expect": [".recipe table"]},
    "system": {"path": "/run/demo?tab=system", "expect": ["#panel table"]},
    "broken recipe": {"path": "/run/broken?tab=recipe", "expect": [".nothing"]},
    "policy": {"path": "/run/policy", "expect": [".rollouts .group"]},
    "compare": {"path": "/compare?run=demo&run=live&run=broken", "expect": [".chart canvas", ".legend"]},
    "choose": {"path": "/compare", "expect": [".chooser li"]},
    "data": {"path": "/data", "expect": ["table.runs"]},
    "clips": {
        "path": "/data",
        "expect": ["table.runs a"],
        "act": [["click", "a:text('pictures')"], ["wait", ".clips img"], ["wait", ".clips tbody tr"]],
    },
    "models": {"path": "/models", "expect": [".models .card"]},
    "child": {"path": "/run/child?tab=recipe", "expect": [".recipe .changed", ".title a"]},
    "lineage": {"path": "/models?of=demo@3000", "expect": [".tree li", ".models .tag"]},
    "documents": {"path": "/run/spiky?tab=documents&step=3", "expect": [".parts tbody tr"]},
    "documents gone": {"path": "/run/broken?tab=documents", "expect": [".step-documents .nothing"]},
    "insights": {
        "path": "/run/spiky",
        "expect": [".insights li"],
        "act": [["click", "button:text('zoom to step 121')"], ["wait", "button[title=Escape]"]],
    },
    "no cluster": {"path": "/cluster", "expect": [".nothing"]},
    "labels": {"path": "/run/demo", "act": [["click", "button:text('labels')"], ["wait", "form.labels textarea"]]},
}


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_every_page_is_clean(address: str, look: str) -> None:
    size = {"width": 390, "height": 844} if look == "phone" else {}
    scheme = "dark" if look == "dark" else "light"
    pages = PAGES if look != "phone" else {name: {**page, "expect": []} for name, page in PAGES.items()}
    seen = visit(address, *({"name": name, "scheme": scheme, **size, **page} for name, page in pages.items()))
    assert [page["name"] for page in seen] == list(PAGES)
    assert {page["name"]: page["problems"] for page in seen if page["problems"]} == {}
    assert {page["name"]: page["serious"] for page in seen if page["serious"]} == {}
    assert {page["name"]: page["wide"] for page in seen if page["wide"] > 0} == {}, "wider than the window"
    assert not any(page["injected"] for page in seen), "a text of a run was executed"


def test_spike_leads_to_the_documents_of_its_step(address: str) -> None:
    (page,) = visit(
        address,
        {"name": "spike", "path": "/run/spiky", "axe": False, "expect": [".insights"],
         "act": [["click", ".insights a:text('its documents')"], ["wait", ".parts tbody tr"],
                 ["click", "button[aria-label='step after']"],
                 ["text", ".step-documents .command", "explain spiky 122"]]},
    )  # fmt: skip
    assert page["problems"] == []
    assert "tab=documents" in page["url"]
    assert "step=122" in page["url"]


def test_pages_are_used_by_keyboard_and_have_addresses(address: str) -> None:
    (runs, zoomed, sorted_runs, filtered) = visit(
        address,
        {"name": "keys", "path": "/", "axe": False, "expect": ["table.runs"],
         "act": [["press", "j"], ["press", "x"], ["press", "j"], ["press", "x"], ["press", "c"],
                 ["wait", ".compare .chart canvas"]]},
        {"name": "zoom", "path": "/run/demo", "axe": False, "expect": [".chart .u-over"],
         "act": [["drag", ".chart .u-over"], ["wait", "button[title=Escape]"]]},
        {"name": "sort", "path": "/", "axe": False, "expect": ["table.runs"],
         "act": [["click", "th button:text('loss')"], ["wait", "th[aria-sort=ascending]"]]},
        {"name": "filter", "path": "/?where=loss%20%3C", "axe": False, "expect": ["#filter-problem"],
         "act": [["press", "/"], ["fill", "#filter", "demo"], ["text", ".keys", "1 run"]]},
    )  # fmt: skip
    assert [page["problems"] for page in (runs, zoomed, sorted_runs, filtered)] == [[]] * 4
    assert "/compare?run=" in runs["url"]
    assert "zoom=" in zoomed["url"]
    assert sorted_runs["url"].endswith("sort=loss")
    assert "where=demo" in filtered["url"]


def test_labels_are_edited_on_the_page(address: str, root: Path) -> None:
    run = RunFolder(write_run(root / "runs", "labelled", falling(5)))
    (page,) = visit(
        address,
        {"name": "labels", "path": "/run/labelled", "axe": False, "expect": [".title"],
         "act": [["click", "button:text('add tags')"], ["fill", "[name=tags]", "good, kept"],
                 ["fill", "[name=note]", "as planned"], ["click", "button:text('Save')"],
                 ["text", ".note", "as planned"], ["wait", ".title .tag"]]},
    )  # fmt: skip
    assert page["problems"] == []
    assert read_labels(run) == Labels(("good", "kept"), "as planned")


def test_live_page_follows_its_run(address: str, root: Path) -> None:
    """Without a click: what is written while the page is open is shown."""
    record = root / "runs" / "live" / "events" / "0001-rank-0.jsonl"
    ended = threading.Event()

    def train() -> None:
        number = 50
        while not ended.wait(0.2):
            number += 1
            with record.open("a") as file:
                file.write(lines(step(number, 1.25, first=1)))

    writer = threading.Thread(target=train)
    writer.start()
    try:
        (page,) = visit(
            address,
            {"name": "live", "path": "/run/live", "axe": False, "expect": [".chart canvas"],
             "act": [["text", ".facts", "1.2500"], ["text", ".chart .readout", "1.25"]]},
        )  # fmt: skip
    finally:
        ended.set()
        writer.join()
    assert page["problems"] == []


def test_run_that_vanishes_says_so(address: str, root: Path) -> None:
    folder = write_run(root / "runs", "going", falling(5))
    shutil.rmtree(folder)
    (page,) = visit(address, {"name": "gone", "path": "/run/going", "axe": False, "expect": [".problem"]})
    assert "no run 'going'" in page["text"]
    assert all("404" in problem for problem in page["problems"])
