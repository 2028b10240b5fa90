"""Diffusion objectives against float64 formulas of the papers; noise, times and feeds for any split of a batch."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from headway.data.media import MediaOptions, build_media
from headway.data.media.corpus import open_media_corpus
from headway.errors import RecipeError
from headway.models.diffusion import open_text_encoder
from headway.models.noise import HELD_OUT, TRAINING, draw
from headway.models.noising import alphas_cumprod, noise_path, shifted
from headway.models.pixels import first_frame, to_pixels, to_samples
from headway.parallel import World
from headway.parallel.objective import IMAGE, LABEL, TIME, DeviceBatch, SumScale, loss_of
from headway.recipe import Recipe
from headway.recipe.diffusion import Ddpm, Flow
from headway.recipe.load import parse_recipe
from headway.recipe.sample_tokens import with_sample_tokens
from headway.train.diffusion_feed import DiffusionFeed, mixed
from headway.train.objectives.diffusion import BIN, WEIGHT, DenoisingLoss

SHAPE = (2, 1, 3, 4)
OBJECTIVES = {
    "flow": Flow(kind="flow"),
    "flow-shifted": Flow(kind="flow", times="uniform", shift=3.0, bins=1),
    "epsilon": Ddpm(kind="ddpm"),
    "epsilon-snr": Ddpm(kind="ddpm", min_snr=5.0, betas="cosine"),
    "v": Ddpm(kind="ddpm", predict="v", betas="scaled-linear"),
    "v-snr": Ddpm(kind="ddpm", predict="v", min_snr=5.0),
}


def by_the_papers(name: str, t: float, data: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The noised sample, what is to be predicted, and the weight of its loss, in float64."""
    if name.startswith("flow"):
        return (1 - t) * data + t * noise, noise - data, 1.0
    k = round(t * 1000)
    if name == "epsilon-snr":  # Nichol and Dhariwal, with their bound on beta
        f = [math.cos((i / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(1001)]
        betas = [min(1 - f[i + 1] / f[i], 0.999) for i in range(1000)]
    elif name == "v":  # latent diffusion
        betas = [(0.00085**0.5 + i / 999 * (0.012**0.5 - 0.00085**0.5)) ** 2 for i in range(1000)]
    else:  # Ho et al.
        betas = [1e-4 + i / 999 * (0.02 - 1e-4) for i in range(1000)]
    alpha_bar = math.prod(1 - beta for beta in betas[: k + 1])
    alpha, sigma = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
    snr = alpha_bar / (1 - alpha_bar)
    weight = 1.0
    if name.endswith("snr"):  # Hang et al.
        weight = min(snr, 5.0) / (snr + 1 if name.startswith("v") else snr)
    target = alpha * noise - sigma * data if name.startswith("v") else noise
    return alpha * data + sigma * noise, target, weight


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_those_of_the_papers(name: str) -> None:
    """Inputs, targets, values and gradients, for two splits into microbatches."""
    recipe, rng = OBJECTIVES[name], np.random.default_rng(3)
    objective, path = DenoisingLoss(recipe), noise_path(recipe, tokens=64)
    drawn = draw(5, TRAINING, range(9), SHAPE)
    times = path.times(drawn.uniform_N)
    data = torch.from_numpy(rng.uniform(-1, 1, (9, *SHAPE)).astype(np.float32))
    noise = torch.from_numpy(drawn.noise)
    inputs, targets = mixed(path.scales(times), data, noise), mixed(path.target(times), data, noise)
    columns = objective.sample_columns(times, path.weights(times))
    predicted = torch.from_numpy(rng.normal(size=(9, *SHAPE)).astype(np.float32)).requires_grad_()

    counts = objective.counts(SimpleNamespace(columns=columns))
    scale = SumScale(tuple(1 / (count or 1) for count in counts), 1.0)
    batch = DeviceBatch(inputs, targets, None, {key: torch.from_numpy(column) for key, column in columns.items()})
    values = sum(
        scale.of(objective.measure(predicted[low:high], batch.rows(low, high))) for low, high in ((0, 4), (4, 9))
    )
    (gradient,) = torch.autograd.grad(loss_of(values, objective.terms), predicted)

    losses, gradients, by_bin = [], [], [[] for _ in range(recipe.bins)]
    for row, t in enumerate(times.tolist()):
        noised, target, weight = by_the_papers(name, t, data[row].double().numpy(), drawn.noise[row].astype(np.float64))
        np.testing.assert_allclose(inputs[row].numpy(), noised, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(targets[row].numpy(), target, rtol=1e-5, atol=1e-6)
        error = predicted[row].detach().double().numpy() - target
        losses.append(weight * (error**2).mean())
        gradients.append(weight * 2 * error / error.size / 9)
        by_bin[min(int(t * recipe.bins), recipe.bins - 1)].append((error**2).mean())
    values = values.detach()
    assert float(values[0]) == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(gradient.numpy(), np.stack(gradients), rtol=1e-4, atol=1e-7)
    if recipe.bins > 1:
        assert objective.names[1] == "loss/0.00-0.25"
        for value, count, of_bin in zip(values[1:].tolist(), counts[1:], by_bin, strict=True):
            assert count == len(of_bin)
            assert value == pytest.approx(np.mean(of_bin) if of_bin else 0.0, rel=1e-5)
    else:
        assert objective.names == ("loss",)


def test_times_are_logit_normal_and_shifted() -> None:
    """Their distribution, by quantiles: logit t is normal, and the shift moves the median."""
    uniform = (np.arange(1000) + 0.5) / 1000
    times = noise_path(Flow(kind="flow", mean=0.4, std=1.3), 64).times(uniform)
    logits = np.log(times / (1 - times))
    assert logits.mean() == pytest.approx(0.4, abs=1e-3)
    assert logits.std() == pytest.approx(1.3, rel=0.01)
    moved = noise_path(Flow(kind="flow", times="uniform", shift=2.0, shift_tokens=16), 64).times(uniform)
    assert np.median(moved) == pytest.approx(4 / 5, abs=1e-3)  # shift 2 sqrt(64 / 16) of 1/2: 4 t / (1 + 3 t)
    assert shifted(np.array([0.0, 1.0]), 7.0).tolist() == [0.0, 1.0]


def test_ddpm_times_are_uniform_over_the_schedule() -> None:
    path = noise_path(Ddpm(kind="ddpm", steps=10), 64)
    times = path.times((np.arange(1000) + 0.5) / 1000)
    assert np.bincount(np.rint(times * 10).astype(int)).tolist() == [100] * 10
    assert times.max() < 1
    assert (np.diff(alphas_cumprod("cosine", 10)) < 0).all()


def test_draws_depend_on_seed_purpose_and_number_alone() -> None:
    whole = draw(1, TRAINING, range(6), SHAPE)
    parts = [draw(1, TRAINING, numbers, SHAPE) for numbers in ([3, 4], [5], [0, 1, 2])]
    for field in range(3):
        joined = np.concatenate([parts[2][field], parts[0][field], parts[1][field]])
        np.testing.assert_array_equal(whole[field], joined)
    for other in (draw(2, TRAINING, range(6), SHAPE), draw(1, HELD_OUT, range(6), SHAPE)):
        assert not np.isin(other.noise, whole.noise).any()
    smaller = draw(1, TRAINING, range(6), (2, 2))
    np.testing.assert_array_equal(smaller.uniform_N, whole.uniform_N)
    np.testing.assert_array_equal(smaller.drop_N, whole.drop_N)


def test_draws_are_uniform_and_normal() -> None:
    many = draw(0, TRAINING, range(4000), (8,))
    for uniform in (many.uniform_N, many.drop_N):
        gap = np.abs(np.sort(uniform) - (np.arange(4000) + 0.5) / 4000).max()
        assert gap < 1.63 / math.sqrt(4000)  # Kolmogorov and Smirnov, at 1 %
    assert abs(many.noise.mean()) < 4 / math.sqrt(32_000)
    assert many.noise.std() == pytest.approx(1, abs=0.02)
    assert abs(np.corrcoef(many.noise[:-1, 0], many.noise[1:, 0])[0, 1]) < 0.06


def test_pixels_survive_a_round_trip() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16, 1).expand(-1, -1, -1, -1, 3)
    assert torch.equal(to_pixels(to_samples(pixels, 3)), pixels)
    assert torch.equal(to_pixels(to_samples(pixels, 1)), pixels)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Forty images of 4 x 4 random pixels, of three classes."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (folder / "files").mkdir()
    rows = []
    for number in range(40):
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / "files" / f"{number:02d}.png")
        rows.append(f'{{"file": "{number:02d}.png", "caption": "number {number}", "label": {number % 3}}}')
    (folder / "captions.jsonl").write_text("\n".join(rows) + "\n")
    options = MediaOptions(kind="image", captions=(str(folder / "captions.jsonl"),))
    build_media(folder / "data", [str(folder / "files" / "*.png")], options)
    return folder / "data"


def recipe_of(images: Path, **changes) -> Recipe:
    """A small diffusion recipe, with sections changed."""
    sections = {
        "model": {"family": "dit", "in_channels": 3, "patch": 2, "layers": 1, "dim": 16, "heads": 2, "num_classes": 3},
        "data": {"kind": "image", "path": str(images), "media": {"sizes": "4x4"}, "holdout": 0.2},
        "objective": {"kind": "flow", "drop_condition": 0.3},
        "train": {"steps": 8, "batch": 8, "warmup_steps": 1},
    }
    values = {name: {**sections.get(name, {}), **changes.get(name, {})} for name in {**sections, **changes}}
    values["objective"] = changes.get("objective", sections["objective"])
    return parse_recipe(values, {}, "test")


def feed_of(recipe: Recipe, rank: int = 0, ranks: int = 1) -> DiffusionFeed:
    """The feed of one of several workers."""
    data = SimpleNamespace(rank=rank, size=ranks)
    world = SimpleNamespace(data=data, device=torch.device("cpu"))
    recipe = with_sample_tokens(recipe)
    texts = recipe.model.conditioning == "text"
    encode = open_text_encoder(recipe.model).encode if texts else None
    return DiffusionFeed(recipe, open_media_corpus(recipe), world, DenoisingLoss(recipe.objective), encode)


def rows_of(batch: DeviceBatch) -> list[torch.Tensor]:
    return [batch.inputs, batch.labels, *(batch.columns[key] for key in sorted(batch.columns))]


def test_workers_share_the_samples_that_one_would_see(images: Path) -> None:
    """Also after resuming anywhere, whatever was read ahead."""
    recipe = recipe_of(images)
    single, pair = feed_of(recipe), [feed_of(recipe, rank, 2) for rank in range(2)]
    cursor = 0
    for step in (1, 2, 3):
        fed = single.take(step, cursor, 8, "")
        shares = [feed.take(step, cursor, 8, "") for feed in pair]
        assert fed.cursor == shares[0].cursor == cursor + 8
        assert fed.tokens == shares[0].tokens == 8 * 4
        assert [sum(counts) for counts in zip(*(share.counts for share in shares), strict=True)] == list(fed.counts)
        for whole, *parts in zip(rows_of(fed.rows), *(rows_of(share.rows) for share in shares), strict=True):
            assert torch.equal(whole, torch.cat(parts))
        cursor = fed.cursor
    resumed = feed_of(recipe).take(3, 16, 8, "")
    for whole, again in zip(rows_of(fed.rows), rows_of(resumed.rows), strict=True):
        assert torch.equal(whole, again)
    for feed in (single, *pair):
        feed.close()


def test_conditions_are_dropped_in_the_stated_share(images: Path) -> None:
    feed = feed_of(recipe_of(images, objective={"kind": "flow", "drop_condition": 0.3}, train={"batch": 800}))
    labels = feed.take(1, 0, 800, "").rows.columns[LABEL]
    assert int((labels == 3).sum()) == pytest.approx(240, abs=4 * math.sqrt(800 * 0.3 * 0.7))
    assert set(labels.tolist()) == {0, 1, 2, 3}
    feed.close()


WAN = {
    "family": "wan", "conditioning": "text", "patch": [1, 2, 2], "layers": 1, "dim": 24, "heads": 2, "text_tokens": 16,
    "num_classes": None,
}  # fmt: skip


def test_image_to_video_models_are_given_the_first_frame_without_noise(images: Path) -> None:
    recipe = recipe_of(images, model={**WAN, "image_channels": 5})
    feed = feed_of(recipe)
    batch = feed.take(1, 0, 8, "").rows
    beside, t = batch.columns[IMAGE], batch.columns[TIME].view(-1, 1, 1, 1, 1)
    assert (beside[:, :2] == 1).all()  # its mask
    torch.testing.assert_close(beside[:, 2:], batch.inputs - t * batch.labels, rtol=0, atol=1e-5)
    assert len(batch.rows(0, 3).columns[IMAGE]) == 3
    feed.close()
    video = torch.arange(2 * 3 * 4 * 2 * 2, dtype=torch.float32).view(2, 3, 4, 2, 2)
    beside = first_frame(video, 5)
    assert beside.shape == (2, 5, 4, 2, 2)
    assert (beside[:, :2, 0] == 1).all()
    assert torch.equal(beside[:, 2:, 0], video[:, :, 0])
    assert not beside[:, :, 1:].any()


@pytest.mark.parametrize(
    ("model", "why"),
    [({"image_channels": 3}, "its mask at least one"), ({"image_channels": 4, "image_dim": 8}, "no image encoder")],
)
def test_image_to_video_models_that_pixels_cannot_train_are_refused(images: Path, model, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        with_sample_tokens(recipe_of(images, model={**WAN, **model}))


def test_held_out_samples_are_the_same_for_every_seed_and_split(images: Path) -> None:
    """Padding does not count."""
    spread = SimpleNamespace(evaluation_rows=lambda most: min(3, most))

    def totals(seed: int, ranks: int) -> tuple[list[float], set[tuple[float, ...]]]:
        counts, seen = np.zeros(5), set()
        for rank in range(ranks):
            feed = feed_of(recipe_of(images).model_copy(update={"seed": seed}), rank, ranks)
            data = SimpleNamespace(rank=rank, size=ranks)
            world: World = SimpleNamespace(data=data, device=torch.device("cpu"))
            for of_rows, batch in feed.held_out_rows(spread, world, np.arange(8)):
                counts += of_rows
                kept = batch.columns[BIN] < 4
                assert int(kept.sum()) == of_rows[0]
                assert (batch.columns[WEIGHT][~kept] == 0).all()
                times, inputs = batch.columns[TIME][kept], batch.inputs[kept]
                seen |= {(float(t), float(x.sum())) for t, x in zip(times, inputs, strict=True)}
                assert (batch.columns[LABEL][kept] < 3).all()
            feed.close()
        return counts.tolist(), seen

    counts, seen = totals(seed=1, ranks=1)
    assert counts[0] == len(seen) == 8
    assert min(counts[1:]) >= 1  # times are spread evenly
    assert totals(seed=2, ranks=1) == totals(seed=1, ranks=3) == (counts, seen)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objective": {"kind": "pretrain"}}, "needs a diffusion objective"),
        ({"model": {"family": "llama", "num_classes": None}}, "no key|does not apply|needs a diffusion model"),
        ({"data": {"kind": "text", "media": None}}, "needs images or video"),
        ({"eval": {"samples": {"sampler": "ddim"}}}, "flow has euler and heun"),
        ({"eval": {"samples": {"prompts": ["a"]}}}, "no effect with model.conditioning = class"),
        ({"parallel": {"pipeline": 2}}, "no pipeline axis"),
    ],
)
def test_settings_that_do_not_fit_diffusion_are_refused(images: Path, changes, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe_of(images, **changes)


def test_sizes_that_patches_do_not_divide_are_refused(images: Path) -> None:
    with pytest.raises(RecipeError, match=r"not divisible into patches of 1 x 3 x 3.*height 4"):
        with_sample_tokens(recipe_of(images, model={"patch": 3}))
    with pytest.raises(RecipeError, match="in_channels is 4, but pixels have 3"):
        with_sample_tokens(recipe_of(images, model={"in_channels": 4}))
