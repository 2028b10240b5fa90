"""What `headway rl` prints of rollouts: answers with their rewards, mismatch by token, the outcome of a replay."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any

from rich.console import Console
from rich.text import Text

from headway.cli.chat_view import visible_lines
from headway.cli.text import columns, plural, wrap_lines
from headway.data.tokenizer import TextTokenizer
from headway.recipe import Recipe
from headway.rl.compare import Mismatch, Replay, TokenMismatch
from headway.rl.rollout import Rollout
from headway.rl.rollout_files import BatchHeader, RolloutBatch
from headway.rl.samples import SampledBatch, SampledGroup, failed

Decode = Callable[[Sequence[int]], str]

INDENT = 8
"""Columns before a text; an advantage is in them."""
SHOWN_LINES = 8
"""Lines of a text, unless it is asked for in full."""
CONTEXT_TOKENS = 6
"""Before and after a token."""
BAR = 30


def step_ranges(firsts: Sequence[int], updates: int) -> str:
    """Return the steps of batches in words, by their first steps: `step 4`, `steps 1 to 6, 9 to 12`."""
    breaks = [place for place, (low, high) in enumerate(pairwise(firsts), start=1) if high != low + updates]
    edges = [0, *breaks, len(firsts)]
    ranges = [(firsts[low], firsts[high - 1] + updates - 1) for low, high in pairwise(edges)]
    words = [str(low) if low == high else f"{low} to {high}" for low, high in ranges]
    alone = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"{'step' if alone else 'steps'} {', '.join(words)}"


# -- samples


def print_samples(
    batch: SampledBatch, shown: Sequence[SampledGroup], of: int, decode: Decode, *, full: bool, only_failed: bool
) -> None:
    """Print the metrics of a batch, then groups; `of` is how many there are to show."""
    console = Console(highlight=False, markup=False, width=columns(), soft_wrap=True)
    for line in _summary(batch):
        console.print(line)
    for sampled in shown:
        console.print()
        unlearnt = "left out" if batch.finished else "batch not finished"
        for text in _group_lines(sampled, decode, unlearnt, full=full, only_failed=only_failed):
            console.print(text)
    if of > len(shown):
        console.print(Text(f"\n{plural(of - len(shown), 'more group')}: --limit N, --group K or --json", style="dim"))
    if only_failed and not of:
        console.print("no reward failed")


def _summary(batch: SampledBatch) -> Iterator[str]:
    header, metrics = batch.header, batch.metrics
    whole = "" if batch.finished else ", unfinished"
    yield from wrap_lines(
        f"batch of step {header.step}{whole}: {plural(len(batch.groups), 'group')}, "
        f"{plural(batch.answers, 'answer')}, sampled with the weights of step {header.version}"
    )
    if not metrics:
        return
    terms = [f"{key.removeprefix('reward/')} {metrics[key]:.4g}" for key in metrics if key.startswith("reward/")]
    passes = [f", {key} {metrics[key]:.4g}" for key in metrics if key.startswith("pass@")]
    yield from wrap_lines(f"reward {metrics['reward']:.4g} ({', '.join(terms)}){''.join(passes)}")
    lengths = [len(rollout.token_ids) for group in batch.groups for rollout in group.group.rollouts]
    same = sum(not group.group.varies for group in batch.groups)
    yield from wrap_lines(
        f"length {metrics['length']:.4g} ({min(lengths)} to {max(lengths)}), truncated {metrics['truncated']:.0%}, "
        f"zero variance in {plural(same, 'group')}, {batch.failed} failed"
    )


def _group_lines(
    sampled: SampledGroup, decode: Decode, unlearnt: str, *, full: bool, only_failed: bool
) -> Iterator[Text]:
    """Yield a group; `unlearnt` says why no step learns from it, if none does."""
    first = sampled.group.rollouts[0]
    learnt = unlearnt if sampled.step is None else f"step {sampled.step}"
    yield Text(f"group {sampled.number}, sample {first.sample}, prompt {first.prompt}, {learnt}", style="bold")
    yield from _block("prompt", decode(first.prompt_ids), "dim", full=full)
    for place, rollout in enumerate(sampled.group.rollouts):
        if not only_failed or failed(rollout):
            yield from _answer_lines(sampled, place, rollout, full=full or only_failed)


def _answer_lines(sampled: SampledGroup, place: int, rollout: Rollout, *, full: bool) -> Iterator[Text]:
    advantage = None if sampled.advantages is None else float(sampled.advantages[place])
    label = "" if advantage is None else f"{advantage:+.2f}" if advantage else "0"
    style = "" if not advantage else "green" if advantage > 0 else "red"
    score = rollout.score
    facts = ["not scored"]
    if score is not None:
        terms = ", ".join(f"{name} {value:.4g}" for name, value in score.terms.items())
        facts = [f"reward {score.reward:.4g} ({terms})"]
    facts += [rollout.finish, plural(len(rollout.token_ids), "token")]
    if sampled.step is not None and not sampled.in_loss[place]:
        facts.append("not in the loss")
    lines = wrap_lines(f"answer {rollout.answer}: {', '.join(facts)}", indent=2, width=columns() - INDENT)
    yield Text.assemble((f"{label:>{INDENT - 2}}", style), "  ", (lines[0], "bold"))
    for line in lines[1:]:
        yield Text(" " * INDENT + line, style="bold")
    yield from _block("", rollout.text, "", full=full)
    if score is not None and score.error is not None:
        yield from _traceback(score.error)


def _traceback(error: str) -> Iterator[Text]:
    """Yield an error's lines; without its marks below code, which a line that is broken leaves somewhere else."""
    lines = [line for line in error.splitlines() if line.strip(" ^~") or not line.strip()]
    pieces = [piece for line in lines for piece in visible_lines(line, columns() - INDENT)]
    for position, piece in enumerate(pieces):
        yield Text.assemble((f"{'failed' if position == 0 else '':{INDENT}}", "bold"), (piece, "red"))


def _block(label: str, text: str, style: str, *, full: bool) -> Iterator[Text]:
    """Yield a text with a label before its first line; of a long one the beginning, unless it is to be in full."""
    lines = list(visible_lines(text, columns() - INDENT)) or ["(empty)"]
    shown = lines if full or len(lines) <= SHOWN_LINES + 1 else lines[:SHOWN_LINES]
    for position, line in enumerate(shown):
        yield Text.assemble((f"{label if position == 0 else '':{INDENT}}", "bold"), (line, style))
    if len(shown) < len(lines):
        yield Text(f"{'':{INDENT}}... {plural(len(lines) - len(shown), 'more line')}", style="dim")


# -- mismatch


def mismatch_lines(
    header: BatchHeader,
    result: Mismatch,
    rollouts: Sequence[Rollout],
    tokenizer: TextTokenizer | None,
    recipe: Recipe,
    changed: Mapping[str, Sequence[Any]],
) -> Iterator[str]:
    """Yield the sampler's log-probabilities against the trainer's."""
    yield from wrap_lines(
        f"batch of step {header.step}: {plural(result.tokens, 'token')} of {plural(len(rollouts), 'answer')}, by the "
        f"sampler and by the trainer, both with the weights of step {header.version}"
    )
    yield f"equal bit for bit: {result.equal:,} of {result.tokens:,} tokens ({_percent(result.share_equal)})"
    yield f"|difference| of log-probabilities: at most {result.largest:.3g}, {result.mean:.3g} on average"
    if result.equal < result.tokens:
        yield ""
        yield from _histogram_lines(result)
    by_key = {(rollout.sample, rollout.answer): rollout for rollout in rollouts}
    for worst in result.worst:
        yield ""
        yield from _token_lines(worst, by_key[worst.sample, worst.answer], tokenizer)
    if result.equal < result.tokens:
        yield ""
        yield from _reasons(recipe, changed)


def _percent(share: float) -> str:
    """Return a share without rounding it to all or nothing."""
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{min(max(share, 1e-4), 1 - 1e-4):.2%}"


def _histogram_lines(result: Mismatch) -> Iterator[str]:
    rows = [("equal", result.equal), *((_decade(low, high), count) for low, high, count in result.histogram)]
    filled = [place for place, (_, count) in enumerate(rows) if count]
    most = max(count for _, count in rows)
    for name, count in rows[min(filled) : max(filled) + 1]:
        bar = "#" * (-(-BAR * count // most))
        yield f"{name:>16} {count:>9,}  {bar}".rstrip()


def _decade(low: float, high: float) -> str:
    return f"below {high:.0e}" if low == 0 else f"{low:g} or more" if high == inf else f"{low:.0e} to {high:.0e}"


def _token_lines(worst: TokenMismatch, rollout: Rollout, tokenizer: TextTokenizer | None) -> Iterator[str]:
    yield f"sample {worst.sample}, answer {worst.answer}, token {worst.position}:"
    yield f"  sampler {worst.sampler:.9g}, trainer {worst.trainer:.9g}, |difference| {worst.difference:.3g}"
    context = token_in_context(rollout, worst.position, tokenizer)
    yield from ("  " + line for line in visible_lines(context, columns() - 2))


def token_in_context(rollout: Rollout, position: int, tokenizer: TextTokenizer | None) -> str:
    """Return a token of an answer in brackets, between those before and after it."""
    ids, place = rollout.prompt_ids + rollout.token_ids, len(rollout.prompt_ids) + position
    first, end = max(0, place - CONTEXT_TOKENS), place + 1 + CONTEXT_TOKENS
    parts = ids[first:place], ids[place : place + 1], ids[place + 1 : end]
    before, token, after = (_decoded(part, tokenizer) for part in parts)
    gap = " " if tokenizer is None else ""
    start, rest = "..." if first else "", "..." if end < len(ids) else ""
    return f"{start}{before}{gap}[{token}]{gap}{after}{rest}"


def _decoded(ids: Sequence[int], tokenizer: TextTokenizer | None) -> str:
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(list(ids))


# -- replay


def replay_lines(
    batch: RolloutBatch,
    result: Replay,
    tokenizer: TextTokenizer | None,
    recipe: Recipe,
    changed: Mapping[str, Sequence[Any]],
) -> Iterator[str]:
    """Yield whether a replayed batch equals the stored one, or where they first differ."""
    header = batch.header
    yield from wrap_lines(
        f"batch of step {header.step}, sampled again with the weights of step {header.version}: "
        f"{plural(result.answers, 'answer')}, {plural(result.tokens, 'token')}"
    )
    first = result.first
    if first is None:
        yield "equal: every token and log-probability, bit for bit"
        return
    yield f"{result.equal_answers:,} of {plural(result.answers, 'answer')} equal; the first that differs:"
    where = "" if first.position is None else f", {'prompt ' if first.what == 'prompt' else ''}token {first.position}"
    yield f"sample {first.sample}, answer {first.answer}{where}: {first.what}"
    stored, replayed = (_shown(value, first.what, tokenizer) for value in (first.stored, first.replayed))
    yield f"  stored   {stored}"
    yield f"  replayed {replayed}"
    rollouts = {(rollout.sample, rollout.answer): rollout for rollout in batch.rollouts}
    rollout = rollouts.get((first.sample, first.answer))
    if first.what in ("token", "log-probability") and first.position is not None and rollout is not None:
        context = token_in_context(rollout, first.position, tokenizer)
        yield from ("  " + line for line in visible_lines(context, columns() - 2))
    yield from _reasons(recipe, changed)


def _shown(value: Any, what: str, tokenizer: TextTokenizer | None) -> str:
    match what:
        case "answer":
            return "is there" if value else "is missing"
        case "token" if tokenizer is not None:
            return f"{value} {tokenizer.decode([value])!r}"
        case _:
            return repr(value)


def _reasons(recipe: Recipe, changed: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield what may be behind a difference."""
    for name, (before, now) in changed.items():
        yield from wrap_lines(f"{name}: {_condition(before)} in the run, {_condition(now)} here")
    if recipe.inference.exact:
        if not changed:
            yield from wrap_lines("with inference.exact all should be equal: a file was changed, or there is a bug")
    else:
        yield from wrap_lines(
            "without inference.exact, the last bits depend on what else was in a batch: --set inference.exact=true"
        )


def _condition(value: Any) -> str:
    return ", ".join(f"{key} {entry}" for key, entry in value.items()) if isinstance(value, dict) else str(value)
