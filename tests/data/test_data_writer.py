import fcntl
import hashlib
import os
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.writer import ShardWriter, dtype_for, install_folder, new_folder
from headway.errors import DataError
from thinned import examples

END = 9
documents = st.lists(
    st.tuples(st.lists(st.integers(0, 8), max_size=5), st.lists(st.lists(st.integers(0, 8), max_size=7), max_size=4)),
    min_size=1,
    max_size=12,
)


def pack(written, shard_tokens):
    """Shards as lists of documents, by the rule: never split one, never overfill with a second."""
    shards = [[]]
    for ids in written:
        if shards[-1] and sum(map(len, shards[-1])) + len(ids) > shard_tokens:
            shards.append([])
        shards[-1].append(ids)
    return shards


@settings(deadline=None, max_examples=examples(30))
@given(written=documents, shard_tokens=st.integers(1, 30), dtype=st.sampled_from(["uint16", "uint32"]))
def test_shards_hold_the_documents(tmp_path_factory, written, shard_tokens, dtype):
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, dtype=dtype, end_of_text=END, shard_tokens=shard_tokens)
    for prompt, texts in written:
        if prompt:
            writer.add(np.array(prompt, np.uint32), prompt=True)
        for text in texts:
            writer.add(np.array(text, np.uint32))
        writer.end_document()
    files = writer.close()

    whole = [prompt + list(chain(*texts)) + [END] for prompt, texts in written]
    prompts = iter([len(prompt) for prompt, _ in written])
    shards = pack(whole, shard_tokens)
    assert len(files) == 2 * len(shards)
    for shard, tokens, table in zip(shards, files[::2], files[1::2], strict=True):
        flat = list(chain(*shard))
        assert np.fromfile(folder / tokens.name, f"<u{2 if dtype == 'uint16' else 4}").tolist() == flat
        ends = np.cumsum([len(ids) for ids in shard]).tolist()
        want = [[end, next(prompts)] for end in ends]
        assert np.fromfile(folder / table.name, "<u8").reshape(-1, 2).tolist() == want
        assert (tokens.tokens, tokens.documents) == (table.tokens, table.documents) == (len(flat), len(shard))
    for file in files:
        content = (folder / file.name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert writer.tokens == sum(map(len, whole))
    assert writer.prompt_tokens == sum(len(prompt) for prompt, _ in written)


@pytest.mark.parametrize(("size", "want"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_ids_are_as_small_as_the_vocabulary_allows(size, want):
    assert dtype_for(size) == want
    assert np.array([size - 1]).astype(want).tolist() == [size - 1]


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"

    def fail():
        with new_folder(out) as folder:
            (folder / "half").write_text("x")
            assert not out.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(out.parent.iterdir()) == []
    for content in ("one", "two"):
        with new_folder(out) as folder:
            (folder / "file").write_text(content)
            install_folder(folder, out)
        assert [path.name for path in out.parent.iterdir()] == ["out"]
        assert (out / "file").read_text() == content


def test_a_failed_rename_leaves_the_old_folder(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("old")
    monkeypatch.setattr("headway.data.writer.make_durable", lambda path: None)
    with pytest.raises(FileNotFoundError):
        install_folder(tmp_path / ".out.new", out)
    assert (out / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_a_killed_build_are_removed_but_not_of_a_live_one(tmp_path):
    dead, living = tmp_path / ".out.1-aa.building", tmp_path / ".out.2-bb.building"
    other = tmp_path / ".other.1-aa.building"
    for folder in (dead, living, other):
        folder.mkdir()
        (folder / "tokens-00000.bin").write_text("x")
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with new_folder(tmp_path / "out"):
        pass
    os.close(lock)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, other.name])


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write in"), new_folder(tmp_path / "file" / "out"):
        pass
