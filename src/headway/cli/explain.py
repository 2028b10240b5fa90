"""`headway explain RUN STEP`: the documents that a step trained on; `--document`: the steps that trained on one."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headway.cli.options import Json, Run, Runs
from headway.cli.progress import terminal_bars
from headway.cli.text import columns, plural, print_json, shortened
from headway.data.corpus import open_corpus
from headway.data.explain import Explainer, SeenDocument
from headway.errors import UsageError
from headway.track import RunFolder, find_run, read_recipe, runs_root, summarize

MOST_STEPS = 12
"""Steps of a document that are printed."""


def explain(
    run: Run,
    step: Annotated[int | None, typer.Argument(metavar="STEP", min=1, help="A step, from 1.")] = None,
    document: Annotated[
        str | None,
        typer.Option(
            "--document",
            metavar="FILE[:LINE]|N",
            help="Instead, the steps that trained on a source file, one line or row of it, or document N.",
        ),
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show which documents a step trained on, or which steps trained on a document.

    Both follow from the order of the data, for steps before and after now. Files and lines are known of datasets that
    `headway data build` made with an index of their sources; of older ones, the text is shown.
    """
    folder = find_run(runs_root(runs), run)
    if (step is None) == (document is None):
        raise UsageError("explain takes either a step or --document", hint=f"headway explain {folder.name} 1")
    explainer = Explainer(open_corpus(read_recipe(folder)))
    if step is not None:
        _explain_step(folder, explainer, step, json)
    else:
        assert document is not None
        _explain_document(folder, explainer, document, json)


# -- a step


def _explain_step(run: RunFolder, explainer: Explainer, step: int, json: bool) -> None:
    seen = explainer.step(step)
    reached = summarize(run).step
    if json:
        rows = [_facts(part) | ({} if part.origin else {"text": explainer.text(part)}) for part in seen]
        print_json({"run": run.name, "step": step, "done": step <= reached, "documents": rows})
        return
    corpus = explainer.corpus
    batch, seq = corpus.recipe.train.batch_at(step), corpus.recipe.data.seq
    when = "" if step <= reached else f" (not done yet: the run is at step {reached:,})"
    print(f"{run.name} step {step:,}: {plural(batch, 'row')} of {seq:,} tokens and the next one, "
          f"{plural(len(seen), 'part')}{when}")  # fmt: skip
    versions = (f"{name} {dataset.version}" for name, dataset in zip(corpus.names, corpus.datasets, strict=True))
    print(f"data {', '.join(versions)}\n")
    print(f"{'row':>5}  {'document':>10}  {'tokens':>15}  source")
    for part in seen:
        where = f"{part.first:,}-{part.end - 1:,}"
        print(f"{part.row:>5}  {part.document:>10,}  {where:>15}  {_source(explainer, part, columns() - 36)}")
    if any(part.origin is None for part in seen):
        print("\nno index of sources: this data was built before it, or of chats; text is shown")
        print("headway data build with the same sources and options adds it; the version stays")
    first = next((part.origin for part in seen if part.origin), None)
    other = seen[0].document if first is None else first
    print(f"\nnext: {run.command('explain', f'--document {other}')}")


def _source(explainer: Explainer, part: SeenDocument, width: int) -> str:
    if part.origin is None:
        text = " ".join(explainer.text(part).split())
        return shortened(repr("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)), width)
    text = str(part.origin)
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _facts(part: SeenDocument) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "row": part.row, "dataset": part.dataset, "document": part.document,
        "first": part.first, "end": part.end, "tokens": part.tokens,
    }  # fmt: skip
    if part.origin is not None:
        facts |= {"file": part.origin.file, "record": part.origin.record or None, "offset": part.origin.offset}
    return facts


# -- a document


@dataclass(frozen=True)
class _Chosen:
    dataset: int
    documents: "np.ndarray[Any, np.dtype[np.int64]]"


def _explain_document(run: RunFolder, explainer: Explainer, text: str, json: bool) -> None:
    chosen = _chosen(explainer, text)
    last = summarize(run).step
    by_step: dict[int, list[tuple[str, int]]] = {}
    with terminal_bars("{task.description}", "Bar", "TaskProgress") as bars:
        for pick in chosen:
            task = bars.add_task("steps", total=last) if sys.stderr.isatty() else None

            def show(step: int, task: Any = task) -> None:
                if task is not None:
                    bars.update(task, completed=step)

            name = explainer.corpus.names[pick.dataset]
            for step, documents in explainer.steps(pick.dataset, pick.documents, last, show).items():
                by_step.setdefault(step, []).extend((name, number) for number in documents)
    count = sum(len(pick.documents) for pick in chosen)
    if json:
        rows = [{"step": step, "documents": [number for _, number in by_step[step]]} for step in sorted(by_step)]
        print_json({"run": run.name, "document": text, "documents": count, "until_step": last, "steps": rows})
        return
    print(f"{text}: {plural(count, 'document')}; steps 1 to {last:,} of {run.name}")
    if not by_step:
        print("no step has trained on it: it is held out, or still to come")
        return
    steps = sorted(by_step)
    print(f"trained on in {plural(len(steps), 'step')}\n")
    print(f"{'step':>9}  documents")
    for step in steps[:MOST_STEPS]:
        numbers = ", ".join(f"{number:,}" for _, number in sorted(by_step[step]))
        print(f"{step:>9,}  {shortened(numbers, columns() - 12)}")
    if len(steps) > MOST_STEPS:
        print(f"{'':>9}  {len(steps) - MOST_STEPS:,} more (--json lists all)")
    print(f"\nnext: {run.command('explain', str(steps[0]))}")


def _chosen(explainer: Explainer, text: str) -> list[_Chosen]:
    """Return the documents that a number, a file, or a line of a file means, by dataset."""
    if text.isascii() and text.isdigit():
        if len(explainer.corpus.datasets) > 1:
            raise UsageError("a document's number is not unique in a mixture", hint="name a file")
        explainer.corpus.datasets[0].document(int(text))  # raises if there is none
        return [_Chosen(0, np.array([int(text)], np.int64))]
    file, _, line = text.rpartition(":")
    record = int(line) if file and line.isascii() and line.isdigit() else None
    path = file if record is not None else text
    chosen, indexed = [], False
    for index, origins in enumerate(explainer.origins):
        if origins is None:
            continue
        indexed = True
        documents = origins.find(path, record)
        if len(documents):
            chosen.append(_Chosen(index, documents))
    if not indexed:
        raise UsageError(
            "this data has no index of its sources, so that files are not known",
            hint="give a document's number, or build the data again: the version stays",
        )
    if not chosen:
        names = [Path(name).name for origins in explainer.origins if origins for name in origins.files]
        raise UsageError(f"no document of {text} in the run's data", hint=f"its sources: {', '.join(names[:5])}")
    return chosen
