import gzip
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.data import BuildOptions, build_dataset
from headway.data import parquet as parquet_module
from headway.data.compressed import open_plain
from headway.data.sources import ReadOptions, find_sources, read_blocks
from headway.errors import DataError
from thinned import examples

zstandard = pytest.importorskip("zstandard")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

a_folder = settings(
    deadline=None, max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def packed(content, level=3):
    return zstandard.ZstdCompressor(level=level).compress(content)


def documents(path, reading=None, on_skip=None):
    """(prompt, text) of each document."""
    pairs, prompt, text = [], "", ""
    for block in read_blocks(find_sources([path])[0], reading or ReadOptions(), on_skip):
        prompt, text = (prompt + block.text, text) if block.prompt else (prompt, text + block.text)
        if block.last:
            pairs.append((prompt, text))
            prompt = text = ""
    assert (prompt, text) == ("", "")
    return pairs


# -- zst


@a_folder
@given(parts=st.lists(st.binary(max_size=300_000), max_size=4), size=st.integers(1, 70_000))
def test_plain_bytes_of_any_frames_read_in_any_portions(tmp_path, parts, size):
    path = tmp_path / "x.zst"
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    path.write_bytes(skippable.join(packed(part) for part in parts))
    with open_plain(path) as (plain, tell):
        read = b"".join(iter(lambda: plain.read(size), b""))
        assert tell() == path.stat().st_size
    assert read == b"".join(parts)


@pytest.mark.parametrize(
    ("name", "format"), [("a.jsonl.zst", "jsonl"), ("a.txt.ZST", "text"), ("a.parquet", "parquet")]
)
def test_the_name_says_what_a_file_is(tmp_path, name, format):
    (tmp_path / name).write_bytes(b"x")
    assert find_sources([tmp_path / name])[0].format == format


def test_a_zst_file_that_is_cut_or_broken_is_named(tmp_path):
    text = random.Random(0).randbytes(100_000).hex().encode()
    whole, checked = packed(text), zstandard.ZstdCompressor(write_checksum=True).compress(text)
    flipped = checked[:5000] + bytes([checked[5000] ^ 255]) + checked[5001:]
    cases = {"cut": whole[:-1], "half": whole[:50_000], "rest": whole + b"xx", "no": b"not zst at all", "flip": flipped}
    for name, content in cases.items():
        path = tmp_path / f"{name}.txt.zst"
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.txt.zst is not a complete zst file"):
            documents(path)
        skipped = []
        assert documents(path, ReadOptions(errors="skip"), skipped.append) == []
        assert "is not a complete zst file" in skipped[0]


def test_long_windows_are_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    (tmp_path / "t.txt.zst").write_bytes(b"".join([compressor.compress(b"words of a text ") for _ in range(3)]))
    assert documents(tmp_path / "t.txt.zst") == [("", "words of a text " * 3)]


def lines(rows):
    return "".join(json.dumps({"text": text}) + "\n" for text in rows).encode()


def test_big_zst_files_stream(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=7)) for _ in range(500)]
    content = lines(" ".join(rng.choices(words, k=130)) for _ in range(16_000))
    path = tmp_path / "big.jsonl.zst"
    path.write_bytes(packed(content))
    source = find_sources([path])[0]
    assert len(content) > 16e6
    tracemalloc.start()
    positions = [block.position for block in read_blocks(source, ReadOptions())]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6
    assert positions == sorted(positions)
    assert positions[0] < source.bytes / 10
    assert positions[-1] == source.bytes


# -- Parquet

TYPES = [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]


def write_parquet(path, columns, kind=None, **options):
    arrays = {name: pa.array(values, type=kind) if kind else pa.array(values) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), path, **options)
    return path


@a_folder
@given(
    rows=st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=30),
    kind=st.sampled_from(TYPES),
    group=st.integers(1, 7),
    compression=st.sampled_from(["none", "snappy", "zstd"]),
)
def test_rows_are_documents_as_they_were_written(tmp_path, rows, kind, group, compression):
    columns = {"n": list(range(len(rows))), "q": [q for q, _ in rows], "a": [a for _, a in rows]}
    arrays = {
        "n": pa.array(columns["n"], pa.int64()),
        **{name: pa.array(columns[name]).cast(pa.string()) for name in "qa"},
    }
    if not pa.types.is_dictionary(kind):
        arrays |= {name: arrays[name].cast(kind) for name in "qa"}
    else:
        arrays |= {name: arrays[name].dictionary_encode() for name in "qa"}
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(arrays), path, row_group_size=group, compression=compression)
    assert documents(path, ReadOptions(text_field="a", prompt_field="q")) == [row for row in rows if row != ("", "")]
    assert documents(path, ReadOptions(text_field="a")) == [("", a) for _, a in rows if a]


def test_one_column_may_be_prompt_and_text(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", {"text": ["x"]})
    assert documents(path, ReadOptions(prompt_field="text")) == [("x", "x")]


def test_a_bad_row_is_named_or_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_module, "_BATCH_ROWS", 2)
    for value, why in ((None, "column 'text' is null"), (b"caf\xe9!", r"column 'text' is not UTF-8 \(invalid")):
        path = write_parquet(
            tmp_path / "t.parquet", {"text": [b"one", b"two", value, b"four"]}, pa.binary(), row_group_size=3
        )
        with pytest.raises(DataError, match=f"t.parquet row 3: {why}") as error:
            documents(path)
        assert "skip such rows: --errors skip" in error.value.hint
        skipped = []
        assert documents(path, ReadOptions(errors="skip"), skipped.append) == [("", "one"), ("", "two"), ("", "four")]
        assert len(skipped) == 1
    assert documents(path, ReadOptions(errors="replace"))[2] == ("", "caf\N{REPLACEMENT CHARACTER}!")


def test_a_column_that_is_not_there_or_no_text_is_named(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", {"content": ["x"], "n": [1]})
    with pytest.raises(DataError, match=r"t.parquet has no column 'text'; it has content, n") as error:
        documents(path)
    assert "--text-field" in error.value.hint
    with pytest.raises(DataError, match=r"column 'n' of .*t.parquet is int64, not text"):
        documents(path, ReadOptions(text_field="n"))


def test_half_a_parquet_file_is_refused(tmp_path):
    whole = write_parquet(tmp_path / "t.parquet", {"text": [f"text {i}" for i in range(1000)]}).read_bytes()
    for content in (whole[: len(whole) // 2], b"no parquet", b"", whole[:100] + b"\0" * 200 + whole[300:]):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"bad.parquet"):
            documents(tmp_path / "bad.parquet")
    source = find_sources([tmp_path / "t.parquet"])[0]
    (tmp_path / "t.parquet").unlink()
    with pytest.raises(DataError, match=r"cannot read .*t.parquet: No such file"):
        list(read_blocks(source, ReadOptions()))


STREAM = """
import resource, sys
from headway.data.sources import ReadOptions, find_sources, read_blocks
import pyarrow, pyarrow.parquet
list(read_blocks(find_sources([sys.argv[1]])[0], ReadOptions()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
positions = [block.position for block in read_blocks(find_sources([sys.argv[2]])[0], ReadOptions())]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, positions == sorted(positions), positions[-1])
"""


@pytest.mark.slow
def test_a_big_row_group_streams(tmp_path):
    """120 MB of text in one row group of 12 MB on disk; memory of Arrow's own counts too, so a process is watched."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=7)) for _ in range(5000)]
    pieces = [" ".join(rng.choices(words, k=100)) for _ in range(2000)]
    small = write_parquet(tmp_path / "small.parquet", {"text": pieces})
    big = tmp_path / "big.parquet"
    table = pa.table({"text": [rng.choice(pieces) + str(i) for i in range(150_000)]})
    pq.write_table(table, big, row_group_size=10**6, use_dictionary=False, compression="zstd")
    command = [sys.executable, "-c", STREAM, str(small), str(big)]
    done = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, check=True, capture_output=True, text=True)
    grown_kb, in_order, last = done.stdout.split()
    assert (in_order, int(last)) == ("True", big.stat().st_size)
    assert int(grown_kb) < 60_000


# -- all of them


def test_the_version_does_not_depend_on_how_the_sources_are_packed(tmp_path):
    rows = [f"Document {i}: " + "some text " * i for i in range(50)]
    content = lines(rows)
    (tmp_path / "t.jsonl").write_bytes(content)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "t.jsonl.zst").write_bytes(packed(content))
    write_parquet(tmp_path / "t.parquet", {"text": rows}, row_group_size=7)
    options = BuildOptions(vocab_size=300)
    names = ("t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.parquet")
    built = [build_dataset(tmp_path / f"out-{name}", [tmp_path / name], options) for name in names]
    assert len({result.manifest.version for result in built}) == 1
    assert built[0].manifest.documents == 50


@pytest.mark.parametrize(("name", "package"), [("t.txt.zst", "zstandard"), ("t.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_a_hint(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=f"the {package} package is not installed") as error:
        documents(Path(tmp_path / name))
    assert "pip install 'headway[" in error.value.hint
