import json

import numpy as np
import pytest
from typer.testing import CliRunner

from headway.cli.data import app
from headway.data import (
    Loader,
    ShardWriter,
    WindowReader,
    finish_dataset,
    held_out,
    open_dataset,
    split_dataset,
    window_order,
)
from headway.data.corpus import open_corpus
from headway.errors import DataError
from headway.recipe import Recipe, load_recipe

SEQ = 8


def write_dataset(folder, first, tokens=400, tokenizer=b"{}"):
    """A dataset of one document whose tokens count up from `first`."""
    folder.mkdir()
    writer = ShardWriter(folder, dtype="uint16", end_of_text=0, shard_tokens=10_000)
    writer.add(np.arange(first, first + tokens))
    writer.end_document()
    finish_dataset(folder, writer, vocab_size=60_000, tokenizer=tokenizer)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    return {name: write_dataset(root / name, 10_000 * (i + 1), 300 + 200 * i) for i, name in enumerate("abc")}


def recipe_of(data, **train):
    return Recipe.model_validate({"data": {"seq": SEQ, "holdout": 0.1, **data}, "train": {"batch": 4, **train}})


def mixed(folders, weights, **more):
    return {"mixture": {name: {"path": folders[name], "weight": weight} for name, weight in weights.items()}, **more}


def sources(rows):
    """Which dataset each row is of, by its tokens."""
    return ["?abc"[int(row[row > 0].max()) // 10_000] for row in rows]


def read_run(recipe, ranks=1, steps=40):
    """All rows of the first steps, as the loop reads them: step by step, from the cursor."""
    corpus = open_corpus(recipe)
    reader = corpus.reader()
    loaders = [corpus.loader(reader, r, ranks) for r in range(ranks)]
    return [
        np.concatenate(
            [loader.read(corpus.cursor_before(step), batch=recipe.train.batch_at(step)).inputs for loader in loaders]
        )
        for step in range(1, steps + 1)
    ]


def test_a_single_path_is_read_as_ever(folders):
    recipe = recipe_of({"path": folders["b"]})
    dataset = open_dataset(folders["b"])
    split = split_dataset(dataset, SEQ, 0.1)
    reader = WindowReader(dataset, SEQ)
    corpus = open_corpus(recipe)
    assert (corpus.version, corpus.names) == (dataset.version, ("b",))
    for step, rows in enumerate(read_run(recipe)):
        assert np.array_equal(rows, reader.read(window_order(split, recipe.seed, 4 * step, 4)).inputs)
    assert corpus.held_out(3).tolist() == held_out(split)[:3].tolist()
    assert corpus.held_out(10**6).tolist() == held_out(split).tolist()


def test_steps_hold_the_shares_and_each_data_set_its_own_order(folders):
    recipe = recipe_of(mixed(folders, {"a": 1, "b": 2, "c": 1}))
    steps = read_run(recipe, steps=200)
    for rows in steps:
        assert sorted(sources(rows)) == ["a", "b", "b", "c"]
    for name in "abc":
        dataset = open_dataset(folders[name])
        split = split_dataset(dataset, SEQ, 0.1)
        alone = (
            WindowReader(dataset, SEQ).read(window_order(split, recipe.seed, 0, 200 * (2 if name == "b" else 1))).inputs
        )
        # Rows of a step are dealt out by lot, so that within one step only the set of windows is promised.
        mine = [[row for row, source in zip(rows, sources(rows), strict=True) if source == name] for rows in steps]
        width = len(mine[0])
        for step, rows in enumerate(mine):
            want = alone[step * width : (step + 1) * width]
            assert sorted(map(tuple, rows)) == sorted(map(tuple, want))


def test_weights_change_at_their_very_step_whatever_the_batches_and_what_is_skipped(folders):
    weights = {"a": 1, "b": [[0, 0], [7, 1], [20, 3]]}
    data = mixed(folders, weights, skip=[[8, 21], [50, 51]])
    recipe = recipe_of(data, batch_ramp=[[5, 8], [12, 16]], steps=30, warmup_steps=1)
    for step, rows in enumerate(read_run(recipe, steps=30), start=1):
        share = 0 if step < 7 else 1 / 2 if step < 20 else 3 / 4
        assert sources(rows).count("b") == share * len(rows)
        assert len(rows) == recipe.train.batch_at(step)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_number_of_ranks_reads_the_same_steps(folders, ranks):
    recipe = recipe_of(mixed(folders, {"a": 0.5, "b": 0.3, "c": 0.2}), batch_ramp=[[9, 12]])
    for single, many in zip(read_run(recipe), read_run(recipe, ranks), strict=True):
        assert np.array_equal(single, many)


def test_a_loader_that_starts_anywhere_reads_what_one_from_the_start_does(folders):
    recipe = recipe_of(mixed(folders, {"a": 0.5, "b": [[1, 0.3], [30, 0.9]], "c": 0.2}))
    corpus = open_corpus(recipe)
    whole = read_run(recipe, steps=60)
    for step in (1, 29, 30, 31, 58):
        loader = corpus.loader(corpus.reader())
        for later in range(step, step + 3):
            assert np.array_equal(loader.read(4 * (later - 1)).inputs, whole[later - 1])


def test_skipping_samples_leaves_those_before_as_they_were(folders):
    data = mixed(folders, {"a": 1, "b": [[1, 1], [30, 3]]})
    before, after = read_run(recipe_of(data)), read_run(recipe_of({**data, "skip": [[40, 44]]}))
    for step in range(10):
        assert np.array_equal(before[step], after[step])
    assert np.array_equal(before[11], after[10])  # the step after the range, as long as the weights are those of before


def test_held_out_windows_are_each_data_sets_own_and_never_trained_on(folders):
    recipe = recipe_of(mixed(folders, {"a": 1, "b": 1, "c": 1}))
    corpus = open_corpus(recipe)
    ids = corpus.held_out(10**6)
    reader = corpus.reader()
    aside = {name: set() for name in "abc"}
    for name, mine in zip(corpus.names, corpus.by_dataset(ids), strict=True):
        dataset = open_dataset(folders[name])
        alone = held_out(split_dataset(dataset, SEQ, 0.1))
        assert np.array_equal(reader.read(mine).inputs, WindowReader(dataset, SEQ).read(alone).inputs)
        aside[name] = {tuple(row) for row in reader.read(mine).inputs}
    trained = {tuple(row) for rows in read_run(recipe, steps=300) for row in rows}
    assert not trained & set.union(*aside.values())
    assert len(trained) + sum(map(len, aside.values())) == reader.windows


@pytest.mark.parametrize(
    ("windows", "want"), [(1, [1, 0, 0]), (3, [1, 1, 1]), (9, [3, 3, 3]), (13, [3, 5, 5]), (99, [3, 5, 7])]
)
def test_evaluation_windows_are_divided_as_evenly_as_possible(folders, windows, want):
    """Data sets of 33, 55 and 77 windows keep 3, 5 and 7 of them."""
    corpus = open_corpus(recipe_of(mixed(folders, {"a": 1, "b": 5, "c": 1})))
    counts_by_name = dict(zip(corpus.names, map(len, corpus.by_dataset(corpus.held_out(windows))), strict=True))
    assert sum(counts_by_name.values()) == sum(want)
    assert sorted(counts_by_name.values()) == sorted(want)
    assert windows < 9 or counts_by_name == dict(zip("abc", want, strict=True))


def test_epochs_are_samples_by_training_windows(folders):
    recipe = recipe_of(mixed(folders, {"a": 1, "b": 1}))
    corpus = open_corpus(recipe)
    seen = [source for rows in read_run(recipe, steps=25) for source in sources(rows)]
    want = {"a": seen.count("a") / (33 - 3), "b": seen.count("b") / (55 - 5)}
    assert dict(zip(corpus.names, corpus.epochs(100), strict=True)) == pytest.approx(want)


def test_the_version_follows_from_versions_and_shares_and_nothing_else(folders):
    def version(weights, names="abc", **train):
        named = zip(names, weights.items(), strict=False)
        data = {"mixture": {name: {"path": folders[old], "weight": weight} for name, (old, weight) in named}}
        return open_corpus(recipe_of(data, **train)).version

    base = version({"a": 0.7, "b": 0.3})
    assert base == version({"b": 3, "a": 7}) == version({"a": 0.7, "b": 0.3}, names="xy", batch=8)
    others = [{"a": 0.6, "b": 0.4}, {"a": 0.7, "c": 0.3}, {"a": [[1, 0.7], [9, 0.6]], "b": 0.3}, {"a": 0.7}]
    assert len({base, *map(version, others)}) == 5
    assert base not in {open_dataset(folder).version for folder in folders.values()}


def test_a_pinned_recipe_has_absolute_paths_and_versions_and_refuses_others(folders, monkeypatch, tmp_path):
    recipe = recipe_of(mixed(folders, {"a": 0.7, "b": 0.3}))
    corpus = open_corpus(recipe)
    data = corpus.pinned()
    assert data.version == corpus.version
    assert {name: part.version for name, part in data.mixture.items()} == {
        name: open_dataset(folders[name]).version for name in "ab"
    }
    assert open_corpus(recipe.model_copy(update={"data": data})).version == corpus.version
    with pytest.raises(DataError, match="wants data version 0123456789abcdef, its mixture is"):
        open_corpus(recipe_of(mixed(folders, {"a": 1, "b": 1}, version="0123456789abcdef")))
    with pytest.raises(DataError, match="wants data version 0123456789abcdef, folder holds"):
        open_corpus(recipe_of({"mixture": {"a": {"path": folders["a"], "version": "0123456789abcdef"}}}))


def test_different_tokenizers_are_refused_with_a_hint(folders, tmp_path):
    other = write_dataset(tmp_path / "other", 1, tokenizer=b'{"another": 1}')
    data = mixed({**folders, "z": other}, {"a": 1, "z": 1})
    with pytest.raises(DataError, match="a and z were built with different tokenizers") as error:
        open_corpus(recipe_of(data))
    assert f"--tokenizer {folders['a']}" in error.value.hint


def test_the_same_data_twice_is_refused(folders):
    data = {"mixture": {"a": {"path": folders["a"]}, "again": {"path": folders["a"]}}}
    with pytest.raises(DataError, match="a and again are the same data"):
        open_corpus(recipe_of(data))


def test_a_dataset_without_a_window_is_named(folders, tmp_path):
    short = write_dataset(tmp_path / "short", 1, tokens=3)
    with pytest.raises(DataError, match=r"dataset z: no window of 8 \+ 1 tokens fits"):
        open_corpus(recipe_of(mixed({**folders, "z": short}, {"a": 1, "z": 1})))


def test_prompts_in_one_dataset_mask_only_its_labels(folders, tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    writer = ShardWriter(folder, dtype="uint16", end_of_text=0, shard_tokens=10_000)
    for _ in range(40):
        writer.add(np.arange(50_000, 50_005), prompt=True)
        writer.add(np.arange(50_005, 50_010))
        writer.end_document()
    finish_dataset(folder, writer, vocab_size=60_000, tokenizer=b"{}")
    corpus = open_corpus(recipe_of(mixed({**folders, "p": str(folder)}, {"a": 1, "p": 1})))
    batch = corpus.loader(corpus.reader()).read(0)
    masked = (batch.labels == -100).any(axis=1)
    assert masked.tolist() == [bool(row.max() >= 50_000) for row in batch.inputs]
    assert batch.trained == (batch.labels != -100).sum()


def test_a_loader_accepts_only_batches_that_divide_its_rows_evenly(folders):
    dataset = open_dataset(folders["c"])
    loader = Loader(WindowReader(dataset, SEQ), split_dataset(dataset, SEQ, 0.1), 0, 12, rows=(3, 6))
    with pytest.raises(AssertionError, match="do not divide this batch evenly"):
        loader.read(0, batch=6)
    assert loader.read(0, batch=4).inputs.shape == (1, SEQ)


def mix(recipe_file, *arguments):
    result = CliRunner().invoke(app, ["mix", str(recipe_file), *arguments])
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.fixture
def recipe_file(folders, tmp_path):
    file = tmp_path / "mix.toml"
    tables = [
        f"[data.mixture.{name}]\npath = '{folders[name]}'\nweight = {weight}\n"
        for name, weight in {"a": 1, "b": [[1, 1], [11, 3]]}.items()
    ]
    head = "name = 'two'\n[data]\nseq = 8\nholdout = 0.1\n"
    file.write_text(head + "".join(tables) + "[train]\nsteps = 20\nbatch = 4\n")
    return file


def test_mix_shows_what_a_run_will_see(folders, recipe_file):
    """Ten steps of 2 + 2 samples, ten of 1 + 3."""
    facts = json.loads(mix(recipe_file, "--json"))
    counts = {row["name"]: (row["samples"], row["share"], row["epochs"]) for row in facts["data_sets"]}
    assert counts == {"a": (30, 30 / 80, 30 / 30), "b": (50, 50 / 80, 50 / 50)}
    assert facts["phases"] == [
        {"step": 1, "shares": {"a": 0.5, "b": 0.5}},
        {"step": 11, "shares": {"a": 0.25, "b": 0.75}},
    ]
    assert facts["version"] == open_corpus(load_recipe(recipe_file)).version
    shown = mix(recipe_file)
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    assert [line.split()[:5] for line in shown.splitlines()[5:7]] == [
        ["a", "30", "30", "240", "37.50"],
        ["b", "50", "50", "400", "62.50"],
    ]
    assert "11   a 25.00 %  b 75.00 %" in shown
    assert shown.splitlines()[-1] == f"next: headway train {recipe_file}"


def test_mix_accepts_a_single_dataset(folders, recipe_file):
    recipe_file.write_text(f"[data]\npath = '{folders['a']}'\nseq = 8\n[train]\nsteps = 100\nbatch = 2\n")
    facts = json.loads(mix(recipe_file, "--json", "--set", "data.holdout=0"))
    assert [(row["name"], row["samples"], row["epochs"]) for row in facts["data_sets"]] == [("a", 200, 200 / 33)]
    assert "shares from step" not in mix(recipe_file)


@pytest.mark.parametrize("epochs", [0.5, 1, 2.5])
def test_epochs_are_the_fewest_steps_that_reach_them(folders, epochs):
    more = {"batch_ramp": [[4, 8], [9, 12]]}
    recipe = recipe_of({"path": folders["c"], "skip": [[10, 30]]}, epochs=epochs, **more)
    corpus = open_corpus(recipe)
    cursor, steps = 0, 0
    while cursor < epochs * corpus.splits[0].training:
        steps += 1
        batch = recipe.train.batch_at(steps)
        if cursor < 30 and cursor + batch > 10:
            cursor = 30
        cursor += batch
    train = corpus.train()
    assert train.steps == steps
    assert train.epochs is None
    assert train.warmup_steps == min(100, steps // 10)
    mixed_corpus = open_corpus(recipe_of(mixed(folders, {"a": 1, "b": 1}), epochs=epochs))
    total = sum(split.training for split in mixed_corpus.splits)
    assert mixed_corpus.train().steps == -(-int(np.ceil(epochs * total)) // 4)
