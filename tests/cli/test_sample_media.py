"""`headway sample` with a diffusion model: what is refused before a process starts, and its help."""

from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from headway.cli import sample_media
from headway.cli.sample import sample
from headway.data.media.pictures import check_suffix, write_samples
from headway.errors import UsageError
from headway.recipe import Recipe

DIGITS = Recipe.model_validate(
    {
        "model": {"family": "dit", "in_channels": 1, "layers": 1, "dim": 16, "heads": 2, "num_classes": 10},
        "data": {"kind": "image", "path": "data", "media": {"sizes": "8x8"}},
        "objective": {"kind": "flow"},
    }
)


@pytest.mark.parametrize("label", [-1, 10])
def test_class_that_does_not_exist_is_refused_in_one_sentence(label: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("headway.cli.sample.model_of", lambda *_: ({"run": str(tmp_path)}, "digits@1"))
    monkeypatch.setattr(sample_media, "read_recipe", lambda _: DIGITS)
    app = typer.Typer()
    app.command()(sample)
    out = str(tmp_path / "x.png")
    result = CliRunner().invoke(app, ["digits", "--label", str(label), "--out", out])
    assert isinstance(result.exception, UsageError), result.output
    assert result.exception.message == f"there is no class {label}"
    assert result.exception.hint == "--label takes 0 to 9"


def test_suffixes_may_be_in_any_case(tmp_path: Path) -> None:
    check_suffix(Path("x.Mp4"), video=True)
    with pytest.raises(UsageError, match="makes images, not video"):
        check_suffix(Path("x.MP4"), video=False)
    file = tmp_path / "x.PNG"
    write_samples(file, np.zeros((1, 1, 8, 8, 3), dtype=np.uint8))
    with Image.open(file) as picture:
        assert picture.format == "PNG"
    frames = np.zeros((1, 4, 8, 8, 3), dtype=np.uint8)
    write_samples(tmp_path / "x.MP4", frames)
    assert (tmp_path / "x.MP4").read_bytes()[4:8] == b"ftyp"


def test_help_mentions_media() -> None:
    app = typer.Typer()
    app.command()(sample)
    shown = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output.split())
    assert "caption of an image or video" in shown
    assert "the same seed gives the same text or samples" in shown
