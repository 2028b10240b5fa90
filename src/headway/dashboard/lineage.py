"""Names of models, and what a run, checkpoint, name or dataset came from and became."""

from typing import Any

from headway.dashboard.recorded import RecordedRuns
from headway.errors import HeadwayError, RunError
from headway.track import run_id
from headway.track.lineage import Branch, Graph, collect, tree
from headway.track.registry import is_gone, read_registry

MOST_BRANCHES = 200
"""Of one node, that are sent."""


def name_list(recorded: RecordedRuns) -> dict[str, Any]:
    """Return the names of models with what each stands for, or what is wrong with their file."""
    try:
        names = read_registry(recorded.root)
    except HeadwayError as error:
        return {"names": [], "problem": error.message}
    rows = []
    for name, entry in sorted(names.items()):
        rows.append({
            "name": name,
            "run": entry.run,
            "step": entry.step,
            "digest": entry.digest,
            "at": entry.at,
            "notes": [note.model_dump() for note in entry.notes],
            "before": [{"run": old.run, "step": old.step, "at": old.at} for old in entry.before],
            "here": not is_gone(recorded.root, entry),
        })  # fmt: skip
    return {"names": rows, "problem": None}


def lineage_document(recorded: RecordedRuns, what: str) -> dict[str, Any]:
    """Return what something came from, and what it became; no path of a file is accepted."""
    graph = collect(recorded.root)
    key = _key_of(graph, recorded, what)
    up, down = tree(graph, key, "up"), tree(graph, key, "down")
    return {**_node(up), "came_from": _branches(up), "became": _branches(down)}


def _key_of(graph: Graph, recorded: RecordedRuns, what: str) -> str:
    """Return the node of a name, a data version, RUN or RUN@STEP, all of them exact."""
    keys = [f"name:{what}", f"data:{what}"]
    name, _, step = what.partition("@")
    if not any(key in graph.nodes for key in keys):
        identity = run_id(recorded.find(name))
        keys.append(f"checkpoint:{identity}@{step}" if step else f"run:{identity}")
    for key in keys:
        if key in graph.nodes:
            return key
    raise RunError(f"{what!r} is not recorded", hint="name a run, RUN@STEP, a model or a data version", usage=True)


def _branches(branch: Branch) -> list[dict[str, Any]]:
    return [
        {**_node(child), "how": child.how, "repeated": child.repeated, "branches": _branches(child)}
        for child in branch.branches[:MOST_BRANCHES]
    ]


def _node(branch: Branch) -> dict[str, Any]:
    node = branch.node
    digest = node.facts.get("digest")
    scores = {key: value for key, value in node.facts.items() if isinstance(value, float)}
    return {
        "kind": "dataset" if node.kind == "data" else node.kind,
        "name": node.name,
        "id": node.id if node.kind == "data" else None,
        "digest": digest if isinstance(digest, str) else None,
        "gone": bool(node.facts.get("missing")),
        "scores": scores if node.kind == "evaluation" else {},
    }
