"""The Frechet distance against SciPy's matrix root and closed forms."""

import numpy as np
import pytest

from headway.errors import DataError, ModelError
from headway.inference.frechet import Moments, frechet_distance, moments

RNG = np.random.default_rng(4)


def test_it_is_the_formula_with_a_matrix_root() -> None:
    from scipy.linalg import sqrtm

    first, second = RNG.normal(size=(80, 6)), RNG.normal(size=(50, 6)) @ RNG.normal(size=(6, 6)) + 1
    (m1, c1), (m2, c2) = ((x.mean(axis=0), np.cov(x, rowvar=False)) for x in (first, second))
    truth = ((m1 - m2) ** 2).sum() + np.trace(c1 + c2 - 2 * sqrtm(c1 @ c2).real)
    assert frechet_distance(moments(first), moments(second)) == pytest.approx(truth, rel=1e-9)
    assert frechet_distance(moments(second), moments(first)) == pytest.approx(truth, rel=1e-9)


def test_closed_forms() -> None:
    """Equal sets, moved sets, scaled sets; also with fewer samples than features."""
    features = RNG.normal(size=(40, 3))
    few = RNG.normal(size=(4, 9))
    for x in (features, few):
        assert frechet_distance(moments(x), moments(x)) == pytest.approx(0, abs=1e-6)
        assert frechet_distance(moments(x), moments(x + 2)) == pytest.approx(4 * x.shape[1], abs=1e-6)
    one, four = Moments(np.zeros(3), np.eye(3)), Moments(np.zeros(3), 4 * np.eye(3))
    assert frechet_distance(one, four) == pytest.approx(3)  # (2 - 1)^2 per dimension


def test_sets_that_do_not_compare_are_refused() -> None:
    with pytest.raises(DataError, match="needs two samples, got 1 sample"):
        moments(RNG.normal(size=(1, 3)))
    with pytest.raises(DataError, match="3 and 4 numbers"):
        frechet_distance(moments(RNG.normal(size=(5, 3))), moments(RNG.normal(size=(5, 4))))


@pytest.mark.slow
def test_features_are_those_of_transformers(tmp_path) -> None:
    """Of a random CLIP vision folder; the distance of moved images is larger than that of two halves of a set."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from headway.inference.image_features import FeatureNetwork, distance_of_images

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    theirs = CLIPVisionModel(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = FeatureNetwork(tmp_path)
    images = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours.encoder(images), theirs(images).pooler_output, rtol=1e-4, atol=1e-5)
    pixels = torch.randint(0, 256, (60, 8, 8, 3), dtype=torch.uint8)
    halves = distance_of_images(ours, pixels[:30], pixels[30:])
    assert distance_of_images(ours, pixels[:30], pixels[30:] // 2) > halves
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no image encoder"):
        FeatureNetwork(tmp_path)
