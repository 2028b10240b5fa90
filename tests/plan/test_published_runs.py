"""Lines of tables as cases: what is read, what a rule gives, what is skipped; conversions against the sources' own
figures."""

import csv
from pathlib import Path

import pytest

from headway.hardware import parse_on
from headway.plan.accuracy.calibrate import predict
from headway.plan.accuracy.published_runs import PublishedRun, UnmodelledRun, read_case, read_iteration
from headway.plan.efficiencies import fitted_parameters
from headway.plan.plan import plan
from headway.recipe import load_recipe

TABLES = Path(__file__).parents[2] / "benchmarks/plan"
with (TABLES / "published_runs.csv").open(newline="", encoding="utf-8") as stream:
    RUNS = list(csv.DictReader(stream))
with (TABLES / "a100_iterations.csv").open(newline="", encoding="utf-8") as stream:
    ITERATIONS = list(csv.DictReader(stream))


def case(row: int, **changes: str) -> PublishedRun:
    return read_case(row, {**RUNS[row], **changes})


def test_dense_rows_on_known_chips_are_modelled_or_name_what_is_missing() -> None:
    modelled, skipped = 0, []
    for row, line in enumerate(RUNS):
        if not line["moe"] and any(name in line["gpu"].lower() for name in ("a100", "h100", "h200")):
            try:
                read_case(row, line)
                modelled += 1
            except UnmodelledRun as reason:
                skipped.append(str(reason))
    assert modelled + len(skipped) == 231
    assert modelled >= 200
    assert all("column" in reason for reason in skipped), skipped


@pytest.mark.parametrize("source", ["llm-foundry", "Megatron-Bridge docs"])
def test_tokens_from_flops_are_the_published_tokens(source: str) -> None:
    """If a row has both, the source's convention converts one into the other within rounding."""
    checked = 0
    for row, line in enumerate(RUNS):
        if (
            source in line["source"]
            and line["tok_s_per_gpu"]
            and line["tflops_per_gpu"]
            and not line["moe"]
            and line["layers"]
        ):
            if "LoRA" in line["source"]:
                continue
            given, tokens = case(row).tokens_s, case(row, tok_s_per_gpu="").tokens_s
            assert tokens == pytest.approx(given, rel=0.03), row
            checked += 1
    assert checked >= 20


def test_notes_are_parsed() -> None:
    titan = case(117)
    assert titan.cluster.chip.memory_bytes == 96 * 2**30
    assert titan.cluster.chip.bandwidth_bytes_s == 2.4e12
    assert titan.cluster.power_w == 500
    assert titan.settings.software.tensor_overlap
    assert titan.settings.microbatches == 8
    assert case(114).settings.chunks == 5
    assert case(114).settings.schedule == "interleaved"
    foundry = case(47)
    assert foundry.cluster.levels[-1].bandwidth_bytes_s == 25e9  # 1600 Gb/s per node of eight
    assert case(327).cluster.levels[-1].bandwidth_bytes_s == 12.5e9
    assert case(377).cluster.levels[-1].bandwidth_bytes_s == 6.25e9


def test_model_variant_is_chosen_by_parameter_count() -> None:
    assert case(0).architecture.gated is False  # MPT: GELU, four times the width
    assert case(115).architecture.gated
    assert not case(115).architecture.tied
    assert case(312).architecture.tied  # 1.34B with a vocabulary of 131,072 only if the head is the embedding
    assert case(131).architecture.latent is not None


def test_missing_columns_and_assumed_rules_are_reported() -> None:
    with pytest.raises(UnmodelledRun, match="layers"):
        case(0, layers="")
    with pytest.raises(UnmodelledRun, match="gpu"):
        case(0, gpu="TPU v5p")
    with pytest.raises(UnmodelledRun, match="is not n_gpus"):
        case(0, dp="7")
    with pytest.raises(UnmodelledRun, match="expected a positive number"):
        case(0, tok_s_per_gpu="fast")
    for damage in ("0", "-3", "nan", "inf", "1e30"):
        with pytest.raises(UnmodelledRun, match="column layers: expected a positive number"):
            case(0, layers=damage)
    with pytest.raises(UnmodelledRun, match="tok_s_per_gpu"):
        case(0, tok_s_per_gpu="", tflops_per_gpu="", mfu="")
    assert case(0).assumed == ()
    assert any("micro_batch" in rule for rule in case(0, micro_batch="", notes="").assumed)
    assert any("recomputation" in rule for rule in case(107).assumed)


def test_recomputation_is_assumed_if_a_run_fits_only_with_it() -> None:
    assert case(49, activation_ckpt="").settings.recompute == "full"  # 30B on eight A100s
    assert case(61, activation_ckpt="").settings.recompute == "none"  # 0.76B on eight A100s


def test_iterations_are_read() -> None:
    first = read_iteration(0, ITERATIONS[0])
    mesh = first.settings.mesh
    assert (mesh.shard, mesh.tensor, mesh.pipeline, first.settings.microbatch) == (2, 1, 2, 4)
    assert first.seconds == pytest.approx(0.410490577)
    with pytest.raises(UnmodelledRun):
        read_iteration(0, {**ITERATIONS[0], "# GPUs": "3"})
    with pytest.raises(UnmodelledRun):
        read_iteration(0, {**ITERATIONS[0], "micro batch": "many"})


def test_headway_rows_use_the_planners_software() -> None:
    """8B on 32 H100, sharded, compiled: a row with the plan's settings has the plan's prediction."""
    recipe = load_recipe(
        TABLES.parents[1] / "recipes/llama3-8b.toml", ["parallel.keep_weights=false", "train.recompute=none"]
    )
    best = plan(recipe, parse_on("h100x8x4")).best.estimate
    line = {
        "source": "headway here", "layers": "32", "hidden": "4096", "ffn": "14336", "heads": "32", "kv_heads": "8",
        "vocab": "128256", "params_b": "8.03", "seq_len": "8192", "gpu": "H100 80GB", "n_gpus": "32", "dtype": "bf16",
        "dp": "32", "micro_batch": str(best.settings.microbatch), "global_batch_seqs": "512", "activation_ckpt": "none",
        "tok_s_per_gpu": "10000", "notes": "compile",
    }  # fmt: skip
    assert predict(read_case(0, line), fitted_parameters()) == pytest.approx(best.tokens_s_per_device, rel=1e-6)
