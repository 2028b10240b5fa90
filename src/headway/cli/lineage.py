"""`headway lineage X`: what a run, checkpoint, model or dataset came from, and what it became."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs, complete_run
from headway.cli.text import columns, print_json, shortened
from headway.track import runs_root
from headway.track.lineage import Branch, collect, find, tree

DIGEST = 12
"""Characters of a digest that are printed."""


def lineage(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            autocompletion=complete_run,
            help="A run, RUN@STEP, a model's name, a folder of a dataset or model, or a data version.",
        ),
    ],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show what something came from, and what it became: data, base model, run, checkpoint, export, evaluation.

    Read from the records of all runs in the folder of runs; nothing is fetched. What is marked `gone` is recorded, but
    its files are not there.
    """
    root = runs_root(runs)
    graph = collect(root)
    key = find(graph, root, what)
    up, down = tree(graph, key, "up"), tree(graph, key, "down")
    if json:
        print_json({**_facts(up), "came_from": [_document(child) for child in up.branches],
                    "became": [_document(child) for child in down.branches]})  # fmt: skip
        return
    print(_label(up))
    for title, branches in (("came from", up.branches), ("became", down.branches)):
        print(f"\n{title}{'' if branches else ': nothing recorded'}")
        print(
            "\n".join(
                line for place, child in enumerate(branches) for line in _lines(child, "", place + 1 == len(branches))
            )
        )


def _lines(branch: Branch, indent: str, last: bool) -> Iterator[str]:
    text = f"{_label(branch)}{f'  ({branch.how})' if branch.how else ''}{'  (above)' if branch.repeated else ''}"
    width = columns() - len(indent) - 3
    yield f"{indent}{'`- ' if last else '|- '}{shortened(text, width)}"
    for place, child in enumerate(branch.branches):
        yield from _lines(child, f"{indent}{'   ' if last else '|  '}", place + 1 == len(branch.branches))


def _label(branch: Branch) -> str:
    node = branch.node
    digest = node.facts.get("digest")
    words = ["dataset" if node.kind == "data" else node.kind, node.name]
    if node.kind == "data":
        words.append(str(node.id))
        if isinstance(node.facts.get("tokens"), int):
            words.append(f"{node.facts['tokens']:,} tokens")
    elif isinstance(digest, str):
        words.append(digest[:DIGEST])
    elif node.kind == "evaluation":
        words += [f"{name} {value:.4g}" for name, value in list(node.facts.items())[:2] if isinstance(value, float)]
    return " ".join([*words, *(["gone"] if node.facts.get("missing") else [])])


def _facts(branch: Branch) -> dict[str, Any]:
    return {"kind": branch.node.kind, "id": branch.node.id, "name": branch.node.name, **{"facts": branch.node.facts}}


def _document(branch: Branch) -> dict[str, Any]:
    document = {**_facts(branch), "how": branch.how}
    return (
        document | {"repeated": True}
        if branch.repeated
        else document | {"branches": [_document(child) for child in branch.branches]}
    )
