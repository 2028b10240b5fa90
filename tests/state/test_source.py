import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.errors import DamagedState, StateError
from headway.state import FolderCheckpoint


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "manifest.json").write_bytes(b"{}")
    (tmp_path / "rank-00000.safetensors").write_bytes(bytes(range(256)) * 40)
    return tmp_path


def read(source, begin, size, file="rank-00000.safetensors"):
    out = bytearray(size)
    source.read(file, begin, memoryview(out))
    return bytes(out)


def test_any_range_is_read(folder):
    source = FolderCheckpoint(folder)
    content = (folder / "rank-00000.safetensors").read_bytes()
    assert (source.location, source.checked) == (str(folder), True)
    assert source.manifest() == b"{}"
    assert source.size("rank-00000.safetensors") == 10240
    assert source.name("rank-00000.safetensors") == f"{folder}/rank-00000.safetensors"
    for begin, size in ((0, 10240), (0, 0), (10240, 0), (10239, 1), (255, 3), (4000, 200)):
        assert read(source, begin, size) == content[begin : begin + size]


def test_short_reads_go_on(folder, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
    assert read(FolderCheckpoint(folder), 100, 1000) == (bytes(range(256)) * 40)[100:1100]


def test_a_file_that_ends_early_is_damaged(folder):
    with pytest.raises(DamagedState, match=r"rank-00000\.safetensors is damaged: it ends at byte 10240"):
        read(FolderCheckpoint(folder), 10000, 241)
    with pytest.raises(DamagedState, match="it ends at byte 99999"):
        read(FolderCheckpoint(folder), 99999, 1)


def test_missing_files_are_named(folder):
    source = FolderCheckpoint(folder)
    for ask in (lambda: source.size("rank-00001.safetensors"), lambda: read(source, 0, 1, "rank-00001.safetensors")):
        with pytest.raises(DamagedState, match=r"rank-00001\.safetensors cannot be read: No such file") as refused:
            ask()
        assert refused.value.hint
    with pytest.raises(StateError, match=r"manifest\.json cannot be read: No such file") as missing:
        FolderCheckpoint(folder / "nowhere").manifest()
    assert not isinstance(missing.value, DamagedState)  # there is no checkpoint, so none is damaged


def test_a_disk_that_cannot_read_is_damage(folder, monkeypatch):
    def broken(*_):
        raise OSError(5, os.strerror(5))

    source = FolderCheckpoint(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(DamagedState, match=r"rank-00000\.safetensors cannot be read: Input/output error"):
            read(source, 0, 1)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    with pytest.raises(DamagedState, match=r"manifest\.json cannot be read"):
        source.manifest()


def test_a_manifest_of_absurd_size_is_not_read(folder):
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate((1 << 30) + 1)  # a hole: it takes no room
    with pytest.raises(DamagedState, match=r"manifest\.json is damaged: it is too large"):
        FolderCheckpoint(folder).manifest()


def opened_in(folder):
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.readlink().parent == folder for link in links)


def read_at_once(source):
    start = threading.Barrier(4)

    def work(number):
        start.wait(10)
        return read(source, number, 5)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(4)))


def test_several_threads_read_and_nothing_stays_open(folder):
    source = FolderCheckpoint(folder)
    assert read_at_once(source) == [bytes(range(n, n + 5)) for n in range(4)]
    assert opened_in(folder) == 1
    del source
    assert opened_in(folder) == 0
