"""Explanations against the plans they explain, against hand computation, and against published figures."""

from dataclasses import fields, replace
from typing import Any

import pytest

from headway.hardware import parse_on
from headway.plan.architecture import Architecture, ExpertShape
from headway.plan.checks import valid
from headway.plan.communication import communication_costs
from headway.plan.costs import CostModel, make_cost_model
from headway.plan.efficiencies import Efficiencies
from headway.plan.estimate import Estimate, estimate
from headway.plan.explain import ExplainTable, explain, parameter_meanings, roofline_points, step_terms
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.trainer import headway_software

LLAMA_8B = Architecture(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
SPARSE = Architecture(8, 2048, 16, 4, 128, 5632, 32000, experts=ExpertShape(16, 2, 1408, shared=1, dense_layers=2))
DENSE = Architecture(8, 2048, 16, 8, 128, 5632, 32000)


def headway_settings(mesh: Mesh, microbatch: int, *, offloads: bool = False, **changes: Any) -> Settings:
    """Settings of Headway's trainer, in bfloat16."""
    software = headway_software(compiled=False, autocasts=True, older=False, offloads=offloads).on_mesh(mesh, passes=2)
    return replace(Settings(mesh, 8192, microbatch, 256, software=software), **changes)


CASES = [
    (LLAMA_8B, Settings(Mesh(shard=32), 8192, 1, 512)),
    (LLAMA_8B, Settings(Mesh(shard=32), 8192, 2, 512, recompute="full")),
    (LLAMA_8B, Settings(Mesh(shard=32), 8192, 1, 512, software=Software(data_overlap=False))),
    (LLAMA_8B, Settings(Mesh(shard=32), 8192, 1, 512, software=Software(prefetch=False, fusion="eager"))),
    (LLAMA_8B, Settings(Mesh(replicate=4, shard=8), 8192, 1, 32, recompute="selective")),
    (LLAMA_8B, Settings(Mesh(shard=16, tensor=2), 8192, 1, 512, zero=1)),
    (LLAMA_8B, Settings(Mesh(replicate=8, tensor=4), 8192, 1, 512, zero=0)),
    (LLAMA_8B, Settings(Mesh(shard=4, tensor=2, context=4), 8192, 1, 64)),
    (LLAMA_8B, Settings(Mesh(shard=8, tensor=2, pipeline=2), 8192, 1, 512, schedule="interleaved", chunks=4)),
    (LLAMA_8B, Settings(Mesh(shard=4, pipeline=8), 8192, 1, 64, zero=1, schedule="zero-bubble")),
    (LLAMA_8B, Settings(Mesh(shard=4, tensor=8), 8192, 1, 64, software=Software(sequence_parallel=False))),
    (LLAMA_8B, headway_settings(Mesh(shard=32), 1)),
    (LLAMA_8B, headway_settings(Mesh(shard=32), 2, recompute="selective", recompute_blocks=5, keeps_weights=True)),
    (LLAMA_8B, headway_settings(Mesh(replicate=4, shard=8), 1, recompute="full")),
    (LLAMA_8B, headway_settings(Mesh(replicate=4, shard=8), 1, recompute="except-attention")),
    (LLAMA_8B, headway_settings(Mesh(shard=4, context=8), 1, recompute="except-attention")),
    (LLAMA_8B, headway_settings(Mesh(replicate=32), 4, zero=0)),
    (LLAMA_8B, headway_settings(Mesh(shard=4, tensor=8), 1, recompute="full", recompute_blocks=7)),
    (LLAMA_8B, headway_settings(Mesh(replicate=2, shard=2, tensor=2, pipeline=4), 1)),
    (
        LLAMA_8B,
        headway_settings(
            Mesh(shard=4, tensor=2, pipeline=4), 1, schedule="interleaved", chunks=2, recompute="selective"
        ),
    ),
    (LLAMA_8B, headway_settings(Mesh(tensor=8, pipeline=4), 2, zero=0, schedule="zero-bubble", recompute="full")),
    (DENSE, headway_settings(Mesh(replicate=8, pipeline=4), 1, zero=0)),
    (DENSE, headway_settings(Mesh(shard=8, pipeline=4), 4, offloads=True)),
    (DENSE, Settings(Mesh(shard=32), 512, 1, 32, frozen=True)),
    (SPARSE, Settings(Mesh(shard=32, expert=8), 4096, 1, 64, imbalance=1.2)),
    (SPARSE, Settings(Mesh(shard=16, tensor=2, expert=16), 4096, 1, 64, zero=1, recompute="full")),
    (SPARSE, Settings(Mesh(shard=16, pipeline=2, expert=4), 4096, 1, 64, precision="fp8")),
]


def estimate_of(arch: Architecture, settings: Settings, fidelity: str = "default") -> tuple[Estimate, CostModel]:
    cluster = parse_on("h100x8x4")
    assert valid(arch, settings, cluster)
    costs = make_cost_model(cluster, fidelity)
    return estimate(arch, settings, costs), costs


def section(tables: list[ExplainTable], start: str) -> ExplainTable:
    return next(table for table in tables if table.title.startswith(start))


@pytest.mark.parametrize("fidelity", ["default", "limit"])
@pytest.mark.parametrize(("arch", "settings"), CASES)
def test_explained_seconds_sum_to_the_step(arch: Architecture, settings: Settings, fidelity: str) -> None:
    plan, costs = estimate_of(arch, settings, fidelity)
    assert sum(seconds for _, _, seconds in step_terms(plan, costs)) == pytest.approx(plan.step.seconds, rel=1e-9)


@pytest.mark.parametrize("fidelity", ["default", "limit"])
@pytest.mark.parametrize(("arch", "settings"), CASES)
def test_exposed_communication_sums_to_the_step(arch: Architecture, settings: Settings, fidelity: str) -> None:
    plan, costs = estimate_of(arch, settings, fidelity)
    exposed = sum(cost.exposed or 0.0 for cost in communication_costs(plan, costs))
    assert exposed == pytest.approx(plan.step.accounts["exposed communication"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("arch", "settings"), CASES)
def test_memory_formulas_match_the_plan(arch: Architecture, settings: Settings) -> None:
    plan, costs = estimate_of(arch, settings)
    for name, _, size in section(explain(plan, costs), "memory").rows:
        assert size == pytest.approx(getattr(plan.memory, str(name)), rel=1e-9, abs=1.0), name


def test_weights_by_hand() -> None:
    """8,030,261,248 parameters (the published model), less norms; four bytes each, over 32 devices."""
    settings = Settings(Mesh(shard=32), 8192, 1, 512, software=Software(weight_bytes=4, master_bytes=0))
    plan, costs = estimate_of(LLAMA_8B, settings)
    rows = {row[0]: row for row in section(explain(plan, costs), "memory").rows}
    assert rows["weights"][1] == "4 B x 8.03e+09 parameters / 32"
    assert rows["weights"][2] == pytest.approx(4 * 8_030_261_248 / 32, rel=1e-4)
    assert rows["optimizer"][2] == pytest.approx(8 * 8_030_261_248 / 32, rel=1e-4)


def test_explained_gemm_by_hand() -> None:
    """Gate and up projection of a sequence of 8,192, at the roofline."""
    plan, costs = estimate_of(LLAMA_8B, CASES[0][1], "limit")
    rows = section(explain(plan, costs), "one layer, 1 x 8,192 tokens").rows
    up = next(row for row in rows if row[:2] == ("mlp.up", "forward"))
    m, n, k = 8192, 2 * 14336, 4096
    assert up[2:5] == (m, n, k)
    assert up[5:7] == (2 * m * n * k, 2 * (m * k + k * n + m * n))
    assert up[7] == pytest.approx(2 * m * n * k / 989.5e12)
    assert up[8] == pytest.approx(1.0)


def test_explained_flops_sum_to_the_model() -> None:
    """Six for each matrix parameter, and causal attention: 6 x layers x width x sequence."""
    plan, costs = estimate_of(LLAMA_8B, CASES[0][1])
    tables = explain(plan, costs)
    layer = sum(float(row[5]) for row in section(tables, "one layer, 1 x").rows)
    ends = sum(float(row[5]) for row in section(tables, "embedding, head and loss").rows)
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    token = 6 * matrices + 6 * 32 * 4096 * 8192
    assert 32 * layer + ends == pytest.approx(8192 * token)


def test_roofline_points_cover_the_device_time() -> None:
    """At fidelity `limit` nothing else takes time: no communication, host or bubble."""
    for settings in (CASES[0][1], CASES[1][1], CASES[4][1]):
        plan, costs = estimate_of(LLAMA_8B, settings, "limit")
        points = roofline_points(plan, costs)
        assert sum(point.seconds for point in points) == pytest.approx(plan.step.seconds)
        assert {"mlp.up", "attention.core", "head", "loss", "optimizer"} <= {point.name for point in points}


def test_full_recomputation_doubles_forward_flops() -> None:
    names = ("mlp.up", "attention.core")
    plain, again = (estimate_of(LLAMA_8B, replace(CASES[0][1], recompute=policy)) for policy in ("none", "full"))
    once, twice = ({point.name: point.flops for point in roofline_points(*plan)} for plan in (plain, again))
    for name in names:
        assert twice[name] == pytest.approx(4 / 3 * once[name])


def test_even_pipeline_has_the_textbook_bubble() -> None:
    """1F1B's bubble over its work is (stages - 1) / microbatches for even stages, small transfers and ends."""
    arch = Architecture(64, 4096, 32, 8, 128, 14336, 128, tied=False)
    plan, costs = estimate_of(arch, Settings(Mesh(shard=8, pipeline=4), 8192, 1, 128, zero=1), "limit")
    terms = {name: seconds for name, _, seconds in step_terms(plan, costs)}
    work = terms["layers, forward"] + terms["layers, backward"]
    assert terms["pipeline bubble"] / work == pytest.approx(3 / 16, rel=0.02)


def test_every_parameter_is_documented() -> None:
    meanings = parameter_meanings()
    assert set(meanings) == {field.name for field in fields(Efficiencies)}
    assert all(text.endswith(".") for text in meanings.values())
