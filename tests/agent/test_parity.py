"""The parity check: equal meshes, differences that are named, trials that fail, and what is left behind."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from conftest import send, when
from eventually import CEILING_S
from headway.agent.parity import ParityReport, TrialTensors, check_parity, describe, read_trial
from headway.agent.workers.zygote import ZygoteClient
from headway.data import Loader, WindowReader, open_dataset, split_dataset
from headway.errors import RecipeError, UsageError, WorkerError
from headway.models import empty_decoder, init_weights
from headway.recipe import Parallel, Recipe

Check = Callable[..., ParityReport]
DESCENT = {"train.lr": 0.1, "model.vocab_size": 320, "model.tie_embeddings": False}


@pytest.fixture
def run_check(zygote: ZygoteClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check with the tests' own zygote, in a temporary folder that must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    def run(recipe: Recipe, *meshes: Parallel, steps: int = 2, **options: object) -> ParityReport:
        try:
            return check_parity(recipe, meshes, tmp_path / "runs", steps=steps, warm=zygote, **options)  # type: ignore[arg-type]
        finally:
            assert list(folder.iterdir()) == []

    return run


def mesh(**axes: object) -> Parallel:
    return Parallel.model_validate({"shard": 1, **axes})


def mutate(monkeypatch: pytest.MonkeyPatch, *mutations: str) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", json.dumps({"mutations": mutations}))


def test_meshes_equal_one_process(run_check: Check, recipe: Callable[..., Recipe]) -> None:
    messages = list[str]()
    meshes = (mesh(shard=2), mesh(tensor=2), mesh(pipeline=2))
    checked = run_check(recipe(), *meshes, report=messages.append)
    assert [result.mesh for result in checked.meshes] == ["shard 2", "tensor 2", "pipeline 2"]
    for result in checked.meshes:
        assert result.error is None
        assert result.verdict is not None
        assert result.equal, result.verdict.first
        assert set(result.verdict.largest) == {"forward", "loss", "gradient", "parameter", "adamw"}
        assert 0 < result.verdict.largest["gradient"].difference < 1e-4
    assert checked.equal
    assert (checked.steps, checked.dtype, checked.device) == (2, "float32", "cpu")
    assert [line.partition(":")[0] for line in messages] == ["one process", "shard 2", "tensor 2", "pipeline 2"]
    assert checked.meshes[2].microbatch is not None, "a pipeline has microbatches"


class Reference:
    """Gradient descent in a few lines of PyTorch, on a recipe's own windows."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.squares = recipe, dict[str, float]()
        self.model = empty_decoder(recipe.model)
        init_weights(self.model, recipe.seed)
        dataset, seq = open_dataset(Path(recipe.data.path)), recipe.data.seq
        split = split_dataset(dataset, seq, recipe.data.holdout)
        self.loader = Loader(WindowReader(dataset, seq), split, recipe.seed, 8, rows=(0, 8))
        for name in ("embed", "layers.0", "layers.1", "norm"):
            self.model.get_submodule(name).register_forward_hook(partial(self.record, name))

    def record(self, name: str, _module: nn.Module, _inputs: object, out: torch.Tensor) -> None:
        self.squares[name] = float(out.detach().double().square().sum())

    def gradients(self, step: int) -> tuple[float, dict[str, np.ndarray]]:
        batch = self.loader.read((step - 1) * 8)
        inputs, labels = (torch.from_numpy(np.array(ids, dtype=np.int64)) for ids in (batch.inputs, batch.labels))
        self.model.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        return float(loss.detach()), {name: p.grad.clone().numpy() for name, p in self.model.named_parameters()}

    def descend(self) -> dict[str, np.ndarray]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= self.recipe.train.lr * parameter.grad
        return {name: p.detach().clone().numpy() for name, p in self.model.named_parameters()}


@pytest.fixture(scope="module")
def trials(recipe: Callable[..., Recipe], zygote: ZygoteClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept trials of a check: one process, and two shards."""
    folder = tmp_path_factory.mktemp("kept") / "kept"
    check_parity(recipe(DESCENT), [mesh(shard=2)], folder.parent / "runs", steps=2, keep=folder, warm=zygote)
    return folder


@pytest.mark.parametrize("trial", ["single", "mesh-1"])
def test_trial_is_gradient_descent_on_the_data_of_the_run(
    recipe: Callable[..., Recipe], trials: Path, trial: str
) -> None:
    """A plain PyTorch loop, from the same weights on the same windows, computes the same numbers."""
    numbers = read_trial(trials / trial / "trial")
    reference = Reference(recipe(DESCENT))
    assert list(numbers.order) == [name for name, _ in reference.model.named_parameters()]
    for step in (1, 2):
        loss, gradients = reference.gradients(step)
        if step == 1:
            assert [module.name for module in numbers.module_sums] == ["embed", "layers.0", "layers.1", "norm"]
            assert {module.name: module.squares for module in numbers.module_sums} == pytest.approx(
                reference.squares, rel=1e-5
            )
        parameters = reference.descend()
        assert numbers.losses[step - 1] == pytest.approx(loss, rel=1e-6)
        assert set(numbers.gradients[step - 1]) == set(gradients)
        for name in gradients:
            assert_near(numbers.gradients[step - 1][name], gradients[name], 1e-5)
            assert_near(numbers.parameters[step - 1][name], parameters[name], 1e-6)
    for name, before in parameters.items():
        # AdamW's first update: the gradient over its own size; matrices decay
        decayed = before * (1 - 0.1 * 0.1) if before.ndim >= 2 else before
        after = decayed - 0.1 * gradients[name] / (np.abs(gradients[name]) + 1e-8)
        significant = np.abs(gradients[name]) > 1e-4 * np.abs(gradients[name]).max()
        assert_near(numbers.adamw[name][significant], after[significant], 1e-4)


def assert_near(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.slow
def test_four_workers_with_masked_labels_and_ties(run_check: Check, recipe: Callable[..., Recipe]) -> None:
    wanted = recipe({"data.mask_boundaries": True, "train.recompute": "full", "model.qkv_bias": True})
    checked = run_check(wanted, mesh(shard=2, pipeline=2, stages=(1, 1)))
    assert checked.equal, checked.meshes[0]
    assert checked.meshes[0].mesh == "shard 2 x pipeline 2, stages 1:1"


@pytest.mark.slow
def test_bfloat16_has_its_own_tolerances(run_check: Check, recipe: Callable[..., Recipe]) -> None:
    checked = run_check(recipe({"train.dtype": "bfloat16"}), mesh(shard=2), steps=1)
    (result,) = checked.meshes
    assert result.equal, result.verdict
    assert result.verdict is not None
    assert result.verdict.largest["gradient"].difference > 1e-4, "it is not float32 that was compared"
    assert checked.tolerances.of("loss") == 2e-3


# -- injected mistakes


@pytest.mark.parametrize(
    "mutation",
    ["no-gradient-reduction", pytest.param("whole-norm", marks=pytest.mark.slow)],  # which test_check_verb.py has too
)
def test_norm_without_gradient_reduction_is_named(
    run_check: Check, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    mutate(monkeypatch, mutation)
    (result,) = run_check(recipe(), mesh(tensor=2), steps=1).meshes
    assert not result.equal
    assert result.verdict is not None
    first = result.verdict.first
    assert first is not None
    assert (first.kind, first.step) == ("gradient", 1)
    assert first.name.endswith("norm.weight")
    assert first.difference > 0.1


def test_replicas_without_gradient_reduction_are_named(
    run_check: Check, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, "no-gradient-reduction")
    (result,) = run_check(recipe({"model.tie_embeddings": False}), mesh(replicate=2), steps=1).meshes
    assert result.verdict is not None
    first = result.verdict.first
    assert first is not None
    assert (first.kind, first.name, first.step) == ("gradient", "head.weight", 1), "the first that backward reaches"
    assert first.difference > 0.1


def test_pipeline_that_divides_its_loss_twice_is_detected(
    run_check: Check, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, "pipeline-loss-scale")
    (result,) = run_check(recipe({"train.microbatch": 2}), mesh(pipeline=2), steps=1).meshes
    assert result.verdict is not None
    first = result.verdict.first
    assert first is not None
    assert first.kind in ("loss", "gradient")
    assert first.step == 1
    assert first.difference == pytest.approx(0.75, rel=1e-3), "a quarter of it, with four microbatches"
    assert result.verdict.largest["forward"].difference < 1e-5, "the outputs of the stages are right"


# -- failures and stops


def test_mesh_that_cannot_run_is_refused_before_any_process_starts(
    run_check: Check, recipe: Callable[..., Recipe]
) -> None:
    messages = list[str]()
    with pytest.raises(UsageError, match=r"replicate 3: .*batch is 8 sequences"):
        run_check(recipe(), mesh(shard=2), mesh(replicate=3), report=messages.append)
    with pytest.raises(UsageError, match=r"tensor 4: .*heads"):
        run_check(recipe(), mesh(tensor=4), report=messages.append)
    with pytest.raises(RecipeError, match="vocab_size is 17"):
        run_check(recipe({"model.vocab_size": 17}), mesh(shard=2), report=messages.append)
    assert messages == []


def test_failed_trial_is_reported_and_the_others_continue(
    run_check: Check, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", json.dumps({"faults": [{"action": "raise", "step": 1, "rank": 1}]}))
    failed, single = run_check(recipe(), mesh(shard=2), mesh(), steps=1).meshes
    assert failed.error == "worker 1 failed: RuntimeError: injected at start of step 1"
    assert failed.hint == "--keep DIR keeps the trials and their logs"
    assert failed.verdict is None
    assert not failed.equal
    assert single.mesh == "one worker"
    assert single.equal, "there is no worker 1 that could fail"


def test_stop_ends_the_check_and_leaves_nothing_behind(
    run_check: Check, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Worker 1 never gets through step 2: a second stop ends it where it is."""
    hang = {"action": "hang", "point": "start", "step": 2, "rank": 1}
    monkeypatch.setenv("HEADWAY_FAULTS", json.dumps({"faults": [hang]}))
    when(
        lambda: any(tmp_path.glob("temporary/*/*/faults/*.json")), send(signal.SIGINT), send(signal.SIGTERM),
        patience_s=CEILING_S,
    )  # fmt: skip
    with pytest.raises(WorkerError, match="stopped on request after 0 of 1 meshes") as stopped:
        run_check(recipe(), mesh(shard=2), steps=2)
    assert stopped.value.exit_status == 1


def test_stop_between_trials_ends_the_check(run_check: Check, recipe: Callable[..., Recipe]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(WorkerError, match="stopped on request"):
        run_check(recipe(), mesh(shard=2), report=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is handler


def test_kept_trials_stay_and_are_never_overwritten(
    run_check: Check, recipe: Callable[..., Recipe], trials: Path
) -> None:
    assert (trials / "mesh-1" / "logs" / "0001-rank-1.log").exists()
    gradients = TrialTensors(trials / "mesh-1" / "trial" / "gradients" / "step-00000001", "gradient/")
    assert len(gradients) == len(list(gradients)) == 21
    with pytest.raises(KeyError):
        gradients["nothing"]
    before = sorted(trials.rglob("*"))
    with pytest.raises(UsageError, match="not an empty folder"):
        run_check(recipe(), mesh(shard=2), steps=1, keep=trials)
    assert sorted(trials.rglob("*")) == before


def test_describe_meshes() -> None:
    assert describe(mesh(shard=2, tensor=2), 4) == "shard 2 x tensor 2"
    assert describe(Parallel(tensor=2), 6) == "shard 3 x tensor 2"
    assert describe(mesh(pipeline=2, schedule="zero-bubble"), 2) == "pipeline 2, zero-bubble"
    assert describe(mesh(pipeline=2, schedule="interleaved", chunks=3), 2) == "pipeline 2, interleaved, 3 chunks"
    assert describe(mesh(pipeline=2, stages=(1, 4)), 2) == "pipeline 2, stages 1:4"
    assert describe(mesh(shard=2, keep_weights=True), 2) == "shard 2, weights kept"
    assert describe(mesh(), 1) == "one worker"


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        mesh(replicate=2, shard=2, tensor=2),
        mesh(shard=2, tensor=2, pipeline=2),
        mesh(replicate=2, tensor=2, pipeline=2, schedule="interleaved"),
        mesh(shard=4, pipeline=2, schedule="zero-bubble"),
    ],
    ids=lambda parallel: describe(parallel, 8),
)
def test_eight_workers_equal_one_process(run_check: Check, recipe: Callable[..., Recipe], wanted: Parallel) -> None:
    small = recipe({"model.layers": 4, "model.heads": 4, "model.kv_heads": 2, "train.batch": 16})
    checked = run_check(small, wanted)
    assert checked.equal, checked.meshes[0]
