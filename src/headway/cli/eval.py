"""`headway eval RUN|FOLDER --tasks gsm8k,FILE.jsonl`: evaluates a model on tasks from local files.

The model runs in another process (`headway.inference.evaluate`); this module makes the questions, scores the answers,
and records the results in the run.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.eval_images import evaluate_images
from headway.cli.eval_view import comparison_text, evaluation_text
from headway.cli.model_process import model_of, model_process
from headway.cli.options import Json, Runs, complete_run
from headway.cli.progress import terminal_bars
from headway.cli.text import print_json
from headway.errors import UsageError
from headway.evals.compare import compare_rows
from headway.evals.recorded import Recorded, read_out, recorded_of
from headway.evals.session import EvalOptions, EvalSession, open_tasks
from headway.track import RunFolder, write_evaluation


def eval(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            autocompletion=complete_run,
            help="A run (RUN@STEP for one checkpoint), or a Hugging Face folder.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="TASK,...", help="Tasks: gsm8k, a task's .toml, or data (.jsonl, .parquet, .txt)."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            metavar="A B",
            help="Compare two models, or two files of --out, on the same questions. Without --tasks, runs are "
            "compared by what was recorded.",
        ),
    ] = None,
    frechet: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Compare a diffusion run's samples with its data, by a CLIP model."),
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the data of named tasks.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=128, help="Outputs per question.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first N questions of each task; of --frechet, samples.")
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Whether to use the model's chat template.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens to generate.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature (default: 0 for one output per question).")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from the top share of mass.")] = None,
    guidance: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="Of --frechet: classifier-free guidance (default: 2.0).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same text.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Write every prompt, output and score; rows that it has are not run again."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Evaluate a model on tasks from local files."""
    changes = {"shots": shots, "chat": chat, "max_tokens": max_tokens, "temperature": temperature}
    if top_p == 0:
        raise UsageError("--top-p 0 leaves nothing to sample from", hint="use --temperature 0 for the likeliest tokens")
    if frechet is not None:
        if model is None or tasks is not None or compare is not None or out is not None:
            raise UsageError("--frechet takes a run, and no --tasks, --compare or --out", hint="headway eval RUN")
        evaluate_images(model, runs, frechet, limit=limit, guidance=guidance, seed=seed, as_json=json)
        return
    if guidance is not None:
        raise UsageError("--guidance has no effect without --frechet", hint="leave it out")
    options = EvalOptions(samples=samples, limit=limit, top_p=top_p, seed=seed, device=device, dtype=dtype)
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    given = {key: value for key, value in changes.items() if value is not None}
    if compare is not None:
        if model is not None or out is not None:
            raise UsageError("--compare takes no other model and no --out", hint="headway eval --compare A B")
        sides = [_side(name, runs, names, data, given, options, shows=not json) for name in compare]
        first, second = (side() for side in sides)  # both are known to exist before either runs
        if first.name == second.name:  # folders of one name: as they were typed
            first, second = replace(first, name=compare[0]), replace(second, name=compare[1])
        _print_comparison(first, second, json=json)
        return
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UsageError(f"cannot write {out}", hint="name a file in a folder that exists")
    if model is None or not names:
        raise UsageError("a model and --tasks are needed", hint="for example headway eval last --tasks questions.jsonl")
    session, folder = _session(model, runs, names, data, given, options)
    _evaluate(session, out, folder, shows=not json)
    evaluations = session.evaluations()
    if json:
        print_json(
            {"model": session.model, "tasks": [entry.model_dump() for entry in evaluations], "notes": session.notes()}
        )
    else:
        print("\n".join(evaluation_text(session, folder, out)))


def _session(
    model: str, runs: Path | None, names: list[str], data: Path | None, given: dict[str, Any], options: EvalOptions
) -> tuple[EvalSession, RunFolder | None]:
    """Read the tasks and find the model; both are checked before anything runs."""
    tasks = open_tasks(names, options, data=data, changes=given)
    source, shown = model_of(model, runs)
    session = EvalSession(source, shown, tasks, options, given)
    return session, RunFolder(Path(source["run"])) if "run" in source else None


def _evaluate(session: EvalSession, out: Path | None, folder: RunFolder | None, *, shows: bool) -> None:
    """Run the model over the questions that are left; record the results."""
    with contextlib.ExitStack() as stack:
        file = None
        if out is not None:
            for row in read_out(out, session.fingerprints):
                session.keep(row)
            file = stack.enter_context(out.open("ab"))
        bar = stack.enter_context(_bar(session, shows=shows and sys.stderr.isatty()))
        if session.left:
            started = time.time()
            for line in stack.enter_context(contextlib.closing(_answered(session))):
                if file is not None:
                    file.write(line)
                    file.flush()
                bar()
            session.finish(started, time.time())
    if folder is not None:
        for evaluation, rows in zip(session.evaluations(), session.rows(), strict=True):
            write_evaluation(folder, evaluation, rows)


def _answered(session: EvalSession) -> Generator[bytes, None, None]:
    """Run the questions that are left; yield the line of each that is answered."""
    with model_process("headway.inference.evaluate", "evaluation", session.request()) as running:
        for message in running.messages():
            if (line := session.take(message)) is not None:
                yield line


@contextlib.contextmanager
def _bar(session: EvalSession, *, shows: bool) -> Iterator[Any]:
    """Yield what counts an answered question."""
    if not shows:
        yield lambda: None
        return
    bars = terminal_bars("{task.description}", "Bar", "{task.completed:,}/{task.total:,}", "TimeRemaining")
    with bars:
        task = bars.add_task("evaluating", total=session.total, completed=session.total - session.left)
        yield lambda: bars.advance(task)


def _side(
    name: str,
    runs: Path | None,
    tasks: list[str],
    data: Path | None,
    given: dict[str, Any],
    options: EvalOptions,
    *,
    shows: bool,
) -> Callable[[], Recorded]:
    """Return what gives the rows of one side of a comparison: read from a file or a run, or evaluated when called."""
    if name.endswith(".jsonl") or not tasks:
        recorded = Recorded.from_file(Path(name)) if name.endswith(".jsonl") else recorded_of(name, runs)
        return lambda: recorded
    session, folder = _session(name, runs, tasks, data, given, options)

    def evaluated() -> Recorded:
        _evaluate(session, None, folder, shows=shows)
        return Recorded.of(session)

    return evaluated


def _print_comparison(first: Recorded, second: Recorded, *, json: bool) -> None:
    common = [task for task in first.rows if task in second.rows]
    if not common:
        raise UsageError(
            f"{first.name} and {second.name} have no task in common", hint="name tasks with --tasks to evaluate both"
        )
    comparisons = [
        comparison for task in common for comparison in compare_rows(task, first.rows[task], second.rows[task])
    ]
    if json:
        documents = [comparison.document(first.name, second.name) for comparison in comparisons]
        print_json({"first": first.name, "second": second.name, "comparisons": documents})
    else:
        print("\n".join(comparison_text(first.name, second.name, comparisons)))
