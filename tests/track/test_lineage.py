"""Lineage: a tree is what a search over the edges finds, and real records lead from sources to exports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conftest import Lab
from headway.cli.checkpoint import app as checkpoint_app
from headway.errors import RunError, UsageError
from headway.recipe import Recipe
from headway.track import RunFolder
from headway.track.lineage import Branch, Graph, Node, collect, find, tree
from headway.track.registry import tag


@given(edges=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=25), start=st.integers(0, 9))
def test_tree_has_what_a_search_reaches_also_with_cycles(edges: set[tuple[int, int]], start: int) -> None:
    graph = Graph()
    for number in range(10):
        graph.add(Node("n", str(number), str(number)))
    for origin, product in edges:
        graph.link(f"n:{origin}", f"n:{product}", "made")

    def nodes(branch: Branch) -> list[str]:
        return [branch.node.id, *(name for one in branch.branches for name in nodes(one))]

    for direction, step in (("up", lambda e: (e[1], e[0])), ("down", lambda e: e)):
        reached, front = {start}, [start]
        while front:
            here = front.pop()
            for edge in edges:
                a, b = step(edge)
                if a == here and b not in reached:
                    reached.add(b)
                    front.append(b)
        found = nodes(tree(graph, f"n:{start}", direction))  # type: ignore[arg-type]
        assert {int(name) for name in found} == reached


def kinds_of(branch: Branch) -> set[tuple[str, str]]:
    mine = {(branch.node.kind, branch.node.name)}
    return mine.union(*(kinds_of(one) for one in branch.branches))


def test_records_lead_from_sources_to_exports(
    lab: Lab, recipe: Callable[..., Recipe], dataset: Path, tmp_path: Path
) -> None:
    base = lab.train(recipe({"train.steps": 2, "train.warmup_steps": 0}))
    child = lab.train(recipe({"train.steps": 1, "train.warmup_steps": 0, "model.init": base.run.name}))
    continued = lab.train(recipe({"train.steps": 3, "train.warmup_steps": 0}), origin=f"{base.run.name}@2")
    tag(lab.root, "prod", base.run, 2, base.digest)
    out = tmp_path / "out"
    ended = CliRunner().invoke(checkpoint_app, ["export", "prod", str(out), "--runs", str(lab.root)])
    assert ended.exit_code == 0, ended.output

    graph = collect(lab.root)
    version = json.loads(base.run.recipe_file.read_bytes())["data"]["version"]
    checkpoint = find(graph, lab.root, "prod")
    assert checkpoint == find(graph, lab.root, f"{base.run.name}@2")
    assert graph.nodes[checkpoint].facts["digest"] == base.digest
    up, down = kinds_of(tree(graph, checkpoint, "up")), kinds_of(tree(graph, checkpoint, "down"))
    assert ("run", base.run.name) in up
    assert {kind for kind, _ in up} == {"checkpoint", "run", "data", "tokenizer", "source"}
    assert {("run", child.run.name), ("run", continued.run.name), ("folder", str(out)), ("name", "prod")} <= down
    assert find(graph, lab.root, version) == find(graph, lab.root, str(dataset))

    from_export = tree(graph, find(collect(tmp_path / "none"), tmp_path / "none", str(out)), "up")
    assert ("checkpoint", f"{base.run.name}@2") in kinds_of(from_export)
    assert graph.edges[checkpoint, f"run:{child.run.id_file.read_text()}"] == "weights of"
    assert graph.edges[checkpoint, f"run:{continued.run.id_file.read_text()}"] == "began from"


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a-run")
    run.events.mkdir(parents=True)
    bad: list[Any] = [b"", b"[]", b"\xff", b'{"data": 3, "model": []}', b'{"data": {"mixture": {"a": 1}}}']
    for content in bad:
        run.recipe_file.write_bytes(content)
        (run.path / "lineage.json").write_bytes(content)
        (run.path / "exports.jsonl").write_bytes(content + b'\n{"step": "x"}\n')
        graph = collect(tmp_path)
        assert tree(graph, find(graph, tmp_path, "a-run"), "up").node.name == "a-run"
    for what in ("nothing/here", str(tmp_path)):
        with pytest.raises(UsageError):
            find(graph, tmp_path, what)


def test_step_that_was_never_saved_is_an_error_and_a_removed_one_is_gone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "demo")
    run.events.mkdir(parents=True)
    for step in (10, 20):
        folder = run.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"digest": "aa"}')
    tag(tmp_path, "prod", run, 10, "aa")
    (run.checkpoints / "step-00000010" / "manifest.json").unlink()
    graph = collect(tmp_path)
    assert graph.nodes[find(graph, tmp_path, "demo@10")].facts["missing"]
    assert "missing" not in graph.nodes[find(graph, tmp_path, "demo@20")].facts
    with pytest.raises(RunError, match="no record of a checkpoint of step 30") as caught:
        find(graph, tmp_path, "demo@30")
    assert caught.value.usage
    assert str(caught.value.hint).startswith("recorded: demo@")
