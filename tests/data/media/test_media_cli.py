"""`headway data` with images and video."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from numbered_clips import make_video
from PIL import Image
from typer.testing import CliRunner

from headway.cli.data import app
from headway.cli.main import main
from headway.cli.media_view import local_sources, print_probe, spread_over
from headway.data.media import MediaOptions, build_media, open_media
from headway.data.media.corpus import open_media_corpus
from headway.data.media.decode import Undecodable, open_image
from headway.data.media.probe import MediaFacts, histogram, media_figure
from headway.errors import DataError, UsageError
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe

runner = CliRunner()


def run(*arguments: object) -> tuple[str, str]:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, DataError | UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.mp4").write_bytes(make_video(24, size=(64 + 16 * number, 48)))
    (folder / "empty.mp4").write_bytes(b"")
    rows = [{"file": f"{n}.mp4", "captions": [f"clip {n}", "more"], "label": n} for n in range(3)]
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_build_show_probe_verify(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "data"
    captions = ("--captions", tmp_path / "captions.jsonl", "--errors", "skip")
    built, log = run("build", out, files, "--kind", "video", *captions, "--threads", 1)
    dataset = open_media(out)
    assert f"version    {dataset.version}\nclips      3 in 1 shard" in built
    assert "frames     72, 00:00:02 of video" in built
    assert "left out   1: damaged 1 (skipped.jsonl says why)" in built
    assert "skipped: empty.mp4: it is empty" in log
    assert "decoding: " in log
    again = json.loads(run("build", out, files, "--kind", "video", *captions, "--threads", 1, "--json")[0])
    assert (again["changed"], again["removed"], again["clips"]) == (False, {"damaged": 1}, 3)

    shown, _ = run("show", out, "--samples", 2, "--sheet", tmp_path / "sheet.png")
    assert "clip 0  0.mp4\n  h264, 64 x 48, 24 frames at 25 fps, 2 keyframes, label 0\n  clip 0\n  more\n" in shown
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 5 * 160
        assert len(sheet.convert("L").getcolors()) > 2
    facts: dict[str, Any] = json.loads(run("show", out, "--json")[0])
    assert [sample["captions"] for sample in facts["samples"]] == [[f"clip {n}", "more"] for n in range(3)]
    assert "verified   4 files, all match the manifest" in run("verify", out)[0]

    for target in (files, out):
        facts = json.loads(run("probe", target, "--json")[0])
        assert (facts["width"], facts["fps"]) == ([64, 80, 96], [25.0] * 3)
        assert facts["duration_s"] == pytest.approx([0.96] * 3)
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        for printed in (run("probe", files, "--plot", tmp_path / "plot.png")[0], run("show", out)[0]):
            unbroken = ("dataset", "next:", "plot:", str(files))
            assert [x for x in printed.splitlines() if len(x) > width and not x.startswith(unbroken)] == []
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.width > 600


def test_mistakes_are_one_sentence(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no text") as caught:
        run("build", tmp_path / "data", files / "0.mp4")
    assert caught.value.hint == "add --kind video"
    with pytest.raises(UsageError, match="--captions is for images and video"):
        run("build", tmp_path / "data", files, "--captions", "c.jsonl")
    with pytest.raises(DataError, match="holds no dataset"):
        run("show", tmp_path / "nothing", "--sheet", "sheet.png")
    with pytest.raises(DataError, match=r"holds no image file"):
        run("probe", files, "--kind", "image")
    captions = tmp_path / "captions.jsonl"
    with pytest.raises(DataError, match=r"1 file of 4 have no caption: empty.mp4"):
        run("build", tmp_path / "data", files, "--kind", "video", "--captions", captions, "--threads", 1)


def test_interrupted_build_says_that_the_same_command_continues(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.cli.data_build.build_media", interrupt)
    command = ["headway", "data", "build", str(tmp_path / "data"), str(files), "--kind", "video"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith("interrupted: the same command continues the build\n")


def test_sources_in_object_stores_are_copied_once(files: Path, tmp_path: Path) -> None:
    (files / "deep").mkdir()
    (files / "2.mp4").rename(files / "deep" / "2.mp4")
    (files / "notes.txt").write_text("no video")
    url = files.as_uri()
    with local_sources([f"{url}/**/*.mp4", "here/*.mp4"], "video", tmp_path / "data") as sources:
        copy = Path(sources[0])
        copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        assert copied == {"0.mp4", "1.mp4", "deep/2.mp4", "empty.mp4"}
        assert (copy / "deep/2.mp4").read_bytes() == (files / "deep/2.mp4").read_bytes()
        assert sources[1] == "here/*.mp4"
    assert not copy.exists()
    with pytest.raises(DataError, match=r"no video file matches file://.*\*.avi"):
        local_sources([f"{url}/*.avi"], "video", tmp_path / "data").__enter__()


def test_shown_clips_are_spread_and_not_all_alike() -> None:
    for clips, most in ((0, 3), (2, 8), (96, 3), (96, 96), (60, 40), (1797, 40)):
        shown = spread_over(clips, most)
        assert len(set(shown)) == len(shown) == min(clips, most)
        assert all(0 <= number < clips for number in shown)
    assert {number % 4 for number in spread_over(96, 8)} == {0, 1, 2, 3}


def test_histogram_counts_every_value_once() -> None:
    assert histogram([1.0, 2.0, 2.0]) == [(1.0, 1.0, 1), (2.0, 2.0, 2)]
    values = [number**1.5 for number in range(40)]
    rows = histogram(values)
    assert sum(count for _, _, count in rows) == 40
    assert len(rows) <= 8
    assert all(low <= min(values) or before == low for (_, before, _), (low, _, _) in pairwise(rows))


def test_one_file_is_probed_and_damaged_ones_are_named(files: Path, tmp_path: Path) -> None:
    facts = json.loads(run("probe", files / "1.mp4", "--json")[0])
    assert (facts["kind"], facts["files"], facts["width"], facts["fps"]) == ("video", 1, [80], [25.0])
    (tmp_path / "bad.png").write_bytes(bytes(100))
    with pytest.raises(DataError, match=r"^cannot read .*bad.png: (?!.*_io)"):
        run("probe", tmp_path / "bad.png")
    Image.effect_noise((40, 40), 50).save(tmp_path / "noise.png")
    whole = (tmp_path / "noise.png").read_bytes()
    scrambled = whole[:100] + bytes(len(whole) - 100)
    for content, reason in ((b"", "it is empty"), (whole[:-400], "it is cut short"), (scrambled, "it is damaged")):
        with pytest.raises(Undecodable, match=f"^{reason}$"):
            open_image(content)
    for name in ("empty.png", "empty.mp4"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match=f"{name}: it is empty$"):
            run("probe", tmp_path / name)
    with pytest.raises(DataError, match="is no video file"):
        run("probe", tmp_path / "captions.jsonl", "--kind", "video")
    with pytest.raises(DataError, match="does not exist"):
        run("probe", tmp_path / "nothing.png")
    with pytest.raises(Undecodable, match=r"^it is damaged, or of an unknown format$"):
        open_image(bytes(100))


def test_probe_goes_by_what_most_files_are(tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "still.gif")
    printed, log = run("probe", tmp_path)
    assert printed.startswith(f"{tmp_path}: 4 images, ")
    assert "left out" not in log, "a GIF is an image too"
    (tmp_path / "a.mp4").write_bytes(make_video(2))
    (tmp_path / "no.png").write_bytes(bytes(9))
    _, log = run("probe", tmp_path)
    assert "left out: 1 video file (--kind video probes them)" in log
    assert "unreadable: no.png: it is damaged, or of an unknown format" in log
    facts = json.loads(run("probe", tmp_path, "--kind", "video", "--json")[0])
    assert (facts["kind"], facts["files"], facts["other_files"]) == ("video", 2, 4)


def test_histograms_of_equal_sizes_count_pixels_from_zero() -> None:
    facts = MediaFacts("digits", "image", [8] * 1797, [8] * 1797, [], [], 1, {})
    sizes, points = media_figure(facts).axes
    assert sizes.get_xlabel() == "pixels"
    assert sizes.get_xlim()[0] == 0
    assert all(bar.get_x() >= 0 for bar in sizes.patches)
    assert sum(bar.get_height() for bar in sizes.patches if bar.get_x() <= 64 <= bar.get_x() + bar.get_width()) == 1797
    assert (points.get_xlim()[0], points.get_ylim()[0]) == (0, 0)
    large = MediaFacts("photos", "image", [640, 1280], [480, 720], [], [], 1, {})
    assert media_figure(large).axes[0].get_xlabel() == "megapixels"


def test_counts_of_histograms_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    print_probe(MediaFacts("digits", "image", [8] * 1797, [8] * 1797, [], [], 1, {}))
    assert "8 x 8  1,797  #" in capsys.readouterr().out


@pytest.fixture
def labelled(tmp_path: Path) -> Callable[..., Path]:
    """Make a dataset of images with such labels and captions."""

    def build(labels: list[int | None], captions: bool = False) -> Path:
        folder = tmp_path / "images"
        folder.mkdir()
        rows = []
        for number, label in enumerate(labels):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:03d}.png")
            row = {"file": f"{number:03d}.png"} | ({} if label is None else {"label": label})
            rows.append(row | ({"caption": f"image {number}"} if captions else {}))
        (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = MediaOptions(kind="image", captions=(str(tmp_path / "labels.jsonl"),))
        build_media(tmp_path / "built", [str(folder)], options)
        return tmp_path / "built"

    return build


def test_a_sheet_is_a_full_page(labelled: Callable[..., Path], tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    built = labelled([0] * 60, captions=True)
    printed = run("show", built, "--sheet", sheet)[0]
    assert printed.count("\nimage ") == 3
    assert "\nimage 0  000.png\n" in printed
    assert "clip" not in printed
    with Image.open(sheet) as picture:
        assert picture.height == 8 * (160 + 16 + 8) + 8
    with pytest.raises(UsageError, match="is not a folder"):
        run("show", built, "--sheet", tmp_path / "no" / "sheet.png")


@pytest.mark.parametrize(
    ("labels", "model", "why"),
    [
        ([0, None, 1, None], {"num_classes": 2}, "2 images of 4 have no label, the first is 001.png"),
        ([0, 5, 1, 0], {"num_classes": 2}, "001.png has label 5; the model has classes 0 to 1"),
        ([0, 1], {"conditioning": "text"}, "no image has a caption"),
        ([0, 1], {"num_classes": 2}, None),
    ],
)
def test_conditions_that_images_lack_are_named_before_a_launch(
    labelled: Callable[..., Path], labels: list[int | None], model: dict[str, Any], why: str | None
) -> None:
    values = {
        "model": {"family": "dit", "in_channels": 3, "patch": 4, "layers": 1, "dim": 16, "heads": 2, **model},
        "data": {"kind": "image", "path": str(labelled(labels)), "holdout": 0.0, "media": {"sizes": "8x8"}},
        "objective": {"kind": "flow"},
        "train": {"batch": 2},
    }
    recipe = parse_recipe(values, {}, "test")
    if why is None:
        assert open_media_corpus(recipe).version
        return
    with pytest.raises(DataError, match=why):
        open_media_corpus(recipe)


def media_recipe(path: Path, kind: str = "image", **media: Any) -> Recipe:
    model = {"family": "dit", "in_channels": 3, "patch": 4, "layers": 1, "dim": 16, "heads": 2, "num_classes": 2}
    data = {"kind": kind, "path": str(path), "holdout": 0.0, "media": {"sizes": "8x8", **media}}
    return parse_recipe({"model": model, "data": data, "objective": {"kind": "flow"}}, {}, "test")


@pytest.mark.parametrize("captions", [True, False])
def test_only_conditions_that_the_data_has_are_suggested(labelled: Callable[..., Path], captions: bool) -> None:
    with pytest.raises(DataError, match="2 images of 2 have no label") as caught:
        open_media_corpus(media_recipe(labelled([None, None], captions)))
    assert ("model.conditioning" in (caught.value.hint or "")) == captions


@pytest.mark.parametrize(("kind", "files"), [("image", "'images/**/*.png'"), ("video", "'clips/**/*.mp4'")])
def test_missing_dataset_is_to_be_built_of_the_kind_of_the_recipe(tmp_path: Path, kind: str, files: str) -> None:
    with pytest.raises(DataError, match="holds no dataset") as caught:
        open_media_corpus(media_recipe(tmp_path / "nope", kind))
    assert caught.value.hint == f"build one: headway data build {tmp_path / 'nope'} {files} --kind {kind}"


@pytest.mark.parametrize("frames", [1, 4])
def test_data_of_another_kind_has_a_hint_that_works(labelled: Callable[..., Path], frames: int) -> None:
    with pytest.raises(DataError, match=r"data.kind is video, but the dataset holds data of kind image") as caught:
        open_media_corpus(media_recipe(labelled([0, 1]), "video", frames=frames))
    kind = "--set data.kind=image, or " * (frames == 1)
    assert caught.value.hint == f"{kind}--set data.path=FOLDER of a dataset of kind video"
