"""What `headway plan --json` prints: documents of plans, runs and sweeps."""

from dataclasses import asdict
from typing import Any

from headway.cli.plan_view import run_of
from headway.plan.costs import CostModel
from headway.plan.flops import active_parameters, flops_per_token, flops_per_token_full_attention, parameters
from headway.plan.plan import Plan, RunForecast
from headway.plan.scaling import ScalingPoint, efficiency
from headway.plan.search import RankedPlan


def plan_document(planned: Plan, costs: CostModel, runs: dict[int, RunForecast]) -> dict[str, Any]:
    """Return everything the text shows as JSON-ready values."""
    arch, runnable = planned.architecture, planned.runnable
    plans = [ranked_document(candidate, runs[rank]) for rank, candidate in enumerate(planned.result.plans)]
    return {
        "recipe": planned.name,
        "model": {
            **asdict(arch),
            "parameters": parameters(arch),
            "active_parameters": active_parameters(arch),
            "flops_per_token": flops_per_token(arch, planned.seq),
            "flops_per_token_full_attention": flops_per_token_full_attention(arch, planned.seq),
        },
        "seq": planned.seq,
        "batch": planned.batch,
        "cluster": planned.cluster.as_dict() | {"devices": planned.cluster.devices},
        "fidelity": planned.fidelity,
        "parameters_used": asdict(costs.parameters),
        "best": plans[0],
        "plans": plans,
        "runnable": None if runnable is None else ranked_document(runnable, run_of(planned, runnable)),
        "run": plans[0]["run"],
        "search": {
            "tried": planned.result.tried,
            "pruned_by_memory": planned.result.pruned_by_memory,
            "estimated": planned.result.estimated,
        },
    }


def ranked_document(candidate: RankedPlan, run: RunForecast) -> dict[str, Any]:
    """Return one plan of a ranking."""
    estimate, memory = candidate.estimate, candidate.estimate.memory
    settings = estimate.settings
    return {
        "mesh": asdict(settings.mesh),
        "devices": settings.mesh.devices,
        "microbatch": settings.microbatch,
        "microbatches": settings.microbatches,
        "zero": settings.zero,
        "recompute": settings.recompute,
        "recompute_blocks": settings.recompute_blocks,
        "keeps_weights": settings.keeps_weights,
        "reduces_each": settings.reduces_each,
        "schedule": settings.schedule,
        "chunks": settings.chunks,
        "stages": settings.stages,
        "precision": settings.precision,
        "reason": candidate.reason,
        "runnable": candidate.runnable,
        "step_s": estimate.step.seconds,
        "tokens_s": estimate.tokens_s,
        "tokens_s_per_device": estimate.tokens_s_per_device,
        "mfu": estimate.mfu,
        "mfu_full_attention": estimate.mfu_full_attention,
        "peak_flops_s": estimate.peak_flops_s,
        "accounts": dict(estimate.step.accounts),
        "exposed": dict(estimate.step.exposed),
        "bubble_share": estimate.step.bubble_share,
        "memory": {**asdict(memory), "allocated": memory.allocated, "total": memory.total, "fits": memory.fits},
        "run": run_document(run),
    }


def run_document(run: RunForecast) -> dict[str, Any]:
    """Return the forecast of a whole run."""
    goodput = {**vars(run.goodput), "accounts": dict(run.goodput.accounts)}
    values = {key: getattr(run, key) for key in ("steps", "tokens", "seconds", "days", "device_hours", "cost")}
    storage = asdict(run.storage) | {"kept": run.storage.kept, "peak_bytes": run.storage.peak_bytes}
    return {**values, "price_per_device_hour": run.price_per_device_hour, "goodput": goodput, "storage": storage}


# -- several clusters


def point_document(points: tuple[ScalingPoint, ...], point: ScalingPoint) -> dict[str, Any]:
    """Return one number of nodes of a sweep."""
    planned = point.plan
    return {
        "nodes": point.nodes,
        "devices": point.devices,
        "scaling": efficiency(points, point),
        "plan": None if planned is None else ranked_document(planned.best, planned.run),
        "reason": point.reason or None,
    }
