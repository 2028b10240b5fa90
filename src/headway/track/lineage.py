"""What a model came from and what it became: a graph of records that exist, and trees in it.

    source files -> data version -> run -> checkpoint -> export, evaluation, name, another run
    base model, teacher, tokenizer ----^

`collect` reads the records: recipes, manifests, evaluations, names, and two small ones that are written for this:
`lineage.json` of a run (what it began from, by digest) and of an exported folder, and a run's `exports.jsonl` (where
folders were written). `tree` is a pure function of what was read.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json, to_json

from headway.errors import HeadwayError, RunError, UsageError
from headway.track.evaluations import read_evaluations
from headway.track.files import write_json
from headway.track.hub import hub_of
from headway.track.registry import read_registry, split_ref
from headway.track.run_folder import RunFolder, run_id
from headway.track.runs import find_run, list_runs

RECORD, EXPORTS = "lineage.json", "exports.jsonl"
MOST_SOURCES = 20
"""Source files that are nodes of their own; more become one node."""

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Node:
    """One thing: its kind, what identifies it, a name for people, and facts."""

    kind: str
    id: str
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Unique among all nodes."""
        return f"{self.kind}:{self.id}"


@dataclass
class Graph:
    """Nodes, and edges from what something came from to what it became."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[tuple[str, str], str] = field(default_factory=dict)
    """(origin, product) and how."""

    def add(self, node: Node) -> str:
        """Add a node, or the facts of one that is there; return its key."""
        old = self.nodes.get(node.key)
        self.nodes[node.key] = node if old is None else Node(old.kind, old.id, old.name, {**node.facts, **old.facts})
        return node.key

    def link(self, origin: str, product: str, how: str) -> None:
        """Add an edge."""
        if origin != product:
            self.edges.setdefault((origin, product), how)


@dataclass(frozen=True)
class Branch:
    """A node in a tree, how it is related to the one above it, and what is below."""

    node: Node
    how: str
    branches: tuple["Branch", ...] = ()
    repeated: bool = False
    """Whether it was shown before, with what is below it."""


def tree(graph: Graph, key: str, direction: Direction) -> Branch:
    """Return what a node came from, or what it became, each node's branches once."""
    neighbours: dict[str, list[tuple[str, str]]] = {}
    for (origin, product), how in graph.edges.items():
        here, there = (product, origin) if direction == "up" else (origin, product)
        neighbours.setdefault(here, []).append((there, how))
    seen = set[str]()

    def branch(key: str, how: str) -> Branch:
        node = graph.nodes[key]
        if key in seen:
            return Branch(node, how, repeated=bool(neighbours.get(key)))
        seen.add(key)
        below = sorted(neighbours.get(key, ()), key=lambda item: (graph.nodes[item[0]].kind, graph.nodes[item[0]].name))
        return Branch(node, how, tuple(branch(other, relation) for other, relation in below))

    return branch(key, "")


# -- records that are written for this


def write_origin(run: RunFolder, recipe: Mapping[str, Any], origin: str | None, digests: Mapping[str, str]) -> None:
    """Record what a new run begins from: a checkpoint's state, initial weights, a teacher, each with its digest."""
    record: dict[str, Any] = {"format": 1, "kind": "run", "from": None, "init": None, "teacher": None}
    model, objective = recipe.get("model") or {}, recipe.get("objective") or {}
    for name, address in (("from", origin), ("init", model.get("init")), ("teacher", objective.get("teacher"))):
        if address:
            record[name] = {"address": str(address), "digest": digests.get(name), "hub": hub_of(address)}
    with suppress(OSError):
        write_json(run.path / RECORD, record)


def record_export(folder: Path, run: RunFolder | None, facts: Mapping[str, Any]) -> None:
    """Record in an exported folder what it is of, and in its run where it is; an export without these is whole, too."""
    known = {"run": run.name, "run_id": run_id(run)} if run is not None else {}
    record = {"format": 1, "kind": "export", **known, **facts, "at": time.time()}
    with suppress(OSError):
        write_json(folder / RECORD, record)
    if run is not None:
        line = to_json({"folder": str(folder.resolve()), **record}) + b"\n"
        with suppress(OSError), (run.path / EXPORTS).open("ab") as file:
            file.write(line)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a run or an exported folder; nothing if it has none."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


# -- reading what exists


def collect(root: Path, folders: Iterable[Path] = ()) -> Graph:
    """Read the lineage of all runs in a folder, and of other folders: exports and datasets."""
    graph = Graph()
    for run in list_runs(root):
        with suppress(HeadwayError, OSError):
            _add_run(graph, run)
    for name, entry in _registered(root).items():
        run = RunFolder(root / entry.run)
        if run.events.is_dir():
            checkpoint = _checkpoint(graph, run, entry.step, entry.digest)
            graph.link(checkpoint, graph.add(Node("name", name, name, {"digest": entry.digest})), "named")
    for folder in folders:
        add_folder(graph, folder)
    return graph


def add_folder(graph: Graph, folder: Path) -> str:
    """Add a dataset, an exported folder or any other model's folder; return its key."""
    folder = folder.resolve()
    manifest = _json(folder / "manifest.json")
    if "dtype" in manifest and "tokens" in manifest:
        return _add_data(graph, folder, manifest)
    record = read_record(folder)
    key = _model_folder(graph, folder)
    if record.get("kind") == "export" and isinstance(record.get("run"), str) and isinstance(record.get("step"), int):
        identity = str(record.get("run_id") or record["run"])
        run = graph.add(Node("run", identity, record["run"]))
        digest = record.get("digest")
        step = record["step"]
        node = Node("checkpoint", f"{identity}@{step}", f"{record['run']}@{step}", {"digest": digest})
        checkpoint = graph.add(node)
        graph.link(run, checkpoint, "saved")
        graph.link(checkpoint, key, str(record.get("what", "exported")))
    return key


def find(graph: Graph, root: Path, what: str) -> str:
    """Return the key of RUN, RUN@STEP, a name, a folder or a data version; raise UsageError if there is none."""
    if Path(what).is_dir() and ("/" in what or not (root / what / "events").is_dir()):
        return _of_folder(graph, root, Path(what))
    versions = [key for key, node in graph.nodes.items() if node.kind == "data" and len(what) >= 8 and
                node.id.startswith(what)]  # fmt: skip
    if len(versions) == 1:
        return versions[0]
    if "/" in what:
        raise UsageError(f"no folder {what}", hint="name a run, RUN@STEP, a folder, or a data version")
    name, step = split_ref(root, what)
    run = find_run(root, name)
    _add_run(graph, run)
    key = f"run:{run_id(run)}" if step is None else f"checkpoint:{run_id(run)}@{step}"
    if key not in graph.nodes:
        saved = ", ".join(node.name for node in graph.nodes.values() if node.kind == "checkpoint" and
                          node.id.startswith(f"{run_id(run)}@"))  # fmt: skip
        raise RunError(f"run {run.name} has no record of a checkpoint of step {step}",
                       hint=f"recorded: {saved or 'none'}", usage=True)  # fmt: skip
    return key


def _of_folder(graph: Graph, root: Path, folder: Path) -> str:
    folder = folder.resolve()
    if (folder / "events").is_dir():
        _add_run(graph, RunFolder(folder))
        return f"run:{run_id(RunFolder(folder))}"
    checkpoint = _checkpoint_of_path(graph, folder)
    if checkpoint is not None:
        return checkpoint
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json", "manifest.json", RECORD)):
        raise UsageError(f"{folder} is no run, dataset or model", hint=f"runs are in {root}")
    return add_folder(graph, folder)


def _add_run(graph: Graph, run: RunFolder) -> None:
    recipe, record, identity = _json(run.recipe_file), read_record(run.path), run_id(run)
    key = graph.add(Node("run", identity, run.name, {"path": str(run.path), "seed": recipe.get("seed")}))
    for name, part in _data_parts(recipe):
        version = part.get("version")
        folder = Path(str(part.get("path", "")))
        manifest = _json(folder / "manifest.json")
        if version and (not manifest or not (folder / "manifest.json").is_file()):
            data = graph.add(Node("data", str(version), folder.name or name, {"path": str(folder), "missing": True}))
        else:
            data = _add_data(graph, folder, manifest, str(version) if version else None)
        graph.link(data, key, "trained on")
    _add_tokenizer(graph, run.tokenizer_file, key)
    model, objective = _table(recipe, "model"), _table(recipe, "objective")
    for how, name, address in (
        ("began from", "from", None),
        ("weights of", "init", model.get("init")),
        ("taught by", "teacher", objective.get("teacher")),
    ):
        noted = _table(record, name)
        origin = noted.get("address") or address
        if isinstance(origin, str) and origin:
            graph.link(_origin(graph, origin, noted), key, how)
    for path in sorted(run.checkpoints.glob("step-*")):
        if path.name[5:].isdigit() and (path / "manifest.json").is_file():
            _checkpoint(graph, run, int(path.name[5:]))
    for line in _lines(run.path / EXPORTS):
        folder = Path(str(line.get("folder", "")))
        if isinstance(line.get("step"), int) and folder.name:
            checkpoint = _checkpoint(graph, run, line["step"], line.get("digest"))
            exported = _model_folder(graph, folder)
            graph.link(checkpoint, exported, str(line.get("what", "exported")))
    for evaluation in read_evaluations(run):
        node = Node("evaluation", f"{identity}/{evaluation.fingerprint}", evaluation.key,
                    {metric.name: metric.value for metric in evaluation.metrics})  # fmt: skip
        origin = key if evaluation.step is None else _checkpoint(graph, run, evaluation.step)
        graph.link(origin, graph.add(node), "evaluated")


def _add_data(graph: Graph, folder: Path, manifest: Mapping[str, Any], version: str | None = None) -> str:
    recorded = _json(folder / "sources.json")
    facts = {"path": str(folder), "tokens": manifest.get("tokens"), "documents": manifest.get("documents")}
    key = graph.add(Node("data", version or _data_version(folder) or str(folder), folder.name, facts))
    files = [str(file.get("path")) for file in recorded.get("files", ()) if isinstance(file, dict)]
    hubs = sorted({hub for path in files if (hub := hub_of(path)) is not None})
    plain = [path for path in files if hub_of(path) is None]
    for hub in hubs:
        graph.link(graph.add(Node("hub", hub, hub)), key, "built from")
    if len(plain) <= MOST_SOURCES:
        for path in plain:
            graph.link(graph.add(Node("source", path, path)), key, "built from")
    else:
        node = Node("source", f"{key}/sources", f"{len(plain):,} files", {"first": plain[0], "last": plain[-1]})
        graph.link(graph.add(node), key, "built from")
    _add_tokenizer(graph, folder / "tokenizer.json", key)
    return key


def _data_version(folder: Path) -> str | None:
    import hashlib

    # A version is the beginning of the sha256 of the manifest; see `DatasetManifest.version`.
    with suppress(OSError):
        return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()[:16]
    return None


def _add_tokenizer(graph: Graph, file: Path, product: str) -> None:
    import hashlib

    with suppress(OSError):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        graph.link(graph.add(Node("tokenizer", digest, digest)), product, "tokenized by")


def _origin(graph: Graph, address: str, noted: Mapping[str, Any]) -> str:
    """Return the node of an address that a run began from: a checkpoint, a folder, the Hub, or a store."""
    hub = noted.get("hub") or hub_of(address)
    if isinstance(hub, str):
        return graph.add(Node("hub", hub, hub, {"digest": noted.get("digest")}))
    if "://" in address:
        return graph.add(Node("store", address, address, {"digest": noted.get("digest")}))
    checkpoint = _checkpoint_of_path(graph, Path(address), noted.get("digest"))
    if checkpoint is not None:
        return checkpoint
    return add_folder(graph, Path(address)) if Path(address).is_dir() else _model_folder(graph, Path(address))


def _checkpoint_of_path(graph: Graph, path: Path, digest: Any = None) -> str | None:
    """Return the node of `RUN/checkpoints/step-N`, also if it is gone; None for another path."""
    if path.parent.name != "checkpoints" or not path.name.startswith("step-") or not path.name[5:].isdigit():
        return None
    run, step = RunFolder(path.parent.parent), int(path.name[5:])
    if run.events.is_dir():
        graph.add(Node("run", run_id(run), run.name, {"path": str(run.path)}))
        return _checkpoint(graph, run, step, digest if isinstance(digest, str) else None)
    node = Node("checkpoint", f"{run.name}@{step}", f"{run.name}@{step}", {"digest": digest, "missing": True})
    return graph.add(node)


def _checkpoint(graph: Graph, run: RunFolder, step: int, digest: str | None = None) -> str:
    identity, path = run_id(run), run.checkpoints / f"step-{step:08d}"
    node = Node("checkpoint", f"{identity}@{step}", f"{run.name}@{step}")
    if node.key not in graph.nodes or digest is not None:
        recorded = _json(path / "manifest.json").get("digest") if digest is None else digest
        facts: dict[str, Any] = {"digest": recorded}
        if not (path / "manifest.json").is_file():
            facts["missing"] = True
        graph.add(Node(node.kind, node.id, node.name, facts))
        graph.add(Node("run", identity, run.name, {"path": str(run.path)}))
        graph.link(f"run:{identity}", node.key, "saved")
    return node.key


def _model_folder(graph: Graph, folder: Path) -> str:
    hub = hub_of(folder)
    if hub is not None:
        return graph.add(Node("hub", hub, hub))
    kind = "adapter" if (folder / "adapter_config.json").is_file() else "folder"
    facts = {} if folder.is_dir() else {"missing": True}
    return graph.add(Node(kind, str(folder), str(folder), facts))


def _registered(root: Path) -> Mapping[str, Any]:
    try:
        return read_registry(root)
    except HeadwayError:
        return {}


def _data_parts(recipe: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    data = _table(recipe, "data")
    mixture = data.get("mixture")
    if isinstance(mixture, dict) and mixture:
        return [(str(name), part) for name, part in mixture.items() if isinstance(part, dict)]
    return [("data", data)] if data.get("path") else []


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = values.get(key)
    return table if isinstance(table, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = from_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                value = from_json(line)
                if isinstance(value, dict):
                    yield value
