"""Every pair of a few meshes: what one has saved, the other loads bit for bit; and the page that shows more of them.

The code that loads and compares is docs/reshards.py: it reads checkpoints without Headway, and asks PyTorch where a
worker's elements belong.
"""

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headway.recipe import Recipe, with_settings
from headway.state import find_checkpoint
from headway.track import read_recipe
from processes import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MESHES = {"shard=1": 1, "shard=2": 2, "tensor=2": 2, "pipeline=2": 2}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reshards_of_the_docs", ROOT / "docs" / "reshards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reshards = load_script()


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, make_lab: Callable[[Path], Any], dataset: Path
) -> list[tuple[Recipe, Path]]:
    """What each mesh has trained and its agent has saved."""
    lab, saves = make_lab(tmp_path_factory.mktemp("reshard")), []
    for number, mesh in enumerate(MESHES):
        recipe = with_settings(
            reshards.recipe_on(mesh, dataset, number), ["model.layers=2", "train.steps=2", "train.warmup_steps=0"]
        )
        run = lab.train(recipe, workers=None)
        assert run.outcome.state == "finished", run.outcome
        saves.append((read_recipe(run.run), find_checkpoint(run.run.checkpoints)))
    return saves


def story(rank: int, _: int, recipes: list[Recipe], states: list[Path], places: list[Path]) -> None:
    """All meshes in one group of two, one after the other; the first of the two is also the mesh of one worker."""
    for workers, recipe, place in zip(MESHES.values(), recipes, places, strict=True):
        if rank < workers:
            reshards.load_all(rank, workers, recipe, states, place)


def test_every_pair_of_meshes_is_equal_bit_for_bit(saved: list[tuple[Recipe, Path]], tmp_path: Path) -> None:
    states = [state for _, state in saved]
    places = [tmp_path / f"loaded-{number}" for number in range(len(saved))]
    for place in places:
        place.mkdir()
    run_ranks(tmp_path, 2, story, [recipe for recipe, _ in saved], states, places)
    assert len({reshards.digest_in(state) for state in states}) == len(states)
    for target, place in zip(MESHES, places, strict=True):
        for number, (source, state) in enumerate(zip(MESHES, states, strict=True)):
            loaded = reshards.read_loaded(place, number)
            assert any(name.startswith("optimizer/") for name in loaded.parts)
            assert reshards.compare(state, loaded) == [], f"{source} -> {target}"


def test_sources_are_cut_as_their_mesh_says(saved: list[tuple[Recipe, Path]]) -> None:
    """The table would mean little if all of them saved whole tensors; by hand: 301 rows, of which the first has 151."""
    cuts = []
    for _, state in saved:
        manifest = json.loads((state / "manifest.json").read_bytes())
        pieces = manifest["tensors"]["model/embed.weight"]["pieces"]
        cuts.append([(piece["file"], piece["start"], piece["shape"]) for piece in pieces])
    first, second = "rank-00000.safetensors", "rank-00001.safetensors"
    halves = [(first, [0, 0], [151, 40]), (second, [151, 0], [150, 40])]
    whole = [(first, [0, 0], [301, 40])]
    assert cuts == [whole, halves, halves, whole]


def changed_bit(loaded: Any, name: str) -> Any:
    start, part = loaded.parts[name][0]
    bits = part.copy()
    bits.reshape(-1).view(np.uint8)[0] ^= 1
    return replace(loaded, parts={**loaded.parts, name: [(start, bits)]})


def test_what_differs_is_found_and_named(saved: list[tuple[Recipe, Path]], tmp_path: Path) -> None:
    """The comparison itself: a bit, a box that is missing or there twice, a tensor too many, a copy, the digest."""
    state, name = saved[0][1], "optimizer/norm.weight/exp_avg"
    arrays = reshards.read_checkpoint(state)
    loaded = reshards.Loaded({key: [((0,) * array.ndim, array)] for key, array in arrays.items()}, [])
    box = loaded.parts[name][0]

    def but(boxes: Any) -> list[str]:
        return reshards.compare(state, replace(loaded, parts={**loaded.parts, name: boxes}))

    assert reshards.compare(state, loaded) == []
    assert reshards.compare(state, changed_bit(loaded, name)) == [f"{name}: other bits"]
    assert but([]) == [f"{name}: 40 of 40 elements are not covered exactly once"]
    assert but([box, ((0,), box[1][:3])]) == [f"{name}: 3 of 40 elements are not covered exactly once"]
    assert but([(box[0], box[1].view(np.uint32))]) == [f"{name}: other bits"]
    extra = replace(loaded, parts={**loaded.parts, "model/more": [box]})
    assert reshards.compare(state, extra) == ["model/more: not in the checkpoint"]
    assert reshards.compare(state, replace(loaded, wrong=["x on 1"])) == ["x on 1: other bits"]

    copy = tmp_path / "copy"
    shutil.copytree(state, copy)
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace(reshards.digest_in(state), "0" * 32))
    assert reshards.compare(copy, loaded) == ["the digest"]


def test_the_page_has_every_pair_of_the_meshes_that_the_script_names() -> None:
    text = reshards.PAGE.read_text(encoding="utf-8")
    table = text.split(reshards.BEGIN, 1)[1].split(reshards.END, 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    meshes = [reshards.mesh_name(mesh) for mesh in reshards.MESHES]
    assert len(meshes) == len(set(meshes)) >= 10
    numbers = [str(number + 1) for number in range(len(meshes))]
    assert rows[0] == ["", "saved by", *numbers]
    equal = ["="] * len(meshes)
    assert rows[2:] == [[number, mesh, *equal] for number, mesh in zip(numbers, meshes, strict=True)]


def test_a_pair_that_differs_shows_in_the_table() -> None:
    """Columns load, rows have saved: what the second mesh makes of the first one's state."""
    lines = list(
        reshards.table(
            ["a", "b"], [[[], []], [["x on 0: other bits", "x on 1: other bits", "y on 0: other bits"], []]], 7
        )
    )
    assert lines[-3:] == ["| 1 | a | = | 2 differ |", "| 2 | b | = | = |", ""]
