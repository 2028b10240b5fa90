"""`headway rl samples | mismatch | replay`: the rollouts of a run of reinforcement learning.

What needs a model runs in another process (`headway.train.rl_replay`); this module compares and prints.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import from_json

from headway.cli.model_process import model_process
from headway.cli.options import Json, Run, Runs
from headway.cli.rl_view import mismatch_lines, print_samples, replay_lines, step_ranges
from headway.cli.text import print_json
from headway.data.corpus import open_corpus
from headway.data.tokenizer import load_tokenizer
from headway.errors import DataError, RunError, UsageError
from headway.recipe import Recipe
from headway.recipe.rl import Rl
from headway.rl.compare import compare_rollouts, mismatch_of
from headway.rl.rollout_files import BatchHeader, RolloutBatch, RolloutFiles, from_rows
from headway.rl.samples import SampledBatch, SampledGroup, failed, group_document, sampled_batch
from headway.state import list_checkpoints, open_checkpoint
from headway.track import START, RunFolder, find_run, lock_holder, read_recipe, runs_root

app = typer.Typer(help="Show, compare and replay rollouts of a run.", no_args_is_help=True)

SHOWN_GROUPS = 4
CONDITIONS = ("device", "threads", "packages")
"""What bits depend on, of environment.json."""

OfStep = Annotated[
    int | None, typer.Option("--step", min=1, help="A step that learnt from the batch (default: the last batch).")
]
OfWeights = Annotated[
    int | None,
    typer.Option(
        "--step", min=1, help="A step that learnt from the batch (default: the last one whose weights are kept)."
    ),
]


@app.command()
def samples(
    run: Run,
    step: OfStep = None,
    group: Annotated[int | None, typer.Option(min=0, metavar="K", help="Only this group, in full.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Show the first N groups (default: 4; with --json or --failed, all).")
    ] = None,
    only_failed: Annotated[bool, typer.Option("--failed", help="Only answers whose reward failed.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show prompts, answers and rewards of a batch."""
    folder, recipe = _policy_run(run, runs)
    batch = _sampled_batch(folder, recipe, step)
    if group is not None and group >= len(batch.groups):
        raise UsageError(f"the batch has no group {group}", hint=f"0 to {len(batch.groups) - 1}")
    shown = [sampled for sampled in batch.groups if group in (None, sampled.number)]
    if only_failed:
        shown = [sampled for sampled in shown if any(map(failed, sampled.group.rollouts))]
    count = limit or (len(shown) if json or only_failed else SHOWN_GROUPS)
    tokenizer = load_tokenizer(folder.tokenizer_file) if folder.tokenizer_file.is_file() else None

    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(list(ids))

    if json:
        print_json(_samples_document(folder, batch, shown[:count], decode, only_failed=only_failed))
    else:
        print_samples(batch, shown[:count], len(shown), decode, full=group is not None, only_failed=only_failed)


@app.command()
def mismatch(
    run: Run,
    step: OfWeights = None,
    limit: Annotated[int, typer.Option(min=0, help="Tokens to show, those that differ most.")] = 10,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare sampler and trainer, token by token.

    The trainer computes the log-probabilities of a batch anew, from the checkpoint of the weights that sampled it.
    Exits with 1 if any differ although the recipe has inference.exact.
    """
    folder, recipe = _policy_run(run, runs)
    step = step or _last_with_weights(folder)
    batch = _finished_batch(folder, recipe, step)
    request = _request(folder, recipe, batch.header, "mismatch")
    messages = list(_messages(folder, request))
    trainer = {(line["sample"], line["answer"]): line["logprobs"] for line in messages if "logprobs" in line}
    learnt = [rollout for rollout in batch.rollouts if (rollout.sample, rollout.answer) in trainer]
    result = mismatch_of(learnt, trainer, worst=limit)
    changed = _changed(folder, messages)
    if json:
        print_json({
            "run": folder.name, "step": step, "version": batch.header.version, "exact": recipe.inference.exact,
            **asdict(result), "share_equal": result.share_equal, "changed": changed,
        })  # fmt: skip
    else:
        tokenizer = load_tokenizer(folder.tokenizer_file) if folder.tokenizer_file.is_file() else None
        print("\n".join(mismatch_lines(batch.header, result, learnt, tokenizer, recipe, changed)))
    if recipe.inference.exact and result.equal < result.tokens:
        raise typer.Exit(1)


@app.command()
def replay(run: Run, step: OfWeights = None, runs: Runs = None, json: Json = False) -> None:
    """Sample a batch again and compare every bit.

    The weights are those of the checkpoint that sampled it. Rewards are not computed again. Exits with 1 if a token, a
    log-probability or an end differs.
    """
    folder, recipe = _policy_run(run, runs)
    step = step or _last_with_weights(folder)
    if recipe.rl is not None and recipe.rl.environment is not None:
        raise UsageError(
            f"run {folder.name} has rl.environment, and replay repeats answers of one turn only",
            hint=folder.command("rl mismatch", f"--step {step}") + " compares its log-probabilities",
        )
    batch = _finished_batch(folder, recipe, step)
    request = _request(folder, recipe, batch.header, "replay")
    request["shares"] = _drawn(folder, recipe, batch)
    messages = list(_messages(folder, request))
    result = compare_rollouts(batch.rollouts, from_rows(line["rollout"] for line in messages if "rollout" in line))
    changed = _changed(folder, messages)
    if json:
        print_json({
            "run": folder.name, "step": step, "version": batch.header.version, "exact": recipe.inference.exact,
            "equal": result.equal, **asdict(result), "changed": changed,
        })  # fmt: skip
    else:
        tokenizer = load_tokenizer(folder.tokenizer_file) if folder.tokenizer_file.is_file() else None
        print("\n".join(replay_lines(batch, result, tokenizer, recipe, changed)))
    if not result.equal:
        raise typer.Exit(1)


# -- which batch


def _policy_run(run: str, runs: Path | None) -> tuple[RunFolder, Recipe]:
    folder = find_run(runs_root(runs), run)
    recipe = read_recipe(folder)
    if recipe.rl is None:
        raise UsageError(
            f"run {folder.name} has objective {recipe.objective.kind}: it sampled no answers",
            hint="headway rl is for runs of reinforcement learning, such as objective.kind = grpo",
        )
    return folder, recipe


def _sampled_batch(folder: RunFolder, recipe: Recipe, step: int | None) -> SampledBatch:
    """Return the batch of a step, which may be unfinished: a run that a failed reward stopped leaves one."""
    assert recipe.rl is not None
    files = RolloutFiles(folder)
    finished, unfinished = files.steps(), files.unfinished()
    if step is not None:
        first = _first_step(step, recipe.rl)
    elif finished and lock_holder(folder) is not None:  # an unfinished one is being sampled now
        first = finished[-1]
    else:
        first = max([*finished, *unfinished], default=1)
    if first in unfinished:
        header = unfinished[first]
        return sampled_batch([*files.read_parts(header).values()], header, recipe, finished=False)
    batch = _finished_batch(folder, recipe, first)
    return sampled_batch(batch.rollouts, batch.header, recipe, finished=True)


def _finished_batch(folder: RunFolder, recipe: Recipe, step: int) -> RolloutBatch:
    assert recipe.rl is not None
    files = RolloutFiles(folder)
    batch = files.read(_first_step(step, recipe.rl))
    if batch is not None:
        return batch
    steps = files.steps()
    if not steps:
        raise RunError(f"run {folder.name} has no rollouts yet", hint=folder.command("logs"), usage=True)
    kept = f"; rl.keep_rollouts = {recipe.rl.keep_rollouts}" if recipe.rl.keep_rollouts else ""
    raise UsageError(
        f"run {folder.name} has no rollouts of step {step}",
        hint=f"it has those of {step_ranges(steps, recipe.rl.updates)}{kept}",
    )


def _last_with_weights(folder: RunFolder) -> int:
    """Return the first step of the last batch whose weights are kept, or of the last batch if there is none."""
    return max(_with_weights(folder) or RolloutFiles(folder).steps(), default=1)


def _with_weights(folder: RunFolder) -> list[int]:
    """Return the first steps of the batches whose weights are there: the run's first ones, or a checkpoint's."""
    files = RolloutFiles(folder)
    checkpoints = {entry.step for entry in list_checkpoints(folder.checkpoints)}
    headers = [header for header in map(files.header, files.steps()) if header is not None]
    return [header.step for header in headers if header.version in checkpoints or header.chain == START]


def _first_step(step: int, rl: Rl) -> int:
    return step - (step - 1) % rl.updates


# -- the process with the model


def _request(folder: RunFolder, recipe: Recipe, header: BatchHeader, kind: str) -> dict[str, Any]:
    """Return what the process needs to have the weights that sampled a batch; raise UsageError if they are gone."""
    assert recipe.rl is not None
    checkpoint, threads = None, _environment(folder).get("threads")
    if header.chain != START:
        checkpoints = {entry.step: entry.path for entry in list_checkpoints(folder.checkpoints)}
        checkpoint = checkpoints.get(header.version)
        if checkpoint is None:
            raise _no_weights(folder, recipe.rl, header)
        if open_checkpoint(checkpoint).manifest.chain != header.chain:
            raise RunError(
                f"the checkpoint of step {header.version} has other weights than those that sampled the rollouts of "
                f"step {header.step}",
                hint="the run went back and continued otherwise; choose a later step",
            )
    return {
        "kind": kind,
        "run": str(folder.path),
        "step": header.step,
        "version": header.version,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "threads": threads if isinstance(threads, int) else None,
    }


def _no_weights(folder: RunFolder, rl: Rl, header: BatchHeader) -> UsageError:
    steps = _with_weights(folder)
    kept = "checkpoint.every_steps, keep_last and keep_every_steps decide which are kept"
    return UsageError(
        f"run {folder.name} has no checkpoint of step {header.version}, whose weights sampled the rollouts of step "
        f"{header.step}",
        hint=(f"there are rollouts and their weights for {step_ranges(steps, rl.updates)}; " if steps else "") + kept,
    )


def _drawn(folder: RunFolder, recipe: Recipe, batch: RolloutBatch) -> list[list[tuple[int, int]]]:
    """Return the samples and prompts that the batch draws from the data, by the worker that sampled answers to them."""
    try:
        order = open_corpus(recipe).prompt_order()
    except DataError as error:
        raise DataError(
            f"the prompts of run {folder.name} are needed to sample answers again: {error.message}",
            hint=f"put them back; {folder.recipe_file} has their path",
        ) from None
    count = len({rollout.sample for rollout in batch.rollouts})
    drawn = order.next(batch.header.cursor, count)
    pairs = [*zip(drawn.samples, drawn.prompts, strict=True)]
    workers = _environment(folder).get("workers")
    size = workers if isinstance(workers, int) and workers > 0 else 1
    return [pairs[rank::size] for rank in range(size)]


def _messages(folder: RunFolder, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the process; yield what it says."""
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # as in workers: deterministic products on GPUs need it
    if request["threads"] is not None:
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(request["threads"]))
    name = f"{request['kind']} of {folder.name}"
    with model_process("headway.train.rl_replay", name, request, env=os.environ | variables) as running:
        yield from running.messages()


def _environment(folder: RunFolder) -> dict[str, Any]:
    """Return what the bits of a run depended on; empty if it is not known."""
    try:
        values = from_json(folder.environment_file.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _changed(folder: RunFolder, messages: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return what bits depend on that is not as in the run: there, and here."""
    now = next(message["ready"] for message in messages if "ready" in message)
    before = _environment(folder)
    return {key: [before[key], now[key]] for key in CONDITIONS if key in before and before[key] != now[key]}


def _samples_document(
    folder: RunFolder, batch: SampledBatch, shown: Sequence[SampledGroup], decode: Any, *, only_failed: bool
) -> dict[str, Any]:
    groups = [group_document(sampled, decode) for sampled in shown]
    for group in groups if only_failed else ():
        group["answers"] = [answer for answer in group["answers"] if answer["error"] is not None]
    return {
        "run": folder.name,
        "step": batch.header.step,
        "version": batch.header.version,
        "finished": batch.finished,
        "groups_total": len(batch.groups),
        "answers_total": batch.answers,
        "failed_total": batch.failed,
        "metrics": batch.metrics,
        "groups": groups,
    }
