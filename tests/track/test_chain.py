"""The chain against hashlib and struct by hand, and comparisons of runs that part in known ways."""

import hashlib
import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.recipe import Data, Recipe, with_settings
from headway.track import START, Recorder, RunFolder, chain, compare_runs, create_run, extend_chain, record_path
from headway.track.differences import RunConditions, find_causes, first_difference

u64 = st.integers(0, 2**64 - 1)
links = st.tuples(u64, u64, st.floats(), st.floats())


@given(st.lists(links, max_size=5))
def test_chain_link_hashes_previous_chain_and_step_bits(rows):
    value = START
    for step, cursor, loss, norm in rows:
        bits = step.to_bytes(8, "little") + cursor.to_bytes(8, "little")
        bits += struct.pack("<d", loss) + struct.pack("<d", norm)
        expected = hashlib.sha256(value.encode() + bits).hexdigest()[:32]
        value = extend_chain(value, step, cursor, loss, norm)
        assert value == expected


def test_every_input_bit_changes_the_chain():
    base = (3, 96, 2.5, 1.0)
    same = extend_chain(START, *base)
    others = [
        extend_chain("1" * 32, *base),
        extend_chain(START, 4, 96, 2.5, 1.0),
        extend_chain(START, 3, 97, 2.5, 1.0),
        extend_chain(START, 3, 96, math.nextafter(2.5, 3), 1.0),
        extend_chain(START, 3, 96, 2.5, math.nextafter(1.0, 0)),
        extend_chain(START, 3, 96, math.nan, 1.0),
        extend_chain(START, 3, 96, 0.0, 1.0),
        extend_chain(START, 3, 96, -0.0, 1.0),
    ]
    assert len({same, *others}) == 9
    assert extend_chain(START, 3, 96, math.nan, 1.0) == extend_chain(START, 3, 96, math.nan, 1.0)
    assert len(START) == len(same) == 32
    assert chain.extend_chain is extend_chain


Row = tuple[int, int, float, float]  # step, cursor, loss, grad_norm


def rows(count: int) -> list[Row]:
    return [(step, 8 * step, 5.0 / step, 1.0 + step) for step in range(1, count + 1)]


def write(run: RunFolder, steps: list[Row], digests: dict[int, str], attempt: int = 1, link: str = START) -> None:
    resumed = steps[0][0] - 1
    with Recorder(record_path(run.events, attempt, "rank-0"), attempt=attempt, process="rank-0") as recorder:
        recorder.event("resumed", step=resumed)
        for step, cursor, loss, norm in steps:
            link = extend_chain(link, step, cursor, loss, norm)
            recorder.event("step", step=step, cursor=cursor, loss=loss, grad_norm=norm, chain=link, data=0, compute=1)
            if step in digests:
                recorder.event("checkpoint", step=step, digest=digests[step], bytes=1, seconds=0.1)


def save(run: RunFolder, step: int, tensors: dict[str, str]) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    manifest = {"digest": "x", "tensors": {name: {"digest": digest} for name, digest in tensors.items()}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def pair(tmp_path) -> tuple[RunFolder, RunFolder]:
    return create_run(tmp_path, "demo", "a"), create_run(tmp_path, "demo", "b")


def test_runs_are_equal_when_one_is_longer(pair):
    write(pair[0], rows(10), {5: "d5", 10: "d10"})
    write(pair[1], rows(7), {5: "d5"})
    comparison = compare_runs(*pair)
    assert comparison.equal
    assert (comparison.common_steps, comparison.common_digests, comparison.step, comparison.differs) == (7, 1, None, ())
    assert comparison.sentence.startswith("equal")


def test_killed_and_resumed_run_equals_uninterrupted_run(pair):
    whole = rows(10)
    write(pair[0], whole, {5: "d5", 10: "d10"})
    write(pair[1], whole[:5], {5: "d5"})
    # Attempt 1 had gone on wrongly to step 7 and saved there: rolled back, so it does not count.
    wrong = [*whole[:5], (6, 48, 9.0, 9.0), (7, 56, 9.0, 9.0)]
    record_path(pair[1].events, 1, "rank-0").unlink()
    write(pair[1], wrong, {5: "d5", 7: "wrong"})
    link = START
    for row in whole[:5]:
        link = extend_chain(link, *row)
    write(pair[1], whole[5:], {10: "d10"}, attempt=2, link=link)
    assert compare_runs(*pair).equal
    assert compare_runs(*pair).common_steps == 10


@pytest.mark.parametrize(
    ("change", "differs", "words"),
    [
        ((4, 32, math.nextafter(1.25, 2), 5.0), ("loss",), "loss differ"),
        ((4, 32, 1.25, 5.5), ("grad_norm",), "grad_norm differ"),
        ((4, 33, 1.25, 5.0), ("cursor",), "data order"),
        ((4, 33, 1.5, 5.5), ("cursor", "loss", "grad_norm"), "data order"),
        ((4, 32, math.nan, 5.0), ("loss",), "loss differ"),
    ],
)
def test_first_differing_step_and_fields_are_named(pair, change, differs, words):
    changed = rows(10)
    changed[3] = change
    write(pair[0], rows(10), {8: "x"})
    write(pair[1], changed, {8: "y"})
    comparison = compare_runs(*pair)
    assert not comparison.equal
    assert (comparison.step, comparison.differs) == (4, differs)
    assert words in comparison.sentence
    assert "step 4" in comparison.sentence


def test_tensors_are_named_when_only_a_digest_differs(pair):
    for run, digest in zip(pair, ("x", "y"), strict=True):
        write(run, rows(10), {2: "same", 4: digest, 8: digest})
    assert compare_runs(*pair).tensors == ()
    # Step 4 is pruned in one of them: step 8 is the first that both still have.
    save(pair[0], 4, {"model/a": "1"})
    save(pair[0], 8, {"model/a": "1", "model/b": "2", "model/c": "3"})
    save(pair[1], 8, {"model/a": "1", "model/b": "9", "model/d": "3"})
    comparison = compare_runs(*pair)
    assert (comparison.step, comparison.differs, comparison.tensors_step) == (4, ("digest",), 8)
    assert comparison.tensors == ("model/b", "model/c", "model/d")
    assert "digest" in comparison.sentence


def test_runs_that_diverge_before_first_common_step(pair):
    write(pair[0], rows(10), {})
    write(pair[1], rows(10)[5:], {}, link="f" * 32)
    comparison = compare_runs(*pair)
    assert (comparison.equal, comparison.step, comparison.differs) == (False, 6, ("chain",))
    assert "before step 6" in comparison.sentence


def test_runs_without_common_step_are_not_equal(pair):
    comparison = compare_runs(*pair)
    assert not comparison.equal
    assert comparison.step is None
    assert "no step in common" in comparison.sentence


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tensors": 3}', '{"tensors": {"a": 3}}'])
def test_damaged_manifest_does_not_stop_comparison(pair, text):
    for run, digest in zip(pair, ("x", "y"), strict=True):
        write(run, rows(4), {4: digest})
        save(run, 4, {"model/a": digest})
    (pair[0].checkpoints / "step-00000004" / "manifest.json").write_text(text)
    assert compare_runs(*pair).differs == ("digest",)
    assert compare_runs(*pair).tensors == ()


# -- why


def conditions(*settings: str, workers: tuple[int, ...] = (2,), **environment: object) -> RunConditions:
    recipe = with_settings(Recipe(data=Data(path="d")), settings)
    packages = {"torch": environment.pop("torch", "2.13.0"), "numpy": "2.4.6"}
    base = {"workers": workers[0], "mesh": {"shard": workers[0]}, "threads": 1, "packages": packages}
    return RunConditions(recipe, base | {"data_version": "aaaa"} | environment, workers)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (conditions(), []),
        (conditions("train.lr=0.001"), [("recipe", "train.lr", (0.0003, 0.001))]),
        (
            conditions("train.steps=500", "model.layers=9", "seed=4"),
            [("recipe", "seed", (0, 4)), ("recipe", "model.layers", (4, 9)), ("recipe", "train.steps", (1000, 500))],
        ),
        # How a run is called, saved and measured does not change its numbers.
        (conditions("name=x", "checkpoint.every_steps=7", "eval.windows=3", "data.path=e", "train.restarts=9"), []),
        (conditions(data_version="bbbb"), [("data", "version", ("aaaa", "bbbb"))]),
        (
            conditions(workers=(4,)),
            [("workers", "workers", (2, 4)), ("workers", "mesh", ({"shard": 2}, {"shard": 4}))],
        ),
        (conditions(workers=(2, 1)), [("workers", "workers", (2, [2, 1]))]),
        (
            conditions("train.clip=2.0", torch="2.11.0", threads=4),
            [
                ("recipe", "train.clip", (1.0, 2.0)),
                ("environment", "threads", (1, 4)),
                ("environment", "torch", ("2.13.0", "2.11.0")),
            ],
        ),
    ],
)
def test_causes_are_what_differs_and_matters(other: RunConditions, expected: list) -> None:
    causes = find_causes(conditions(), other)
    assert sorted((cause.kind, cause.key, cause.values) for cause in causes) == sorted(expected)
    order = ["recipe", "data", "workers", "environment"]
    assert [cause.kind for cause in causes] == sorted((cause.kind for cause in causes), key=order.index)


def test_first_difference_is_the_learning_rate_before_the_loss_that_follows() -> None:
    a = {step: {"cursor": 8 * step, "lr": 0.1, "loss": 5.0 / step, "grad_norm": 1.0} for step in (1, 2, 3)}
    b = {step: dict(event) for step, event in a.items()}
    assert first_difference(a, b) is None
    b[3] |= {"loss": 4.0}
    b[2] |= {"lr": 0.05}
    first = first_difference(a, b)
    assert first is not None
    assert (first.step, first.metric, first.values) == (2, "lr", (0.1, 0.05))
    b[1] |= {"grad_norm": None}  # not finite
    b[1].pop("lr")
    first = first_difference(a, b)
    assert first is not None
    assert (first.step, first.metric) == (1, "grad_norm")


def test_unreadable_conditions_do_not_stop_comparison(pair):
    for run, last in zip(pair, (10, 11), strict=True):
        write(run, [*rows(3), (4, 32, last, 1.0)], {})
    pair[0].recipe_file.write_text("{")
    pair[1].environment_file.write_text("[]")
    comparison = compare_runs(*pair)
    assert (comparison.step, comparison.causes) == (4, ())
    assert comparison.first is not None
    assert comparison.first.values == (10, 11)
