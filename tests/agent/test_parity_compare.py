"""The comparison of hand-made trials whose differences are known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from headway.agent.parity_compare import TOLERANCES, ModuleSums, TrialNumbers, compare_trials, merge_sums

FLOAT32 = TOLERANCES["float32"]
ORDER = ("embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight")
STEPS = 2


def tensors(seed: int) -> dict[str, np.ndarray]:
    """Tensors of norm 1, so that what is added to single is its relative difference."""
    random = np.random.default_rng(seed)
    drawn = {name: random.normal(size=(5, 4)) for name in ORDER}
    return {name: (value / np.linalg.norm(value)).astype(np.float32) for name, value in drawn.items()}


def module_sums() -> list[ModuleSums]:
    names = ("embed", "layers.0", "layers.1", "norm")
    places = ((0, 0), (1, 0), (1, 1), (2, 0))
    return [
        ModuleSums(place, name, sum=3.0, squares=40.0, count=20.0) for place, name in zip(places, names, strict=True)
    ]


def trial() -> TrialNumbers:
    return TrialNumbers(
        losses=[4.0, 2.0],
        module_sums=module_sums(),
        gradients=[tensors(10 + step) for step in range(STEPS)],
        parameters=[tensors(20 + step) for step in range(STEPS)],
        adamw=tensors(30),
        order=ORDER,
    )


def moved(steps: list[dict[str, np.ndarray]], step: int, name: str, by: float) -> list[dict[str, np.ndarray]]:
    """Change single element of single tensor at single step (from 1)."""
    changed = [dict(step_tensors) for step_tensors in steps]
    value = changed[step - 1][name].copy()
    value[2, 1] += by
    changed[step - 1][name] = value
    return changed


def without(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors.items() if key != name}


def test_equal_trials_are_equal() -> None:
    verdict = compare_trials(trial(), trial(), FLOAT32)
    assert verdict.equal
    assert verdict.first is None
    assert set(verdict.largest) == {"forward", "loss", "gradient", "parameter", "adamw"}
    assert all(finding.difference == 0 for finding in verdict.largest.values())


def test_rounding_is_equal_and_its_size_is_reported() -> None:
    mesh = trial()
    mesh = replace(mesh, gradients=moved(mesh.gradients, 2, "layers.0.weight", 3e-5), losses=[4.0, 2.0 + 4e-6])
    verdict = compare_trials(trial(), mesh, FLOAT32)
    assert verdict.equal
    largest = verdict.largest["gradient"]
    assert (largest.name, largest.step) == ("layers.0.weight", 2)
    assert largest.difference == pytest.approx(3e-5, rel=1e-2)
    assert verdict.largest["loss"].difference == pytest.approx(2e-6, rel=1e-6)
    assert verdict.largest["loss"].step == 2


def test_wrong_gradient_is_named_with_its_step() -> None:
    mesh = trial()
    mesh = replace(mesh, gradients=moved(mesh.gradients, 2, "layers.1.weight", 0.25))
    first = compare_trials(trial(), mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name, first.step) == ("gradient", "layers.1.weight", 2)
    assert first.difference == pytest.approx(0.25, rel=1e-5)
    assert first.sentence == "gradient of layers.1.weight, step 2: off by 2.5e-01, 1e-04 allowed"


def test_first_difference_is_the_first_in_the_computation() -> None:
    """Forward, loss, gradients from the last module on, parameters; step by step; AdamW at the end."""
    single, all_wrong = trial(), trial()
    wrong = [replace(m, squares=41.0) if m.name in ("layers.1", "norm") else m for m in module_sums()]
    gradients = moved(all_wrong.gradients, 1, "embed.weight", 1.0)
    gradients = moved(moved(gradients, 1, "layers.1.weight", 1.0), 2, "norm.weight", 1.0)
    parameters = moved(moved(all_wrong.parameters, 1, "norm.weight", 1.0), 1, "layers.0.weight", 1.0)
    adamw = moved([dict(all_wrong.adamw)], 1, "norm.weight", 1.0)[0]
    expected = [
        ("forward", "layers.1", 1), ("loss", "", 1), ("gradient", "layers.1.weight", 1),
        ("parameter", "layers.0.weight", 1), ("loss", "", 2), ("gradient", "norm.weight", 2),
        ("adamw", "norm.weight", 2),
    ]  # fmt: skip
    mesh = replace(
        all_wrong, module_sums=wrong, losses=[4.1, 2.1], gradients=gradients, parameters=parameters, adamw=adamw
    )
    repairs = [
        {"module_sums": single.module_sums}, {"losses": [4.0, 2.1]}, {"gradients": [single.gradients[0], gradients[1]]},
        {"parameters": single.parameters}, {"losses": single.losses}, {"gradients": single.gradients},
        {"adamw": single.adamw},
    ]  # fmt: skip
    for location, repair in zip(expected, repairs, strict=True):
        first = compare_trials(single, mesh, FLOAT32).first
        assert first is not None
        assert (first.kind, first.name, first.step) == location
        mesh = replace(mesh, **repair)
    assert compare_trials(single, mesh, FLOAT32).equal


@pytest.mark.parametrize(("sum_", "squares", "off"), [(3.0, 40.4, 0.01), (3.0 + math.sqrt(8.0), 40.0, 0.1)])
def test_module_sums_compare_squares_and_sums_that_may_cancel(sum_: float, squares: float, off: float) -> None:
    """0.4 of 40; and a sum that is off by a tenth of sqrt(20 * 40), the most that 20 such elements can add up to."""
    mesh = trial()
    wrong = [replace(m, sum=sum_, squares=squares) if m.name == "layers.0" else m for m in module_sums()]
    first = compare_trials(trial(), replace(mesh, module_sums=wrong), FLOAT32).first
    assert first is not None
    assert (first.kind, first.name) == ("forward", "layers.0")
    assert first.difference == pytest.approx(off, rel=1e-6)
    assert first.subject == "forward of layers.0"


def test_module_sums_of_workers_add_up_for_shards_and_copies() -> None:
    values = np.arange(20.0).reshape(2, 10)

    def sums(place: tuple[int, int], name: str, part: np.ndarray) -> ModuleSums:
        return ModuleSums(place, name, part.sum(), np.square(part).sum(), part.size)

    single = merge_sums([[sums((1, 10), "layers.10", values), sums((1, 2), "layers.2", values)]])
    shards = [[sums((1, 2), "layers.2", part)] for part in (values[:, :5], values[:, 5:8], values[:, 8:])]
    copies = [[sums((1, 10), "layers.10", row)] for row in values for _ in range(3)]
    mesh = merge_sums([*copies, *shards])
    assert [module.name for module in single] == [module.name for module in mesh] == ["layers.2", "layers.10"]
    numbers = trial()
    assert compare_trials(replace(numbers, module_sums=single), replace(numbers, module_sums=mesh), FLOAT32).equal
    incomplete = merge_sums([*copies[:-1], *shards])
    first = compare_trials(
        replace(numbers, module_sums=single), replace(numbers, module_sums=incomplete), FLOAT32
    ).first
    assert first is not None
    assert first.sentence == "forward of layers.10, step 1: 50 elements on the mesh for 20"


def test_modules_called_on_one_side_only_differ() -> None:
    single = trial()
    first = compare_trials(single, replace(single, module_sums=module_sums()[:-1]), FLOAT32).first
    assert first is not None
    assert first.sentence == "forward of norm, step 1: not called on the mesh"
    first = compare_trials(replace(single, module_sums=module_sums()[1:]), single, FLOAT32).first
    assert first is not None
    assert (first.name, first.note, first.difference) == ("embed", "called on the mesh only", math.inf)


def test_missing_or_reshaped_tensors_differ() -> None:
    single = trial()
    fewer = replace(single, gradients=[without(single.gradients[0], "layers.0.weight"), single.gradients[1]])
    first = compare_trials(single, fewer, FLOAT32).first
    assert first is not None
    assert first.sentence == "gradient of layers.0.weight, step 1: missing on the mesh"
    first = compare_trials(fewer, single, FLOAT32).first
    assert first is not None
    assert first.note == "on the mesh only"
    reshaped = [single.parameters[0], {**single.parameters[1], "norm.weight": np.ones((4, 5), np.float32)}]
    first = compare_trials(single, replace(single, parameters=reshaped), FLOAT32).first
    assert first is not None
    assert (first.kind, first.name, first.step) == ("parameter", "norm.weight", 2)
    assert first.note == "of shape [4, 5] on the mesh, [5, 4] in one process"


def test_gradients_of_zero_and_rounding_are_compared_with_the_norm_of_all() -> None:
    """Next to three tensors of norm 1, single of zeros may differ by 1e-4 * 1e-4 * sqrt(3)."""
    single, mesh = trial(), trial()
    zeros = np.zeros((5, 4), np.float32)
    allowed = 1e-4 * 1e-4 * math.sqrt(3)
    single.gradients[0]["layers.0.weight"] = zeros
    mesh.gradients[0]["layers.0.weight"] = zeros.copy()
    assert compare_trials(single, mesh, FLOAT32).equal
    mesh.gradients[0]["layers.0.weight"][1, 1] = 0.9 * allowed
    assert compare_trials(single, mesh, FLOAT32).equal
    mesh.gradients[0]["layers.0.weight"][1, 1] = 1.1 * allowed
    first = compare_trials(single, mesh, FLOAT32).first
    assert first is not None
    assert first.name == "layers.0.weight"
    assert first.difference == pytest.approx(1.1e-4, rel=1e-3)


def test_differences_are_absolute_if_everything_is_zero() -> None:
    single, mesh = trial(), trial()
    for side, value in ((single, 0.0), (mesh, 5e-5)):
        for name in ORDER:
            side.gradients[0][name] = np.zeros(4, np.float32)
        side.gradients[0]["norm.weight"] = np.array([0, value, 0, 0], np.float32)
    assert compare_trials(single, mesh, FLOAT32).largest["gradient"].difference == pytest.approx(5e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_differ(bad: float) -> None:
    single, mesh = trial(), trial()
    mesh = replace(mesh, gradients=moved(mesh.gradients, 1, "norm.weight", bad))
    first = compare_trials(single, mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name, first.difference) == ("gradient", "norm.weight", math.inf)
    assert not compare_trials(mesh, mesh, FLOAT32).equal, "a trial with non-finite values proves nothing"
    first = compare_trials(single, replace(single, losses=[bad, 2.0]), FLOAT32).first
    assert first is not None
    assert first.kind == "loss"


def test_adamw_is_compared_only_where_gradients_exceed_the_noise() -> None:
    single, mesh = trial(), trial()
    gradient = np.ones((5, 4), np.float32)
    gradient[2, 1] = 1e-7  # below 1e-6 of the largest
    for side in (single, mesh):
        side.gradients[-1]["layers.0.weight"] = gradient
        side.adamw["layers.0.weight"] = single.adamw["layers.0.weight"].copy()
    mesh.adamw["layers.0.weight"][2, 1] += 0.5
    assert compare_trials(single, mesh, FLOAT32).equal
    mesh.adamw["layers.0.weight"][2, 2] += 0.5
    first = compare_trials(single, mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name) == ("adamw", "layers.0.weight")
    compared = np.delete(single.adamw["layers.0.weight"].ravel(), 9)  # element [2, 1]
    assert first.difference == pytest.approx(0.5 / np.linalg.norm(compared), rel=1e-5)


def test_adamw_excludes_tensors_whose_gradients_are_rounding() -> None:
    single, mesh = trial(), trial()
    for side in (single, mesh):
        side.gradients[-1]["norm.weight"] = np.full((5, 4), 1e-9, np.float32)
    mesh.adamw["norm.weight"] = mesh.adamw["norm.weight"] + 1
    verdict = compare_trials(single, mesh, FLOAT32)
    assert verdict.equal
    assert verdict.largest["adamw"].name != "norm.weight"


def test_parameters_without_a_gradient_are_compared_in_full() -> None:
    single, mesh = trial(), trial()
    single.adamw["table"] = np.arange(6)
    mesh.adamw["table"] = np.arange(6) + (np.arange(6) == 3)
    first = compare_trials(single, mesh, FLOAT32).first
    assert first is not None
    assert (first.kind, first.name) == ("adamw", "table")
    assert first.difference == pytest.approx(1 / math.sqrt(55), rel=1e-9)


def test_large_tensors_are_compared_to_the_last_element() -> None:
    """More elements than are converted at once, with the difference in the last."""
    large = np.full(2**21 + 3, 1e-3, np.float32)
    other = large.copy()
    other[-1] += 1e-3
    single = TrialNumbers([1.0], [], [{"w": large}], [{}], {}, ["w"])
    largest = compare_trials(single, replace(single, gradients=[{"w": other}]), FLOAT32).largest["gradient"]
    assert largest.difference == pytest.approx(1 / math.sqrt(2**21 + 3), rel=1e-3)
