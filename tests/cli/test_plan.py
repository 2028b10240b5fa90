"""`headway plan`, as the command line calls it: what it prints adds up, fits a terminal, and fails with a sentence."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from headway.agent.launch import resolve
from headway.cli import plan as verb
from headway.cli import plan_request
from headway.cli.accuracy_view import short_source
from headway.cli.plan_request import PlanOptions, load_request
from headway.cli.plan_view import ERRORS
from headway.errors import HeadwayError
from headway.hardware import default_cluster, known_chip, load_cluster, parse_on
from headway.plan.scaling import parse_sweep, resize_cluster
from headway.plan.step import ACCOUNTS

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = ROOT / "recipes"
LLAMA = str(RECIPES / "llama3-8b.toml")
QWEN = str(RECIPES / "qwen3-0.6b.toml")
RUNS = ROOT / "benchmarks" / "plan" / "published_runs.csv"

app = typer.Typer()
app.command()(verb.plan)


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@cache
def text(*words: str) -> str:
    """What a command prints; the same words are asked once."""
    result = call(*words)
    assert result.exit_code == 0, result.exception
    return result.stdout


def document(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text(*words, "--json"))
    return found


def error(*words: str) -> HeadwayError:
    found = call(*words).exception
    assert isinstance(found, HeadwayError), found
    assert found.exit_status == 2
    assert found.hint
    return found


@pytest.mark.parametrize(
    "words",
    [
        (LLAMA, "--on", "h100x8x4"),
        pytest.param((LLAMA, "--on", "h100x8x4", "--price", "2.5", "--explain"), marks=pytest.mark.slow),
        pytest.param(
            (LLAMA, "--on", "h200x8x16", "--fidelity", "measured", "--price", "12345"), marks=pytest.mark.slow
        ),
        (LLAMA, "--on", "h200x8x1", "--mesh", "shard=8", "--fidelity", "measured", "--price", "12345"),
        (LLAMA, "--on", "h100x8x4", "--mesh", "shard=8,tensor=4"),
        pytest.param((LLAMA, "--on", "b200x8x4", "--precision", "fp8"), marks=pytest.mark.slow),
        (LLAMA, "--on", "b200x8x1", "--mesh", "shard=8", "--precision", "fp8"),
        pytest.param((LLAMA, "--on", "h100x8x1", "--sweep", "nodes=1..16", "--price", "2"), marks=pytest.mark.slow),
        (LLAMA, "--on", "h100x8x1", "--sweep", "nodes=1..4", "--price", "2"),
        pytest.param(
            (str(RECIPES / "llama3-70b.toml"), "--on", "h100x8x64", "--price", "2.5", "--explain"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (str(RECIPES / "llama3-70b.toml"), "--on", "h100x8x1", "--sweep", "nodes=1,2,64"), marks=pytest.mark.slow
        ),
        (str(RECIPES / "llama3-405b.toml"), "--on", "h100x8x2048", "--price", "2.5", "--explain"),
        (str(RECIPES / "demo.toml"), "--on", "cpu", "--explain"),
        (str(RECIPES / "demo.toml"), "--on", "cpu"),
    ],
    ids=lambda words: " ".join(words).replace(str(RECIPES), "recipes"),
)
def test_screens_are_plain_and_narrow(words: tuple[str, ...]) -> None:
    # paths of this machine may be long; what stands around them may not
    shown = text(*words).replace(str(RECIPES), "recipes")
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.isascii()
    assert "\x1b" not in shown
    assert "next: " in shown


def test_text_and_json_agree() -> None:
    words = (LLAMA, "--on", "h100x8x4", "--price", "2.5")
    shown, found = text(*words), document(*words)
    best = found["best"]
    assert shown.startswith("llama3-8b  8.03B parameters, 8,192 tokens x 512 sequences per step, 32 x H100\n")
    assert f"{best['tokens_s']:,.0f} tokens/s" in shown
    assert f"{100 * best['mfu']:.1f} %" in shown
    assert f"{100 * best['mfu_full_attention']:.1f} % counting" in " ".join(shown.split())
    assert f"${found['run']['cost']:,.0f} at $2.50" in shown
    table = [line for line in shown.splitlines() if line.startswith("> ")]
    assert len(table) == 1
    assert all(f"{part} " in shown for part in ("weights", "gradients", "optimizer", "activations", "free"))


def test_figures_are_consistent() -> None:
    found = document(LLAMA, "--on", "h100x8x4", "--price", "2.5")
    assert found["plans"][0] == found["best"]
    assert found["model"]["parameters"] == 8_030_261_248  # the published model
    assert found["cluster"]["devices"] == 32
    for one in found["plans"]:
        assert list(one["accounts"]) == list(ACCOUNTS)
        assert sum(one["accounts"].values()) == pytest.approx(one["step_s"])
        assert one["tokens_s"] == pytest.approx(8192 * 512 / one["step_s"])
        assert one["mfu"] == pytest.approx(one["accounts"]["useful"] / one["step_s"])
        memory = one["memory"]
        parts = ("weights", "gradients", "optimizer", "activations", "gathered", "logits", "overhead")
        assert sum(memory[part] for part in parts) == pytest.approx(memory["total"])
        assert memory["total"] <= memory["capacity"] == 80 * 2**30
        run = one["run"]
        assert run["cost"] == pytest.approx(2.5 * run["device_hours"])
        assert run["device_hours"] == pytest.approx(32 * 24 * run["days"])
        assert run["seconds"] * run["goodput"]["share"] == pytest.approx(100_000 * one["step_s"])
    steps = [one["step_s"] for one in found["plans"][:6]]
    assert steps == sorted(steps)


def test_explanations_are_in_the_json() -> None:
    found = document(LLAMA, "--on", "h100x8x4", "--mesh", "shard=8,tensor=4", "--explain")
    step = next(one for one in found["explain"] if one["title"].startswith("a step"))
    assert sum(row["seconds"] for row in step["rows"]) == pytest.approx(found["best"]["step_s"])


def test_attention_that_is_not_causal_is_counted_in_full() -> None:
    causal, full = (" ".join(text(f"recipes/{name}.toml", "--on", "h100x1").split()) for name in ("demo", "images"))
    assert "causal attention counted half" in causal
    assert "attention counted in full: it is not causal" in full
    assert "half" not in full


def test_without_a_price_there_is_no_cost() -> None:
    assert document(LLAMA, "--on", "h100x8x4")["run"]["cost"] is None
    assert "$" not in text(LLAMA, "--on", "h100x8x4")


def test_limits_are_faster_and_fp8_is_trained_but_not_other_low_precisions() -> None:
    words = (LLAMA, "--on", "h100x8x1")
    default, limit = (document(*words, "--fidelity", name) for name in ("default", "limit"))
    assert limit["best"]["step_s"] < default["best"]["step_s"]
    low = document(*words, "--precision", "fp8")
    assert low["runnable"]["precision"] == low["best"]["precision"] == "fp8"
    assert "--set train.fp8.scaling=tensorwise" in text(*words, "--precision", "fp8").replace("\n      ", " ")
    lower = document(LLAMA, "--on", "b200x8x1", "--precision", "nvfp4")
    assert lower["runnable"] is None
    assert lower["best"]["precision"] == "nvfp4"


@pytest.mark.slow
@pytest.mark.parametrize(("seq", "batch", "nodes"), [(131_072, 64, 64), (1_048_576, 8, 32)])
def test_long_sequences_are_shared_by_devices(seq: int, batch: int, nodes: int) -> None:
    """Unshared, the inputs of 80 layers alone would be 160 GB over eight devices for a million tokens."""
    words = (str(RECIPES / "llama3-70b.toml"), "--on", f"h100x8x{nodes}")
    words += ("--set", f"data.seq={seq}", "--set", f"train.batch={batch}")
    found = document(*words)
    assert found["best"]["mesh"]["context"] > 1
    assert found["best"]["runnable"]
    assert "the trainer can run the best plan" in text(*words)


def test_a_mesh_is_the_only_one() -> None:
    """The best way to run it, and the best of those that the trainer has."""
    found = document(LLAMA, "--on", "h100x8x4", "--mesh", "shard=8,tensor=4")
    assert {(one["mesh"]["shard"], one["mesh"]["tensor"], one["devices"]) for one in found["plans"]} == {(8, 4, 32)}
    assert len(found["plans"]) <= 2
    assert found["runnable"]["zero"] == 3


def test_mesh_of_the_recipe_is_used() -> None:
    found = document(LLAMA, "--on", "h100x8x4", "--set", "parallel.tensor=4")
    assert (found["best"]["mesh"]["shard"], found["best"]["mesh"]["tensor"]) == (8, 4)
    stages = ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.stages=[9,9,9,5]")
    cut = document(LLAMA, "--on", "h100x8x4", *(word for stage in stages for word in ("--set", stage)))["best"]
    assert (cut["mesh"]["shard"], cut["mesh"]["pipeline"], cut["schedule"]) == (16, 2, "interleaved")
    assert cut["stages"] == [9, 9, 9, 5]


@pytest.mark.parametrize(("on", "exact"), [("h200x1", True), ("cpu", False)])
def test_a_policy_is_planned_as_it_would_be_trained(on: str, exact: bool) -> None:
    settings = ("objective.kind=grpo", 'rl.rewards=["math"]', "rl.max_tokens=64", "train.dtype=bfloat16")
    options = PlanOptions(Path(QWEN), on, None, None, settings, *[None] * 3, "time", *[None] * 3, 1.0)
    assert load_request(options).recipe.inference.exact is exact


def test_custom_class_has_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[model]\nclass = "package.module:Net"\n[data]\npath = "data"\n')
    found = error(str(file), "--on", "h100x8x4")
    assert "package.module:Net" in found.message


# -- what is not said


def test_a_vocabulary_that_is_not_built_is_assumed() -> None:
    result = call(str(RECIPES / "demo.toml"), "--on", "cpu", "--json", "--set", "data.path=none")
    assert json.loads(result.stdout)["model"]["vocab"] == 4096
    assert "none is not built; assuming a vocabulary of 4,096 tokens" in result.stderr


def test_vocabulary_of_a_built_dataset_is_used(dataset: Path) -> None:
    """The data set has 300 entries, and training rounds up to a multiple of 64."""
    result = call(str(RECIPES / "demo.toml"), "--on", "cpu", "--json", "--set", f"data.path={dataset}")
    assert json.loads(result.stdout)["model"]["vocab"] == 320
    assert not result.stderr
    assert plan_request.VOCABULARY_MULTIPLE == resolve.VOCABULARY_MULTIPLE


def test_default_cluster_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = document(str(RECIPES / "demo.toml"), "--set", "train.device=cpu")
    assert (found["cluster"]["chip"], found["cluster"]["devices"]) == ("cpu", 1)


# -- sweeps


def test_sweeps_are_read() -> None:
    assert parse_sweep("nodes=8..64") == (8, 16, 32, 64)
    assert parse_sweep("nodes=3..20") == (3, 6, 12, 20)
    assert parse_sweep("nodes=16,8,12,8") == (8, 12, 16)
    assert parse_sweep("nodes=5..5") == (5,)


def test_a_usual_cluster_stays_usual_in_any_size() -> None:
    for nodes in (1, 2, 64, 512):
        assert resize_cluster(parse_on("h100x8x4"), nodes) == default_cluster(known_chip("h100"), 8, nodes)


def test_a_clusters_own_network_grows_with_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'chip = "h100"\nnodes = 4\nprice_per_gpu_hour = 3\n[[level]]\nname = "nvlink"\ndevices = 8\ngigabytes_s = 400\n'
        '[[level]]\nname = "slow"\ngigabits_s = 100\noversubscription = 2\n'
    )
    cluster = load_cluster(file)
    for nodes, sizes in ((1, [8]), (2, [8, 16]), (16, [8, 128])):
        made = resize_cluster(cluster, nodes)
        assert (made.devices, made.price_per_gpu_hour) == (8 * nodes, 3)
        assert [level.devices for level in made.levels] == sizes
        assert nodes == 1 or made.levels[-1].oversubscription == 2


@pytest.mark.slow
def test_scaling_is_against_the_first_that_fits() -> None:
    found = document(str(RECIPES / "llama3-70b.toml"), "--on", "h100x8x1", "--sweep", "nodes=1..16")["points"]
    assert [point["nodes"] for point in found] == [1, 2, 4, 8, 16]
    assert found[0]["plan"] is None
    assert "does not fit" in found[0]["reason"]
    fit = [point for point in found if point["plan"] is not None]
    assert len(fit) >= 3
    assert fit[0]["scaling"] == 1.0
    for point in fit:
        speed = point["plan"]["tokens_s"] / point["devices"]
        first = fit[0]["plan"]["tokens_s"] / fit[0]["devices"]
        assert point["scaling"] == pytest.approx(speed / first)


@pytest.mark.parametrize(("nodes", "bars"), [("1..4", True), pytest.param("64,128", False, marks=pytest.mark.slow)])
def test_sweep_explains_bars_if_there_are_any(nodes: str, bars: bool) -> None:
    recipe = LLAMA if bars else str(RECIPES / "llama3-70b.toml")
    price = ("--price", "2") if bars else ()
    *table, footer = text(recipe, "--on", "h100x8x1", "--sweep", f"nodes={nodes}", *price).partition("scaling: ")
    assert ("|####" in table[0]) is bars, "the case no longer has what it is for"
    assert ("bars:" in footer) is bars


# -- rooflines


@pytest.mark.slow
def test_a_roofline_is_drawn_and_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "roof.svg"
    shown = text(LLAMA, "--on", "h100x8x4", "--mesh", "shard=8,tensor=4", "--roofline", str(file))
    assert "roof: 3.35 TB/s up to 295 FLOP/byte" in shown
    assert "mlp.up" in file.read_text()


# -- against published runs


@pytest.fixture
def few_runs(tmp_path: Path) -> Path:
    """The first lines of the table, and one that says nothing of its layers."""
    with RUNS.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    kept = [*lines[:30], dict(lines[0]) | {"layers": ""}]
    file = tmp_path / "few.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, lines[0])
        writer.writeheader()
        writer.writerows(kept)
    return file


def test_runs_are_predicted_line_by_line(few_runs: Path) -> None:
    found = document("--against", str(few_runs))
    keys = {"row", "source", "chip", "tok_s_per_gpu", "predicted", "error", "mem_gb", "predicted_mem_gb", "skipped"}
    assert all(keys <= set(row) for row in found["rows"])
    assert [row["row"] for row in found["rows"]] == list(range(31))
    assert found["rows"][-1]["skipped"]
    assert found["rows"][-1]["predicted"] is None
    for row in found["rows"][:-1]:
        assert row["error"] == pytest.approx(row["predicted"] / row["tok_s_per_gpu"] - 1)
    group = found["tables"]["groups"]["unseen: dense, all modelled"]
    sizes = [abs(row["predictions"]["unseen"] / row["measured"] - 1) for row in found["rows"][:-1]]
    assert group["mean"] == pytest.approx(sum(sizes) / len(sizes))


def test_tables_are_printed(few_runs: Path) -> None:
    shown = text("--against", str(few_runs), "--calibrate", "4", "--seed", "3")
    assert max(map(len, shown.splitlines())) <= 80
    order = [shown.index(part) for part in ("\ngroups", "\n(a) unseen", "\n(b) calibrated on 4", "\n(c) fitted on all")]
    assert order == sorted(order)
    assert "skipped 1 line" in shown
    assert len(shown.partition("largest errors, unseen")[2].split("\n\n")[0].splitlines()) == 1 + 1 + 10


@pytest.mark.slow
def test_the_stated_accuracy_is_the_measured_one() -> None:
    groups = document("--against", str(RUNS))["tables"]["groups"]
    for stated, name in (("dense", "unseen: dense, fully specified"), ("other", "unseen: experts or other chips")):
        assert groups[name]["mean"] == pytest.approx(ERRORS[stated], abs=0.01)


@pytest.mark.parametrize(
    ("source", "short"),
    [
        ("mosaicml/llm-foundry scripts/README.md [H100 80GB BF16]", "llm-foundry H100 80GB BF16"),
        ("NVIDIA-NeMo/Megatron-Bridge docs/a.md [26.06 NeMo Container; SFT Performance]", "Megatron-Bridge 26.06 SFT"),
        ("pytorch/torchtitan benchmarks/llama3_h100.md", "torchtitan llama3_h100.md"),
        ("single-node iterations", "single-node iterations"),
        ("NVIDIA/Megatron-LM README (strong scaling texts)", "Megatron-LM strong scaling te.."),
    ],
)
def test_sources_are_shortened(source: str, short: str) -> None:
    assert short_source(source, 31) == short


# -- mistakes


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        ((), "nothing to plan", "--against"),
        ((LLAMA, "--on", "h1000x8x4"), "unknown chip", "h100"),
        ((LLAMA, "--on", "h100x8x4", "--cluster", "x.toml"), "exclude each other", "one of them"),
        ((LLAMA, "--on", "h100x8x4", "--fidelity", "best"), "--fidelity best", "limit, default, measured"),
        ((LLAMA, "--on", "h100x8x4", "--fidelity", "measured"), "no measured ceilings for h100", "--ceilings"),
        ((LLAMA, "--on", "h100x8x4", "--rank", "beauty"), "--rank beauty", "time, cost"),
        ((LLAMA, "--on", "h100x8x4", "--precision", "fp3"), "--precision fp3", "bf16"),
        ((LLAMA, "--on", "h100x8x4", "--precision", "nvfp4"), "h100 does not support nvfp4", "float8"),
        ((LLAMA, "--on", "h100x8x4", "--price", "-1"), "invalid --price -1", "device-hour"),
        ((LLAMA, "--on", "h100x8x4", "--mesh", "shard=4,tensor=2"), "takes 8 devices, h100x8x4 has 32", "shard=16"),
        ((LLAMA, "--on", "h100x8x4", "--mesh", "tensr=2"), "expected AXIS=SIZE", "tensor"),
        ((LLAMA, "--on", "h100x8x4", "--ceilings", "none.json"), "none.json: cannot be read", "measure"),
        ((LLAMA, "--on", "h100x8x4", "--sweep", "nodes=a..b"), "invalid number of nodes", "8..512"),
        ((LLAMA, "--on", "h100x8x4", "--sweep", "nodes=0..4"), "invalid number of nodes", "8..512"),
        ((LLAMA, "--on", "h100x8x4", "--sweep", "nodes=8..4"), "8 is more than 4", "8..512"),
        ((LLAMA, "--on", "h100x8x4", "--sweep", "gpus=8"), "only nodes", "8..512"),
        (
            (LLAMA, "--on", "h100x8x4", "--sweep", "nodes=4", "--mesh", "shard=32"),
            "--sweep excludes --mesh",
            "one number of nodes",
        ),
        ((LLAMA, "--on", "h100x8x4", "--mesh", "shard=32", "--roofline", "roof.pdf"), "cannot draw", ".svg"),
        ((LLAMA, "--on", "h100x8x4", "--calibrate", "3"), "--calibrate", "--against"),
        ((LLAMA, "--against", "runs.csv"), "takes no recipe", "--against runs.csv"),
        (("--against", "none.csv"), "none.csv: no such file", "published_runs.csv"),
        (("none.toml",), "no such recipe", "recipe ls"),
        ((LLAMA, "--on", "h100x1x1"), "does not fit", "needs"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else None,
)
def test_mistakes_are_sentences(words: tuple[str, ...], sentence: str, hint: str) -> None:
    found = error(*words)
    assert sentence in found.message
    assert hint in (found.hint or "")


@pytest.mark.slow
def test_calibration_reports_its_error(tmp_path: Path) -> None:
    with RUNS.open(newline="", encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if "A100 40GB" in line["source"]][::2]

    def calibrated(factor: float) -> str:
        file = tmp_path / "mine.csv"
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows({**line, "tok_s_per_gpu": str(float(line["tok_s_per_gpu"]) * factor)} for line in lines)
        done = call(LLAMA, "--on", "a100x8x4", "--calibrate-to", str(file))
        assert done.exit_code == 0
        return done.stderr

    good, bad = calibrated(1.0), calibrated(0.05)
    assert "calibrated to 18 runs" in good
    assert "poor fit" not in good
    assert "poor fit to these runs" in bad


def test_absurd_sizes_fail_at_once() -> None:
    for words in (("--on", "h100x8x99999999999999"), ("--on", "h100", "--set", f"train.batch={10**20}")):
        done = call(LLAMA, *words)
        assert done.exit_code != 0


@pytest.mark.slow
def test_another_model_is_not_offered_for_training(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "mix.json").write_text(json.dumps(config), encoding="utf-8")
    done = call(LLAMA, "--on", "h100x8x2", "--model", str(tmp_path / "mix.json"))
    assert done.output.startswith("mix  46.7B parameters")
    assert "the trainer can run the best plan" in done.output  # which shares experts out
    assert "headway train" not in done.output


@pytest.mark.slow
def test_a_best_plan_that_the_trainer_cannot_run_is_followed_by_one_that_it_can() -> None:
    """The search also tries to shard only the optimizer (ZeRO 1), which the trainer does not do."""
    best = json.loads(text(QWEN, "--on", "h100x8x1", "--json"))["plans"][0]
    assert (best["zero"], best["runnable"]) == (1, False)
    output = text(QWEN, "--on", "h100x8x1")
    said = "the trainer cannot run the best plan, as it has no ZeRO 1; it can run shard 8, microbatch"
    assert said in " ".join(output.split())


def test_modelled_times_are_marked_among_measured_ones() -> None:
    """On a chip with measured kernels, links and bubbles are still modelled: the mark is beside each number."""
    on_measured, on_modelled = (
        text(LLAMA, "--on", "h200x8x2").splitlines(),
        text(LLAMA, "--on", "h100x8x2").splitlines(),
    )
    rows = {line[2:23].strip(): line for line in on_measured if line.endswith("|") and line[30:39].strip()}
    assert {name for name, line in rows.items() if "~" in line[30:39]} == {
        name for name in rows if name in ("exposed communication", "slowed by overlap", "pipeline bubble", "host")
    }
    assert "exposed communication" in rows
    assert any(line.strip().startswith("~ modelled") for line in on_measured)
    assert not any("~" in line for line in on_modelled)
