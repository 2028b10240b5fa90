import json
import os
import shutil

import numpy as np
import pytest

from headway.data import (
    BuildOptions,
    ShardWriter,
    build_dataset,
    check_version,
    finish_dataset,
    open_dataset,
    read_manifest,
    train_tokenizer,
    verify,
)
from headway.errors import DataError

DOCUMENTS = [[1, 2, 3], [4], list(range(5, 40)), [7] * 20, [8, 9]]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    writer = ShardWriter(folder, dtype="uint16", end_of_text=0, shard_tokens=40)
    for number, ids in enumerate(DOCUMENTS):
        if number == 3:
            writer.add(np.array(ids[:5]), prompt=True)
            writer.add(np.array(ids[5:]))
        else:
            writer.add(np.array(ids))
        writer.end_document()
    finish_dataset(folder, writer, vocab_size=300, tokenizer=train_tokenizer(["text"], 300).to_bytes())
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def flip(path, restore=False):
    """Change one bit; with `restore`, so that nothing but the content tells."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    if restore:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_tokens_and_documents_are_what_was_written(folder):
    dataset = open_dataset(folder)
    assert len(dataset.tokens) == len(dataset.documents) == len(dataset.shard_tokens) == 3
    assert np.concatenate(dataset.tokens).tolist() == [token for ids in DOCUMENTS for token in [*ids, 0]]
    for number, ids in enumerate(DOCUMENTS):
        document = dataset.document(number)
        assert document.ids.tolist() == [*ids, 0]
        assert document.prompt == (5 if number == 3 else 0)
    for number in (-1, 5):
        with pytest.raises(DataError, match="no document"):
            dataset.document(number)
    assert dataset.tokenizer().end_of_text == 0


def test_shards_cannot_be_written(folder):
    with pytest.raises(ValueError, match="read-only"):
        open_dataset(folder).tokens[0][0] = 1


FILES = ["tokens-00000.bin", "tokens-00001.bin", "documents-00001.bin", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_and_named(folder, name):
    open_dataset(folder)
    flip(folder / name)
    with pytest.raises(DataError, match=rf"{name} should have sha256 [0-9a-f]{{64}} and has [0-9a-f]{{64}}") as error:
        open_dataset(folder)
    assert error.value.hint
    open_dataset(folder, verify="sizes")


@pytest.mark.parametrize("name", FILES)
def test_verify_hashes_even_what_looks_unchanged(folder, name):
    open_dataset(folder)
    flip(folder / name, restore=True)
    open_dataset(folder)  # the stamp is believed
    with pytest.raises(DataError, match=name):
        verify(folder)


def test_sizes_are_always_checked(folder):
    path = folder / "tokens-00001.bin"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    with pytest.raises(DataError, match=f"tokens-00001.bin should have {size} bytes and has {size - 2}"):
        open_dataset(folder, verify="sizes")
    path.unlink()
    with pytest.raises(DataError, match=r"tokens-00001\.bin cannot be read"):
        open_dataset(folder)


def count_hashes(monkeypatch):
    hashed = []
    real = __import__("hashlib").file_digest
    monkeypatch.setattr("hashlib.file_digest", lambda file, name: hashed.append(file.name) or real(file, name))
    return hashed


def test_a_copy_is_hashed_once_and_a_fresh_build_not_at_all(folder, tmp_path, monkeypatch):
    hashed = count_hashes(monkeypatch)
    open_dataset(folder)  # a copy: other inodes
    assert len(hashed) == 7
    open_dataset(folder)
    assert len(hashed) == 7
    verify(folder)
    assert len(hashed) == 14
    os.utime(folder / "tokens-00000.bin")
    open_dataset(folder)
    assert len(hashed) == 15
    (tmp_path / "t.txt").write_text("some text " * 50)
    build_dataset(tmp_path / "built", [tmp_path / "t.txt"], BuildOptions(vocab_size=300))
    open_dataset(tmp_path / "built")
    assert len(hashed) == 15


@pytest.mark.parametrize("content", [None, "", "[]", '{"version": "x"}', '{"version": 1, "files": 3}'])
def test_a_stamp_that_is_missing_broken_or_unwritable_only_costs_time(folder, monkeypatch, content):
    stamp = folder / ".verified.json"
    stamp.unlink()
    if content is None:
        stamp.mkdir()  # cannot be replaced by a file
    else:
        stamp.write_text(content)
    hashed = count_hashes(monkeypatch)
    open_dataset(folder)
    assert len(hashed) == 7
    assert not list(folder.glob(".verified.json.*"))


def test_a_stamp_of_another_version_is_not_believed(folder, monkeypatch):
    open_dataset(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["vocab_size"] = 301
    (folder / "manifest.json").write_text(json.dumps(manifest))
    hashed = count_hashes(monkeypatch)
    open_dataset(folder)
    assert len(hashed) == 7


def test_the_version_does_not_depend_on_how_the_manifest_is_spelt(folder):
    path = folder / "manifest.json"
    before = open_dataset(folder).version
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert open_dataset(folder).version == before


def test_check_version(folder):
    dataset = open_dataset(folder)
    check_version(dataset, None)
    check_version(dataset, dataset.version)
    check_version(dataset, dataset.version[:8])
    with pytest.raises(DataError, match=f"recipe wants data version 0123456789, folder holds {dataset.version}"):
        check_version(dataset, "0123456789")
    with pytest.raises(DataError, match="too short"):
        check_version(dataset, dataset.version[:4])


def test_folders_without_a_dataset(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match=r"manifest.json is missing") as error:
            open_dataset(path)
        assert "headway data build" in error.value.hint


def change(folder, **values):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "values",
    [
        {"files": []},
        {"files": 3},
        {"dtype": "float32"},
        {"dtype": "uint32"},
        {"tokens": 5},
        {"extra": 1},
        {"tokenizer": None},
    ],
)
def test_a_manifest_that_contradicts_itself(folder, values):
    change(folder, **values)
    with pytest.raises(DataError, match=r"manifest.json is damaged"):
        read_manifest(folder)


def test_a_manifest_that_names_files_elsewhere(folder):
    files = json.loads((folder / "manifest.json").read_text())["files"]
    files[0]["name"] = "../secret"
    change(folder, files=files)
    with pytest.raises(DataError, match="shard 0"):
        open_dataset(folder)


def test_a_manifest_of_another_format_or_none(folder):
    change(folder, format=4)
    with pytest.raises(DataError, match="format 4; this version of Headway reads 1 to 3"):
        open_dataset(folder)
    change(folder, format=3, kind="video")
    with pytest.raises(DataError, match="holds data of kind video, not text"):
        open_dataset(folder)
    for content in ("[]", "{", ""):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=r"manifest.json (is damaged|has format None)"):
            open_dataset(folder)


def test_missing_dataset_suggests_those_beside_it(tmp_path):
    (tmp_path / "python-stdlib").mkdir()
    (tmp_path / "python-stdlib" / "manifest.json").write_text("{}")
    with pytest.raises(DataError) as error:
        open_dataset(tmp_path / "python-stdlb")
    assert error.value.hint == f"did you mean {tmp_path / 'python-stdlib'}?"
    with pytest.raises(DataError, match="holds no dataset") as error:
        open_dataset(tmp_path / "elsewhere")
    assert error.value.hint.startswith("build one: headway data build ")
