"""The loss is one mean over the global batch: no split into microbatches or workers changes the gradient.

After one step without clipping AdamW's first moment is (1 - beta1) times the gradient, so that a checkpoint holds
every gradient of a real run, sharded or not.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from headway.data import BuildOptions, Loader, ReadOptions, WindowReader, build_dataset, open_dataset, split_dataset
from headway.models import empty_decoder, init_weights
from headway.state import find_checkpoint
from headway.state.tensors import read_tensors

FEW = [(1, 1, False), (1, 3, True), (2, None, False), (2, 3, True), (3, 1, True)]
MORE = [(4, None, False)]
"""Workers, microbatch, and whether labels are masked."""
SLOW = [*MORE, *((*most, not masked) for *most, masked in FEW + MORE)]
SPLITS = [*FEW, *(pytest.param(*split, marks=pytest.mark.slow) for split in SLOW)]


def gradients(run) -> dict[str, torch.Tensor]:
    moments = read_tensors(find_checkpoint(run.checkpoints, 1), "optimizer/")
    return {name: value / 0.1 for name, value in moments.items() if name.endswith("/exp_avg")}


@pytest.fixture(scope="module")
def masked_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents with prompts of uneven length, so that every row has another number of trained tokens."""
    folder = tmp_path_factory.mktemp("masked")
    lines = [f'{{"question": "{"why " * (i % 9)}?", "text": "{"because " * (1 + i % 5)}{i}."}}' for i in range(400)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    options = BuildOptions(vocab_size=300, reading=ReadOptions(prompt_field="question"))
    build_dataset(folder / "d", [folder / "a.jsonl"], options)
    return folder / "d"


def reference(recipe, data: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Plain PyTorch: one process, all rows at once, torch's own cross-entropy."""
    dataset = open_dataset(data)
    reader = WindowReader(dataset, recipe.data.seq, mask_boundaries=recipe.data.mask_boundaries, documents=True)
    split = split_dataset(dataset, recipe.data.seq, recipe.data.holdout)
    batch = Loader(reader, split, recipe.seed, recipe.train.batch, rows=(0, recipe.train.batch)).read(0)
    model = empty_decoder(recipe.model.model_copy(update={"vocab_size": 320}))
    init_weights(model, recipe.seed)
    logits = torch.cat([alone(model, *row) for row in zip(batch.inputs, batch.documents, strict=True)])
    labels = torch.from_numpy(np.ascontiguousarray(batch.labels)).flatten()
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def alone(model: torch.nn.Module, inputs: np.ndarray, documents: np.ndarray) -> torch.Tensor:
    """Logits of a row's tokens, each document in a pass of its own."""
    parts = [torch.from_numpy(inputs[documents == number]) for number in range(documents.max() + 1)]
    return torch.cat([model(part.unsqueeze(0))[0] for part in parts])


@pytest.mark.parametrize(("workers", "microbatch", "masked"), SPLITS)
def test_every_split_gives_the_gradient_of_plain_pytorch(
    lab, recipe, masked_dataset, workers: int, microbatch: int | None, masked: bool
) -> None:
    settings = {"train.steps": 1, "train.batch": 12, "train.clip": 0, "train.microbatch": microbatch}
    settings |= {"train.warmup_steps": 0}
    if masked:
        settings |= {"data.path": str(masked_dataset), "data.mask_boundaries": True}
    wanted = recipe(settings)
    result = lab.train(wanted, workers=workers)
    assert result.outcome.state == "finished", result.outcome
    loss, truth = reference(wanted, Path(wanted.data.path))
    assert result.events("step")[0]["loss"] == pytest.approx(loss, rel=1e-5)
    moments = gradients(result.run)
    assert len(moments) == len(truth)
    for name, gradient in truth.items():
        difference = (moments[f"{name}/exp_avg"] - gradient).norm() / gradient.norm()
        assert difference < 1e-5, name
    if masked:
        assert result.events("step")[0]["trained"] < result.events("step")[0]["tokens"] == 12 * 32
