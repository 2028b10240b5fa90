"""Properties of any cost model, whatever its numbers: at fidelity `limit`, and between fidelities."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest

from headway.hardware import Cluster, default_cluster, known_chip
from headway.plan.architecture import Architecture, ExpertShape, LatentAttention
from headway.plan.candidates import held_microbatches
from headway.plan.checks import valid
from headway.plan.costs import CostModel, make_cost_model
from headway.plan.estimate import Estimate, estimate
from headway.plan.memory import PeakMemory, memory
from headway.plan.search import lower_bound
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.step import ACCOUNTS, step
from headway.plan.task import TrainingTask
from headway.plan.trainer import headway_software
from thinned import thinned

GPT = Architecture(24, 1536, 16, 16, 96, 6144, 50304, gated=False, rotary=False, positions=4096, layer_norm=True)
SMALL = Architecture(16, 2048, 32, 8, 64, 8192, 128256)
EIGHT = Architecture(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
SEVENTY = Architecture(80, 8192, 64, 8, 128, 28672, 128256, tied=False)
EXPERTS = Architecture(32, 4096, 32, 8, 128, 14336, 32000, tied=False, experts=ExpertShape(8, 2, 14336))
FINE = Architecture(
    28, 2048, 16, 16, 192, 10944, 102400, tied=False,
    experts=ExpertShape(64, 6, 1408, shared=2, dense_layers=1), latent=LatentAttention(0, 512, 64, 128),
)  # fmt: skip
MODELS = {"gpt": GPT, "small": SMALL, "8b": EIGHT, "70b": SEVENTY, "experts": EXPERTS, "fine": FINE}
DENSE = [name for name, arch in MODELS.items() if arch.experts is None]
BATCH = 512


def on(chip: str, devices: int) -> Cluster:
    return default_cluster(known_chip(chip), min(8, devices), max(1, devices // 8))


def limit(chip: str, devices: int) -> CostModel:
    return make_cost_model(on(chip, devices), "limit")


def rising(values: list[float]) -> bool:
    """Non-decreasing up to rounding."""
    return all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(values))


# -- time at the speed of light


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_more_devices_never_take_longer(name, zero):
    """Along the data axis, at the same batch, with free communication."""
    seconds = []
    for devices in (1, 2, 4, 8, 16, 64, 256, 512):
        mesh = Mesh(shard=devices) if zero else Mesh(replicate=devices)
        settings = Settings(mesh, 4096, 1, BATCH, zero)
        seconds.append(step(MODELS[name], settings, limit("h100", devices)).seconds)
    assert rising(seconds[::-1]), seconds


@pytest.mark.parametrize("name", MODELS)
def test_devices_of_the_tensor_axis_never_take_longer(name):
    seconds = []
    for tensor in (1, 2, 4, 8):
        settings = Settings(Mesh(shard=8, tensor=tensor), 4096, 1, BATCH)
        seconds.append(step(MODELS[name], settings, limit("h100", 8 * tensor)).seconds)
    assert rising(seconds[::-1]), seconds


@pytest.mark.parametrize(
    ("name", "fidelity", "mesh"),
    thinned(MODELS, ["limit", "default"], [Mesh(shard=16), Mesh(shard=4, tensor=4), Mesh(shard=8, pipeline=2)]),
)
def test_more_layers_take_longer(name, fidelity, mesh):
    costs = make_cost_model(on("h100", 16), fidelity)
    layers = (2, 4, 8, 20, 40)
    seconds = [step(replace(MODELS[name], layers=n), Settings(mesh, 4096, 1, 64), costs).seconds for n in layers]
    assert all(later > earlier for earlier, later in pairwise(seconds)), seconds


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fidelity", ["limit", "default"])
def test_more_recomputation_takes_longer_and_less_memory(name, fidelity):
    costs = make_cost_model(on("h100", 16), fidelity)
    plans = []
    for recompute in ("none", "selective", "full"):
        settings = Settings(Mesh(shard=16), 4096, 2, 64, recompute=recompute)
        plans.append(estimate(MODELS[name], settings, costs))
    assert rising([plan.step.seconds for plan in plans])
    assert rising([plan.memory.activations for plan in plans][::-1])


# -- memory falls with sharding


def needs(arch: Architecture, settings: Settings) -> PeakMemory:
    return memory(arch, settings, on("h100", settings.mesh.devices), held_microbatches(settings))


def falls(arch: Architecture, variants: list[Settings], of: Callable[[PeakMemory], float]) -> bool:
    return rising([of(needs(arch, settings)) for settings in reversed(variants)])


def allocated(need: PeakMemory) -> float:
    """Without communicator buffers, which grow with the mesh."""
    return need.allocated


@pytest.mark.parametrize(
    ("name", "mesh", "microbatch"), thinned(MODELS, [Mesh(shard=8), Mesh(shard=64), Mesh(shard=8, tensor=4)], [1, 4])
)
def test_memory_falls_with_what_is_sharded(name, mesh, microbatch):
    variants = [Settings(mesh, 4096, microbatch, BATCH, zero) for zero in (0, 1, 2, 3)]
    assert falls(MODELS[name], variants, allocated), [needs(MODELS[name], settings) for settings in variants]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatch", [1, 4])
def test_memory_falls_with_what_is_sharded_in_a_pipeline(name, microbatch):
    variants = [Settings(Mesh(shard=8, pipeline=4), 4096, microbatch, BATCH, zero) for zero in (0, 1, 3)]
    assert falls(MODELS[name], variants, allocated), [needs(MODELS[name], settings) for settings in variants]


@pytest.mark.parametrize("name", MODELS)
def test_zero_3_in_a_pipeline_is_zero_2_plus_a_shard(name):
    """Weights stay gathered and gradients unsharded for the step: ZeRO 3 is ZeRO 2 plus a shard."""
    two, three = (needs(MODELS[name], Settings(Mesh(shard=8, pipeline=4), 4096, 1, BATCH, zero)) for zero in (2, 3))
    assert three.allocated <= two.allocated + three.weights


def test_gathered_weights_are_at_least_one_layer():
    """With nothing split, ZeRO 3 gathers a full layer: here eight experts of three matrices, in bfloat16."""
    assert needs(EXPERTS, Settings(Mesh(shard=64), 4096, 1, BATCH)).gathered >= 2 * 8 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("name", "zero", "rest"), thinned(MODELS, [0, 1, 3], [Mesh(), Mesh(tensor=4), Mesh(pipeline=4)])
)
def test_memory_falls_with_shards(name, zero, rest):
    variants = [Settings(replace(rest, shard=shard), 4096, 1, BATCH, zero) for shard in (2, 4, 8, 32, 128)]
    assert falls(MODELS[name], variants, allocated)


@pytest.mark.parametrize(("name", "zero", "recompute"), thinned(MODELS, [0, 1, 3], ["none", "selective", "full"]))
def test_memory_falls_with_the_tensor_axis(name, zero, recompute):
    variants = [Settings(Mesh(shard=8, tensor=n), 4096, 1, BATCH, zero, recompute) for n in (1, 2, 4, 8)]
    assert falls(MODELS[name], variants, allocated)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_falls_with_pipeline_stages(name, zero, recompute):
    variants = [Settings(Mesh(shard=8, pipeline=n), 4096, 1, BATCH, zero, recompute) for n in (1, 2, 4)]
    assert falls(MODELS[name], variants, allocated), [needs(MODELS[name], settings) for settings in variants]


@pytest.mark.parametrize("name", MODELS)
def test_memory_falls_with_more_pipeline_stages_of_sharded_weights(name):
    """From two stages on: the first split keeps weights gathered that were gathered per layer before."""
    variants = [Settings(Mesh(shard=8, pipeline=n), 4096, 1, BATCH, 3) for n in (2, 4, 8)]
    assert falls(MODELS[name], variants, allocated), [needs(MODELS[name], settings) for settings in variants]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_memory_falls_with_the_expert_axis(zero):
    variants = [Settings(Mesh(shard=8, expert=n), 4096, 1, BATCH, zero) for n in (1, 2, 4, 8)]
    assert falls(EXPERTS, variants, allocated)


@pytest.mark.parametrize("name", DENSE)
def test_memory_falls_with_the_context_axis(name):
    variants = [Settings(Mesh(shard=2, context=n), 32768, 1, BATCH) for n in (1, 2, 4, 8)]
    assert falls(MODELS[name], variants, allocated)


# -- random settings


def random_cases(chips: tuple[str, ...], seed: int, count: int) -> list[tuple[Architecture, Settings, Cluster]]:
    """Valid settings of all kinds."""
    random, cases = Random(seed), []
    while len(cases) < count:
        arch = random.choice(list(MODELS.values()))
        sizes = {axis: random.choice((1, 1, 2, 4)) for axis in ("replicate", "tensor", "pipeline", "context", "expert")}
        mesh = Mesh(shard=random.choice((1, 2, 8)), **sizes)
        schedule = random.choice(("1f1b", "1f1b", "interleaved", "zero-bubble"))
        software = Software(
            fusion=random.choice(("eager", "fused", "compiled")), attention=random.choice(("flash2", "cudnn")),
            loss=random.choice(("eager", "fused", "chunked")), prefetch=random.random() < 0.7,
            data_overlap=random.random() < 0.8, sequence_parallel=random.random() < 0.8,
            tensor_overlap=random.random() < 0.3, waits_each_step=random.random() < 0.5,
            cuda_graphs=random.random() < 0.3,
        )  # fmt: skip
        zero = random.choice((0, 1, 3))
        if random.random() < 0.4:
            software = headway_software(
                compiled=random.random() < 0.5, autocasts=random.random() < 0.8, older=False,
                offloads=random.random() < 0.3,
            ).on_mesh(mesh, passes=2)  # fmt: skip
            zero = 3 if mesh.shard * mesh.context > 1 else 0
        settings = Settings(
            mesh, random.choice((2048, 4096, 16384)), random.choice((1, 2, 4)), BATCH, zero,
            random.choice(("none", "attention", "selective", "full")), schedule,
            random.choice((2, 4)) if schedule == "interleaved" else 1, software=software,
            keeps_weights=random.random() < 0.2, recompute_blocks=random.choice((None, None, 0, 3)),
        )  # fmt: skip
        cluster = on(random.choice(chips), mesh.devices)
        if valid(arch, settings, cluster):
            cases.append((arch, settings, cluster))
    return cases


def test_no_step_beats_the_roofline():
    for arch, settings, cluster in random_cases(("h200",), seed=11, count=60):
        least = step(arch, settings, make_cost_model(cluster, "limit")).seconds
        for fidelity in ("default", "measured"):
            assert least <= step(arch, settings, make_cost_model(cluster, fidelity)).seconds, (fidelity, arch, settings)


def test_kernel_model_never_beats_the_roofline():
    for arch, settings, cluster in random_cases(("a100", "h100", "b200", "gb200", "mi300x", "l40s"), seed=12, count=80):
        least = step(arch, settings, make_cost_model(cluster, "limit")).seconds
        assert least <= step(arch, settings, make_cost_model(cluster, "default")).seconds, (
            arch,
            settings,
            cluster.name,
        )


def test_no_step_is_shorter_than_its_bound():
    for arch, settings, cluster in random_cases(("h200",), seed=14, count=30):
        for variant in (settings, replace(settings, frozen=True), replace(settings, precision="fp8")):
            task = TrainingTask(
                arch, variant.seq, variant.batch, variant.software, variant.precision, frozen=variant.frozen
            )
            for fidelity in ("limit", "default", "measured"):
                costs = make_cost_model(cluster, fidelity)
                assert lower_bound(task, variant, costs) <= step(arch, variant, costs).seconds * (1 + 1e-9), (
                    fidelity,
                    arch,
                    variant,
                )


@cache
def accounted() -> list[tuple[Settings, Estimate, CostModel]]:
    estimates = []
    for arch, settings, cluster in random_cases(("a100", "h200", "gb200"), seed=13, count=80):
        for costs in (make_cost_model(cluster, "limit"), make_cost_model(cluster, "default")):
            estimates.append((settings, estimate(arch, settings, costs), costs))
    return estimates


def test_accounts_sum_to_the_step_and_are_not_negative():
    for settings, plan, costs in accounted():
        accounts = plan.step.accounts
        assert tuple(accounts) == ACCOUNTS
        assert sum(accounts.values()) == pytest.approx(plan.step.seconds, rel=1e-9)
        assert sum(plan.step.exposed.values()) == pytest.approx(accounts["exposed communication"])
        least = -1e-9 * plan.step.seconds
        assert all(seconds >= least for seconds in accounts.values()), (costs.fidelity, settings, accounts)


def test_useful_time_is_model_flops_at_peak():
    """MFU from the step's time and from the account of useful seconds agree."""
    for settings, plan, costs in accounted():
        assert plan.mfu == pytest.approx(plan.step.accounts["useful"] / plan.step.seconds), (costs.fidelity, settings)
        assert 0 < plan.mfu <= 1


def test_memory_is_the_sum_of_its_parts():
    for _, plan, _ in accounted():
        need = plan.memory
        parts = (
            need.weights,
            need.gradients,
            need.optimizer,
            need.activations,
            need.gathered,
            need.logits,
            need.overhead,
        )
        assert all(part >= 0 for part in parts)
        assert need.total == pytest.approx(sum(parts))
        assert need.fits == (need.total <= need.capacity)
