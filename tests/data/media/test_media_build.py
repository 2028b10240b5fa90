"""Building datasets of images and video: content, versions, resuming, what is left out and what is refused."""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered_clips import make_video
from PIL import Image

from headway.data import read_manifest
from headway.data.media import (
    MediaFilters,
    MediaOptions,
    MediaResult,
    build_media,
    in_processes,
    is_media,
    open_media,
    open_reader,
)
from headway.data.media.examiner import Examined, examine_here
from headway.data.media.manifest import Kind
from headway.data.media.sources import MediaSource
from headway.errors import DamagedData, DataError, WrongDataVersion
from headway.recipe import Data


def png(seed: int, size: tuple[int, int] = (12, 9)) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for number in range(6):
        path = folder / f"set-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return folder


def rows(path: Path, *values: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def build(out: Path, *sources: Path | str, **options: Any) -> MediaResult:
    force = options.pop("force", False)
    examine = options.pop("examine", examine_here)
    return build_media(out, sources, MediaOptions("image", **options), force=force, examine=examine)


def digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in ("sources.json", ".verified.json")
    }


def test_shards_hold_the_original_bytes(images: Path, tmp_path: Path) -> None:
    captions = rows(
        tmp_path / "captions.jsonl",
        *({"file": f"set-{n % 2}/{n}.png", "captions": [f"picture {n}", "noise"], "label": n} for n in range(6)),
    )
    built = build(tmp_path / "data", images / "**/*.png", captions=(str(captions),), shard_bytes=600)
    dataset = open_media(built.path, verify="full")
    assert (dataset.clips, len(dataset.records) > 1) == (6, True)
    names = []
    for number in range(6):
        clip = dataset.clip(number)
        content = dataset.content(clip).tobytes()
        assert content == (images / clip.name).read_bytes()
        assert clip.sha256 == hashlib.sha256(content).hexdigest()
        shown = int(Path(clip.name).stem)
        assert (clip.width, clip.height, clip.codec, clip.label) == (12, 9, "png", shown)
        assert clip.captions == (f"picture {shown}", "noise")
        names.append(clip.name)
    assert names == sorted(names)
    assert dataset.labels().tolist() == [int(Path(name).stem) for name in names]


def test_index_of_video_says_what_is_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "vfr.mp4").write_bytes(make_video(20, times=[40 * n + n * n for n in range(20)]))
    (tmp_path / "cfr.mp4").write_bytes(make_video(30))
    dataset = open_media(build_media(tmp_path / "data", [tmp_path / "*.mp4"], MediaOptions("video")).path)
    cfr, vfr = dataset.clip(0), dataset.clip(1)
    assert (cfr.frames, cfr.fps, cfr.duration_s, cfr.keyframes.tolist()) == (30, 25, 1.2, [0, 12, 24])
    assert np.diff(vfr.times).tolist() == sorted(np.diff(vfr.times).tolist())
    assert len(set(np.diff(vfr.times).tolist())) > 5
    content = dataset.content(cfr).tobytes()
    for offset in cfr.offsets.tolist():  # where a packet begins: the length of a NAL unit
        assert int.from_bytes(content[offset : offset + 4]) < len(content)
    index = dataset.index
    assert index.keyframes_of(0).tolist() == cfr.keyframes.tolist()
    assert index.keyframes_of(1).tolist() == vfr.keyframes.tolist()
    assert index.frames.tolist() == [30, 20]


@pytest.mark.slow
def test_same_bytes_from_any_folder_order_and_number_of_processes(images: Path, tmp_path: Path) -> None:
    first = build(tmp_path / "a", images / "**/*.png", shard_bytes=900)
    moved = images.rename(tmp_path / "elsewhere")
    second = build(tmp_path / "b", moved, shard_bytes=900, examine=in_processes(2))

    def backwards(kind: Kind, sources: Sequence[MediaSource]) -> Iterator[Examined]:
        return examine_here(kind, list(reversed(sources)))

    third = build(tmp_path / "c", moved, shard_bytes=900, examine=backwards)
    assert first.manifest == second.manifest == third.manifest
    assert digest(tmp_path / "a") == digest(tmp_path / "b") == digest(tmp_path / "c")


def test_interrupted_build_decodes_nothing_twice(images: Path, tmp_path: Path) -> None:
    decoded: list[str] = []

    def stops(after: int) -> Any:
        def examine(kind: Kind, sources: Sequence[MediaSource]) -> Iterator[Examined]:
            for source in sources:
                if len(decoded) == after:
                    raise KeyboardInterrupt
                decoded.append(source.name)
                yield from examine_here(kind, [source])

        return examine

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "data", images, examine=stops(4))
    assert not (tmp_path / "data").exists()
    build(tmp_path / "data", images, examine=stops(99))
    assert len(decoded) == len(set(decoded)) == 6
    assert digest(tmp_path / "data") == digest(build(tmp_path / "whole", images).path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_complete_shard_is_not_written_again(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.data.media import build as build_module

    write, written = build_module.write_shard, []

    def fails_at(number: int) -> Any:
        def once(folder: Path, shard: int, *rest: Any) -> Any:
            if shard == number:
                raise KeyboardInterrupt
            written.append(shard)
            return write(folder, shard, *rest)

        return once

    monkeypatch.setattr(build_module, "write_shard", fails_at(2))
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "data", images, shard_bytes=400)
    monkeypatch.setattr(build_module, "write_shard", fails_at(-1))
    build(tmp_path / "data", images, shard_bytes=400)
    assert written[:2] == [0, 1]
    assert written.count(0) == written.count(1) == 1
    monkeypatch.undo()
    assert digest(tmp_path / "data") == digest(build(tmp_path / "whole", images, shard_bytes=400).path)


def test_building_again_changes_nothing_and_other_data_is_kept(images: Path, tmp_path: Path) -> None:
    first = build(tmp_path / "data", images)
    assert first.changed
    assert not build(tmp_path / "data", images).changed
    (images / "new.png").write_bytes(png(77))
    with pytest.raises(DataError, match=r"holds version .*, this build makes"):
        build(tmp_path / "data", images)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "there is nothing to continue"
    assert open_media(tmp_path / "data").version == first.manifest.version
    assert build(tmp_path / "data", images, force=True).manifest.clips == 7


def test_another_version_is_refused_before_files_are_decoded_or_written(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "data", images)

    def never(*_arguments: Any) -> Any:
        pytest.fail("it is known before")

    (tmp_path / "only.gif").write_bytes(b"")
    with pytest.raises(DataError, match="this build makes another one"):
        build_media(tmp_path / "data", [tmp_path / "only.gif"], MediaOptions("video"), examine=never)
    captions = rows(tmp_path / "c.jsonl", *({"file": f"set-{n % 2}/{n}.png", "label": n} for n in range(6)))
    with pytest.raises(DataError, match="this build makes another one"):
        build(tmp_path / "data", images, captions=(str(captions),), examine=never)
    (images / "set-0" / "0.png").rename(images / "moved.png")
    with pytest.raises(DataError, match="this build makes another one"):
        build(tmp_path / "data", images, examine=never)
    (images / "moved.png").rename(images / "set-0" / "0.png")
    (images / "new.png").write_bytes(png(77))  # it might be damaged, so it is decoded
    monkeypatch.setattr("headway.data.media.build.write_shard", never)
    with pytest.raises(DataError, match="this build makes another one"):
        build(tmp_path / "data", images)


@pytest.mark.parametrize("part", ["clips", "index", "texts"])
def test_a_damaged_dataset_is_built_again(images: Path, tmp_path: Path, part: str) -> None:
    folder = build(tmp_path / "data", images).path
    before = digest(folder)
    shard = folder / f"{part}-00000.{'jsonl' if part == 'texts' else 'bin'}"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert build(tmp_path / "data", images).changed
    assert digest(folder) == before


def test_damaged_and_equal_files_are_left_out_with_reasons(images: Path, tmp_path: Path) -> None:
    (images / "cut.png").write_bytes(png(9, (80, 80))[:-2000])
    (images / "empty.png").write_bytes(b"")
    (images / "zz-copy.png").write_bytes(png(0))
    built = build(tmp_path / "data", images)
    assert {name: by for name, (by, _) in built.skipped.items()} == {
        "cut.png": "damaged",
        "empty.png": "damaged",
        "zz-copy.png": "same bytes",
    }
    assert built.skipped["empty.png"][1] == "it is empty"
    assert built.skipped["zz-copy.png"][1] == "it has the same bytes as set-0/0.png"
    listed = [json.loads(line) for line in (tmp_path / "data" / "skipped.jsonl").read_text().splitlines()]
    assert {row["file"] for row in listed} == set(built.skipped)
    (tmp_path / "only.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"none of 1 file can be used: it is empty$"):
        build(tmp_path / "other", tmp_path / "only.png")
    (tmp_path / "only2.png").write_bytes(b"")
    (tmp_path / "only3.png").write_bytes(bytes(100))
    reasons = r"it is empty \(2 files\), it is damaged, or of an unknown format \(1 file\)$"
    with pytest.raises(DataError, match=f"none of 3 files can be used: {reasons}"):
        build(tmp_path / "other", tmp_path / "only*.png")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "there is nothing to continue"


def test_links_that_lead_outside_are_refused(images: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(50))
    (images / "link.png").symlink_to(tmp_path / "secret.png")
    skipped: list[str] = []
    built = build_media(tmp_path / "data", [images], MediaOptions("image"), on_skip=skipped.append)
    assert built.manifest.clips == 6
    assert skipped == [f"{images / 'link.png'}: a link leads outside of {images}"]
    for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        listing = rows(images / "list.jsonl", {"file": "set-0/0.png"}, {"file": name})
        with pytest.raises(DataError, match=r"list.jsonl:2: .* is not below"):
            build(tmp_path / "other", listing)


def test_manifests_name_files(images: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"file": ["set-1/1.png", "set-0/4.png"], "caption": ["one", "four"], "label": [1, 4], "source": ["s", "s"]}
    parquet.write_table(arrow.table(table), images / "list.parquet")
    listing = rows(images / "list.jsonl", *({key: table[key][n] for key in table} for n in range(2)))
    one, other = (build(tmp_path / path.name, path) for path in (images / "list.parquet", listing))
    assert one.manifest == other.manifest
    dataset = open_media(one.path)
    assert [dataset.clip(n).captions for n in range(2)] == [("four",), ("one",)]
    assert one.manifest.sources == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"file": "none.png", "caption": "x"}, "captions.jsonl:7 is about none.png, which is not among the 6 files"),
        ({"caption": "x"}, "captions.jsonl:7 names no file"),
        ({"file": "set-0/0.png", "caption": ""}, "captions.jsonl:7 has a caption that is empty or no text"),
        ({"file": "set-0/0.png", "captions": ["a", 3]}, "captions.jsonl:7 has a caption that is empty or no text"),
        ({"file": "set-0/0.png", "label": -1}, "captions.jsonl:7 has the label -1"),
        ({"file": "set-0/0.png", "label": 2.5}, "captions.jsonl:7 has the label 2.5"),
        ({"file": "set-0/0.png", "label": 9}, "captions.jsonl:7: set-0/0.png has label 9, not 0 as in .*:1"),
        ({"file": "set-0/0.png", "label": 1 << 63}, "captions.jsonl:7 has the label 9223372036854775808"),
        ({"file": "set-0/0.png", "text": "x"}, "captions.jsonl:7 has an unknown key 'text'"),
    ],
)
def test_bad_rows_are_named(images: Path, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = ({"file": f"set-{n % 2}/{n}.png", "caption": "x", "label": n} for n in range(6))
    captions = rows(tmp_path / "captions.jsonl", *good, row)
    with pytest.raises(DataError, match=message) as caught:
        build(tmp_path / "data", images, captions=(str(captions),))
    assert caught.value.message.startswith(f"{captions}:7"), "the path as it was given"
    assert caught.value.hint
    assert "label" not in row or "4,611,686,018,427,387,903" in caught.value.hint or row["label"] == 9


def test_captions_without_rows_or_of_another_format_are_refused(images: Path, tmp_path: Path) -> None:
    captions = tmp_path / "c.jsonl"
    for content in ("", "\n\n"):
        captions.write_text(content)
        with pytest.raises(DataError, match="has no rows"):
            build(tmp_path / "data", images, captions=(str(captions),))
    table = tmp_path / "c.csv"
    table.write_text("file,caption\na.png,x\n")
    with pytest.raises(DataError, match=f"^{table}:1 is not JSON$") as caught:
        build(tmp_path / "data", images, captions=(str(table),))
    assert "JSONL or Parquet" in str(caught.value.hint)


def test_files_of_the_other_kind_in_a_folder_are_counted(images: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(images / "moving.gif")
    skipped: list[str] = []
    built = build_media(tmp_path / "data", [images], MediaOptions("video"), on_skip=skipped.append)
    assert built.manifest.clips == 1
    assert skipped == [f"6 image files of {images}: not of kind video"]


def test_missing_captions_are_an_error_or_leave_files_out(images: Path, tmp_path: Path) -> None:
    captions = str(rows(tmp_path / "c.jsonl", *({"file": f"set-0/{n}.png", "caption": "even"} for n in (0, 2, 4))))
    with pytest.raises(DataError, match=r"3 files of 6 have no caption: set-1/1.png, set-1/3.png, set-1/5.png"):
        build(tmp_path / "data", images, captions=(captions,))
    built = build(tmp_path / "data", images, captions=(captions,), strict=False)
    assert built.manifest.clips == 3
    assert {by for by, _ in built.skipped.values()} == {"caption"}


def test_damage_after_the_build_is_noticed(images: Path, tmp_path: Path) -> None:
    folder = build(tmp_path / "data", images).path
    shard = folder / "clips-00000.bin"
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedData, match="should have sha256"):
        open_media(folder)
    (folder / "index-00000.bin").unlink()
    with pytest.raises(DamagedData, match="cannot be read"):
        open_media(folder, verify="sizes")


def test_text_and_media_are_not_taken_for_each_other(images: Path, tmp_path: Path) -> None:
    folder = build(tmp_path / "data", images).path
    assert is_media(folder)
    assert not is_media(images)
    with pytest.raises(DataError, match="holds data of kind image, not text"):
        read_manifest(folder)
    (folder / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(DataError, match="holds text, not images or video"):
        open_media(folder)


def test_recipe_opens_data_of_its_version_only(images: Path, tmp_path: Path) -> None:
    built = build(tmp_path / "data", images)
    data = Data(path=str(built.path), kind="image", version=built.manifest.version[:10], media={"sizes": "8x8"})
    batch = open_reader(data, seed=1, batch=3).read([0, 1, 2])
    assert batch.pixels.shape == (3, 1, 8, 8, 3)
    assert (batch.captions, batch.labels, batch.numbers.tolist()) == ([""] * 3, None, [0, 1, 2])
    with pytest.raises(WrongDataVersion):
        open_reader(data.model_copy(update={"version": "0" * 12}), seed=1, batch=3)


def test_filters_count_what_they_leave_out(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = Image.new("RGB", (12, 9), (90, 90, 90))
    flat.save(images / "flat.png")
    (tmp_path / "own_scorer.py").write_text("def score(path):\n    return 0.0 if path.endswith('5.png') else 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    filters = MediaFilters(min_sharpness=10, scorer="own_scorer:score", min_score=0.5)
    built = build(tmp_path / "data", images, filters=filters)
    assert {name: by for name, (by, _) in built.skipped.items()} == {"flat.png": "blur", "set-1/5.png": "scorer"}
    assert built.skipped["flat.png"][1] == "its sharpness is 0, below 10"
    (tmp_path / "bad_scorer.py").write_text("def score(path):\n    raise ValueError('no')\n")
    with pytest.raises(DataError, match=r"bad_scorer:score failed on .*: ValueError: no"):
        build(tmp_path / "other", images, filters=MediaFilters(scorer="bad_scorer:score"))
