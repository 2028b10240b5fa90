"""Rollouts of a run of reinforcement learning, for the page that shows prompts, answers and rewards."""

from collections.abc import Sequence
from typing import Any

from headway.data.tokenizer import load_tokenizer
from headway.errors import HeadwayError, RunError
from headway.rl.rollout_files import RolloutFiles
from headway.rl.samples import group_document, sampled_batch
from headway.track import RunFolder, read_recipe

GROUPS = 8
"""Of a page."""


def batch_list(run: RunFolder) -> dict[str, Any]:
    """Return the steps whose rollouts are kept."""
    return {"steps": RolloutFiles(run).steps()}


def batch_page(run: RunFolder, step: int, first: int) -> dict[str, Any]:
    """Return groups of a batch from the given one on."""
    files = RolloutFiles(run)
    try:
        recipe, batch = read_recipe(run), files.read(step) if step in files.steps() else None
    except HeadwayError as error:  # of a damaged run: the rest of its page can be shown
        return {"step": step, "problem": error.message}
    if batch is None:
        raise RunError(f"run {run.name} has no rollouts of step {step}", hint="older batches are removed", usage=True)
    if recipe.rl is None:
        raise RunError(f"run {run.name} has objective {recipe.objective.kind}: it sampled no answers", usage=True)
    sampled = sampled_batch(batch.rollouts, batch.header, recipe, finished=True)
    decode = _decoder(run)
    groups = [group_document(group, decode) for group in sampled.groups[first : first + GROUPS]]
    for group in groups:
        group.pop("prompt_ids")
        for answer in group["answers"]:
            answer["tokens"] = len(answer.pop("token_ids"))
            answer.pop("logprobs"), answer.pop("written")
    rewards = [r.score.reward for r in batch.rollouts if r.score is not None]
    return {
        "step": batch.header.step,
        "version": batch.header.version,
        "groups": groups,
        "first": first,
        "count": len(sampled.groups),
        "answers": sampled.answers,
        "failed": sampled.failed,
        "rewards": rewards,
        "metrics": sampled.metrics,
    }


def _decoder(run: RunFolder) -> Any:
    try:
        tokenizer = load_tokenizer(run.tokenizer_file)
    except (HeadwayError, OSError):
        return lambda ids: " ".join(map(str, ids))

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids))

    return decode
