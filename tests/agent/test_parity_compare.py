"""What a comparison finds in trials made by hand, whose differences are known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from headway.agent.parity_compare import TOLERANCES, ModuleSums, TrialNumbers, compare_trials, merge_marks

FLOAT32 = TOLERANCES["float32"]
ORDER = ("embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight")
STEPS = 2


def tensors(seed: int) -> dict[str, np.ndarray]:
    """All of norm 1, so that what is added to one is its relative difference."""
    random = np.random.default_rng(seed)
    drawn = {name: random.normal(size=(5, 4)) for name in ORDER}
    return {name: (value / np.linalg.norm(value)).astype(np.float32) for name, value in drawn.items()}


def marks() -> list[ModuleSums]:
    names = ("embed", "layers.0", "layers.1", "norm")
    places = ((0, 0), (1, 0), (1, 1), (2, 0))
    return [
        ModuleSums(place, name, sum=3.0, squares=40.0, count=20.0) for place, name in zip(places, names, strict=True)
    ]


def evidence() -> TrialNumbers:
    return TrialNumbers(
        losses=[4.0, 2.0],
        marks=marks(),
        gradients=[tensors(10 + step) for step in range(STEPS)],
        parameters=[tensors(20 + step) for step in range(STEPS)],
        adamw=tensors(30),
        order=ORDER,
    )


def moved(steps: list[dict[str, np.ndarray]], step: int, name: str, by: float) -> list[dict[str, np.ndarray]]:
    """The same but for one element of one tensor at one step (from 1)."""
    changed = [dict(found) for found in steps]
    value = changed[step - 1][name].copy()
    value[2, 1] += by
    changed[step - 1][name] = value
    return changed


def without(found: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in found.items() if key != name}


def test_equal_trials_are_equal() -> None:
    verdict = compare_trials(evidence(), evidence(), FLOAT32)
    assert verdict.equal
    assert verdict.first is None
    assert set(verdict.largest) == {"forward", "loss", "gradient", "parameter", "adamw"}
    assert all(finding.difference == 0 for finding in verdict.largest.values())


def test_rounding_is_no_difference_and_its_size_is_told() -> None:
    mesh = evidence()
    mesh = replace(mesh, gradients=moved(mesh.gradients, 2, "layers.0.weight", 3e-5), losses=[4.0, 2.0 + 4e-6])
    verdict = compare_trials(evidence(), mesh, FLOAT32)
    assert verdict.equal
    largest = verdict.largest["gradient"]
    assert (largest.name, largest.step) == ("layers.0.weight", 2)
    assert largest.difference == pytest.approx(3e-5, rel=1e-2)
    assert verdict.largest["loss"].difference == pytest.approx(2e-6, rel=1e-6)
    assert verdict.largest["loss"].step == 2


def test_a_gradient_that_is_off_is_named_with_its_step() -> None:
    mesh = evidence()
    mesh = replace(mesh, gradients=moved(mesh.gradients, 2, "layers.1.weight", 0.25))
    first = compare_trials(evidence(), mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name, first.step) == ("gradient", "layers.1.weight", 2)
    assert first.difference == pytest.approx(0.25, rel=1e-5)
    assert first.sentence == "gradient of layers.1.weight, step 2: off by 2.5e-01, 1e-04 allowed"


def test_what_parts_first_is_what_the_computation_makes_first() -> None:
    """Forward, loss, gradients from the last module on, parameters; one step after the other; AdamW at the end."""
    one, all_wrong = evidence(), evidence()
    wrong = [replace(mark, squares=41.0) if mark.name in ("layers.1", "norm") else mark for mark in marks()]
    gradients = moved(all_wrong.gradients, 1, "embed.weight", 1.0)
    gradients = moved(moved(gradients, 1, "layers.1.weight", 1.0), 2, "norm.weight", 1.0)
    parameters = moved(moved(all_wrong.parameters, 1, "norm.weight", 1.0), 1, "layers.0.weight", 1.0)
    adamw = moved([dict(all_wrong.adamw)], 1, "norm.weight", 1.0)[0]
    wants = [
        ("forward", "layers.1", 1), ("loss", "", 1), ("gradient", "layers.1.weight", 1),
        ("parameter", "layers.0.weight", 1), ("loss", "", 2), ("gradient", "norm.weight", 2),
        ("adamw", "norm.weight", 2),
    ]  # fmt: skip
    mesh = replace(all_wrong, marks=wrong, losses=[4.1, 2.1], gradients=gradients, parameters=parameters, adamw=adamw)
    mended = [
        {"marks": one.marks}, {"losses": [4.0, 2.1]}, {"gradients": [one.gradients[0], gradients[1]]},
        {"parameters": one.parameters}, {"losses": one.losses}, {"gradients": one.gradients}, {"adamw": one.adamw},
    ]  # fmt: skip
    for want, repair in zip(wants, mended, strict=True):
        first = compare_trials(one, mesh, FLOAT32).first
        assert first is not None
        assert (first.kind, first.name, first.step) == want
        mesh = replace(mesh, **repair)
    assert compare_trials(one, mesh, FLOAT32).equal


@pytest.mark.parametrize(("sum_", "squares", "off"), [(3.0, 40.4, 0.01), (3.0 + math.sqrt(8.0), 40.0, 0.1)])
def test_marks_compare_squares_and_what_may_cancel(sum_: float, squares: float, off: float) -> None:
    """0.4 of 40; and a sum that is off by a tenth of sqrt(20 * 40), the most that 20 such elements can add up to."""
    mesh = evidence()
    wrong = [replace(mark, sum=sum_, squares=squares) if mark.name == "layers.0" else mark for mark in marks()]
    first = compare_trials(evidence(), replace(mesh, marks=wrong), FLOAT32).first
    assert first is not None
    assert (first.kind, first.name) == ("forward", "layers.0")
    assert first.difference == pytest.approx(off, rel=1e-6)
    assert first.subject == "forward of layers.0"


def test_marks_of_workers_add_up_whether_they_share_or_hold_alike() -> None:
    values = np.arange(20.0).reshape(2, 10)

    def mark(place: tuple[int, int], name: str, part: np.ndarray) -> ModuleSums:
        return ModuleSums(place, name, part.sum(), np.square(part).sum(), part.size)

    single = merge_marks([[mark((1, 10), "layers.10", values), mark((1, 2), "layers.2", values)]])
    shared = [[mark((1, 2), "layers.2", part)] for part in (values[:, :5], values[:, 5:8], values[:, 8:])]
    alike = [[mark((1, 10), "layers.10", row)] for row in values for _ in range(3)]
    mesh = merge_marks([*alike, *shared])
    assert [found.name for found in single] == [found.name for found in mesh] == ["layers.2", "layers.10"]
    one = evidence()
    assert compare_trials(replace(one, marks=single), replace(one, marks=mesh), FLOAT32).equal
    torn = merge_marks([*alike[:-1], *shared])
    first = compare_trials(replace(one, marks=single), replace(one, marks=torn), FLOAT32).first
    assert first is not None
    assert first.sentence == "forward of layers.10, step 1: 50 elements on the mesh for 20"


def test_modules_that_only_one_side_called_part() -> None:
    one = evidence()
    first = compare_trials(one, replace(one, marks=marks()[:-1]), FLOAT32).first
    assert first is not None
    assert first.sentence == "forward of norm, step 1: not called on the mesh"
    first = compare_trials(replace(one, marks=marks()[1:]), one, FLOAT32).first
    assert first is not None
    assert (first.name, first.note, first.difference) == ("embed", "called on the mesh only", math.inf)


def test_tensors_that_are_missing_or_of_another_shape_part() -> None:
    one = evidence()
    less = replace(one, gradients=[without(one.gradients[0], "layers.0.weight"), one.gradients[1]])
    first = compare_trials(one, less, FLOAT32).first
    assert first is not None
    assert first.sentence == "gradient of layers.0.weight, step 1: missing on the mesh"
    first = compare_trials(less, one, FLOAT32).first
    assert first is not None
    assert first.note == "on the mesh only"
    reshaped = [one.parameters[0], {**one.parameters[1], "norm.weight": np.ones((4, 5), np.float32)}]
    first = compare_trials(one, replace(one, parameters=reshaped), FLOAT32).first
    assert first is not None
    assert (first.kind, first.name, first.step) == ("parameter", "norm.weight", 2)
    assert first.note == "of shape [4, 5] on the mesh, [5, 4] in one process"


def test_gradients_of_zero_and_of_rounding_are_measured_against_all_others() -> None:
    """Four tensors of norm 1 have norm 2 together: one of zeros may differ by 1e-4 * 1e-4 * sqrt(3)."""
    one, mesh = evidence(), evidence()
    zeros = np.zeros((5, 4), np.float32)
    allowed = 1e-4 * 1e-4 * math.sqrt(3)
    one.gradients[0]["layers.0.weight"] = zeros
    mesh.gradients[0]["layers.0.weight"] = zeros.copy()
    assert compare_trials(one, mesh, FLOAT32).equal
    mesh.gradients[0]["layers.0.weight"][1, 1] = 0.9 * allowed
    assert compare_trials(one, mesh, FLOAT32).equal
    mesh.gradients[0]["layers.0.weight"][1, 1] = 1.1 * allowed
    first = compare_trials(one, mesh, FLOAT32).first
    assert first is not None
    assert first.name == "layers.0.weight"
    assert first.difference == pytest.approx(1.1e-4, rel=1e-3)


def test_where_everything_is_zero_differences_are_absolute() -> None:
    one, mesh = evidence(), evidence()
    for side, value in ((one, 0.0), (mesh, 5e-5)):
        for name in ORDER:
            side.gradients[0][name] = np.zeros(4, np.float32)
        side.gradients[0]["norm.weight"] = np.array([0, value, 0, 0], np.float32)
    assert compare_trials(one, mesh, FLOAT32).largest["gradient"].difference == pytest.approx(5e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_parts(bad: float) -> None:
    one, mesh = evidence(), evidence()
    mesh = replace(mesh, gradients=moved(mesh.gradients, 1, "norm.weight", bad))
    first = compare_trials(one, mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name, first.difference) == ("gradient", "norm.weight", math.inf)
    assert not compare_trials(mesh, mesh, FLOAT32).equal, "a trial that has no numbers proves nothing"
    first = compare_trials(one, replace(one, losses=[bad, 2.0]), FLOAT32).first
    assert first is not None
    assert first.kind == "loss"


def test_adamw_counts_only_where_gradients_stand_out() -> None:
    one, mesh = evidence(), evidence()
    gradient = np.ones((5, 4), np.float32)
    gradient[2, 1] = 1e-7  # below 1e-6 of the largest
    for side in (one, mesh):
        side.gradients[-1]["layers.0.weight"] = gradient
        side.adamw["layers.0.weight"] = one.adamw["layers.0.weight"].copy()
    mesh.adamw["layers.0.weight"][2, 1] += 0.5
    assert compare_trials(one, mesh, FLOAT32).equal
    mesh.adamw["layers.0.weight"][2, 2] += 0.5
    first = compare_trials(one, mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name) == ("adamw", "layers.0.weight")
    chosen = np.delete(one.adamw["layers.0.weight"].ravel(), 9)  # element [2, 1]
    assert first.difference == pytest.approx(0.5 / np.linalg.norm(chosen), rel=1e-5)


def test_adamw_leaves_out_tensors_whose_gradients_are_rounding() -> None:
    one, mesh = evidence(), evidence()
    for side in (one, mesh):
        side.gradients[-1]["norm.weight"] = np.full((5, 4), 1e-9, np.float32)
    mesh.adamw["norm.weight"] = mesh.adamw["norm.weight"] + 1
    verdict = compare_trials(one, mesh, FLOAT32)
    assert verdict.equal
    assert verdict.largest["adamw"].name != "norm.weight"


def test_parameters_without_a_gradient_are_compared_whole() -> None:
    one, mesh = evidence(), evidence()
    one.adamw["table"] = np.arange(6)
    mesh.adamw["table"] = np.arange(6) + (np.arange(6) == 3)
    first = compare_trials(one, mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name) == ("adamw", "table")
    assert first.difference == pytest.approx(1 / math.sqrt(55), rel=1e-9)


def test_norms_of_large_tensors_lose_nothing() -> None:
    """More elements than are looked at once, with the difference in the last."""
    large = np.full(2**21 + 3, 1e-3, np.float32)
    other = large.copy()
    other[-1] += 1e-3
    one = TrialNumbers([1.0], [], [{"w": large}], [{}], {}, ["w"])
    found = compare_trials(one, replace(one, gradients=[{"w": other}]), FLOAT32).largest["gradient"]
    assert found.difference == pytest.approx(1 / math.sqrt(2**21 + 3), rel=1e-3)
