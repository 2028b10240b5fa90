import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.data import sources as module
from headway.data.sources import ReadOptions, find_sources, read_blocks
from headway.errors import DataError
from thinned import examples


def write(path: Path, content: str | bytes = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture
def tree(tmp_path):
    for name in ("a.py", "b.txt", "lib/c.py", "lib/test/d.py", "lib/test/deep/e.py", "test_f.py", "lib/x[1].py"):
        write(tmp_path / "test" / name)
    return tmp_path / "test"  # a folder above the sources is called like something to exclude


def names(sources, root):
    return [str(source.path.relative_to(root)) for source in sources]


def test_globs_are_recursive_sorted_and_without_doubles(tree):
    want = sorted(tree.rglob("*.py"))
    sources = find_sources([f"{tree}/**/*.py", f"{tree}/*.py", tree / "lib" / "c.py"])
    assert [source.path for source in sources] == want
    assert [source.bytes for source in sources] == [1] * len(want)


def test_relative_globs_and_links_name_a_file_once(tree, monkeypatch):
    monkeypatch.chdir(tree)
    (tree / "z.py").symlink_to(tree / "a.py")
    assert names(find_sources(["*.py", f"{tree}/a.py", "lib/../a.py"]), tree) == ["a.py", "test_f.py"]


def test_a_file_with_brackets_in_its_name(tree):
    assert names(find_sources([tree / "lib" / "x[1].py"]), tree) == ["lib/x[1].py"]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["test"], ["a.py", "lib/c.py", "lib/x[1].py", "test_f.py"]),
        (["lib/test/**"], ["a.py", "lib/c.py", "lib/x[1].py", "test_f.py"]),
        (["**/deep/*.py"], ["a.py", "lib/c.py", "lib/test/d.py", "lib/x[1].py", "test_f.py"]),
        (["lib/*.py"], ["a.py", "lib/test/d.py", "lib/test/deep/e.py", "test_f.py"]),
        (["test_*.py", "[a-c].py"], ["lib/test/d.py", "lib/test/deep/e.py", "lib/x[1].py"]),
        (["[!a].py"], ["a.py", "lib/x[1].py", "test_f.py"]),
        (["lib/"], ["a.py", "test_f.py"]),
        (["x.[.]py", "est"], ["a.py", "lib/c.py", "lib/test/d.py", "lib/test/deep/e.py", "lib/x[1].py", "test_f.py"]),
    ],
)
def test_exclude(tree, exclude, left):
    assert names(find_sources([f"{tree}/**/*.py"], exclude=exclude), tree) == left


def test_exclude_by_absolute_path(tree):
    sources = find_sources([f"{tree}/**/*.py"], exclude=[f"{tree}/lib"])
    assert names(sources, tree) == ["a.py", "test_f.py"]


@pytest.mark.parametrize("pattern", ["*.nothing", "no/such/**/*.py", "missing.txt"])
def test_a_pattern_that_names_nothing_is_named(tree, pattern):
    with pytest.raises(DataError, match=pattern.replace("*", r"\*")) as error:
        find_sources([f"{tree}/a.py", f"{tree}/{pattern}"])
    assert error.value.hint


def test_folders_empty_lists_and_excluded_everything(tree):
    with pytest.raises(DataError, match="is a folder"):
        find_sources([tree])
    with pytest.raises(DataError, match="no source"):
        find_sources([])
    with pytest.raises(DataError, match="--exclude removes all of 1 file"):
        find_sources([tree / "a.py"], exclude=["a.py"])


@pytest.mark.parametrize(
    ("name", "format", "want"),
    [
        ("a.jsonl", "auto", "jsonl"),
        ("a.JSONL.gz", "auto", "jsonl"),
        ("a.ndjson", "auto", "jsonl"),
        ("a.json", "auto", "text"),
        ("a.txt.gz", "auto", "text"),
        ("a.jsonl", "text", "text"),
        ("a.txt", "jsonl", "jsonl"),
    ],
)
def test_format_follows_the_name_or_the_option(tmp_path, name, format, want):
    assert find_sources([write(tmp_path / name)], format=format)[0].format == want


def test_unknown_options_are_refused():
    with pytest.raises(DataError, match="format"):
        ReadOptions(format="xml")
    with pytest.raises(DataError, match="errors"):
        ReadOptions(errors="ignore")


def documents(path, reading=None, on_skip=None):
    """(prompt, text) of each document, and the blocks' positions."""
    pairs, prompt, text = [], "", ""
    for block in read_blocks(
        find_sources([path], format=(reading or ReadOptions()).format)[0], reading or ReadOptions(), on_skip
    ):
        if block.prompt:
            prompt += block.text
        else:
            text += block.text
        if block.last:
            pairs.append((prompt, text))
            prompt = text = ""
    assert not prompt
    assert not text
    return pairs


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=40), packed=st.booleans())
def test_a_text_file_is_one_document_unchanged(tmp_path, monkeypatch, text, packed):
    monkeypatch.setattr(module, "BLOCK_CHARS", 3)
    content = text.encode()
    path = write(tmp_path / ("t.gz" if packed else "t"), gzip.compress(content) if packed else content)
    assert documents(path) == ([("", text.removeprefix("\ufeff"))] if text != "\ufeff" else [])


def test_line_ends_are_kept_and_empty_files_are_not_documents(tmp_path):
    assert documents(write(tmp_path / "crlf", "a\r\nb\rc\n")) == [("", "a\r\nb\rc\n")]
    assert documents(write(tmp_path / "empty", "")) == []


def test_bytes_that_are_not_utf8(tmp_path):
    path = write(tmp_path / "latin.txt", b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text \(byte 0xe9") as error:
        documents(path)
    assert "--errors replace" in error.value.hint
    assert documents(path, ReadOptions(errors="replace")) == [("", "caf\N{REPLACEMENT CHARACTER} au lait")]
    skipped = []
    assert documents(path, ReadOptions(errors="skip"), skipped.append) == []
    assert len(skipped) == 1
    assert "latin.txt" in skipped[0]


@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=6),
    ascii=st.booleans(),
    packed=st.booleans(),
)
def test_jsonl_values_match_json(tmp_path, rows, ascii, packed):
    lines = [json.dumps({"q": q, "a": a, "other": 1}, ensure_ascii=ascii) for q, a in rows]
    content = "\n\n".join(lines).encode()
    path = write(tmp_path / ("t.jsonl.gz" if packed else "t.jsonl"), gzip.compress(content) if packed else content)
    assert documents(path, ReadOptions(text_field="a", prompt_field="q")) == [row for row in rows if row != ("", "")]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": ["x",', "not JSON \\(Expecting value at column 15\\)"),
        (b"[1]", "a JSON list, not an object"),
        (b'{"txt": "x"}', "no field 'text'; it has txt"),
        (b'{"text": null}', "field 'text' is null"),
        (b'{"text": 3}', "field 'text' is int"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "half a surrogate"),
        (b"[" * 100_000, "JSON nested too deeply|not JSON"),
    ],
)
def test_a_bad_line_is_named_or_skipped(tmp_path, line, why):
    path = write(tmp_path / "t.jsonl", b'{"text": "good"}\n\n' + line + b'\n{"text": "end"}')
    with pytest.raises(DataError, match=f"t.jsonl line 3: .*({why})") as error:
        documents(path)
    assert "--errors skip" in error.value.hint
    skipped = []
    assert documents(path, ReadOptions(errors="skip"), skipped.append) == [("", "good"), ("", "end")]
    assert len(skipped) == 1
    assert "line 3" in skipped[0]


def test_replace_fixes_characters_but_not_json(tmp_path):
    path = write(tmp_path / "t.jsonl", b'\xef\xbb\xbf{"text": "a\xff"}\n{"text": "b\\ud800c"}')
    assert documents(path, ReadOptions(errors="replace")) == [("", "a\ufffd"), ("", "b\ufffdc")]
    with pytest.raises(DataError, match="line 1: not JSON"):
        documents(write(tmp_path / "u.jsonl", b"{"), ReadOptions(errors="replace"))


def test_a_truncated_gzip_file(tmp_path):
    whole = gzip.compress(b"some text " * 1000)
    for name, content in (("cut.gz", whole[:-20]), ("bad.gz", b"no gzip at all")):
        with pytest.raises(DataError, match=f"{name} is not a complete gzip file"):
            documents(write(tmp_path / name, content))


def test_a_source_that_vanishes(tmp_path):
    source = find_sources([write(tmp_path / "a")])[0]
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a: No such file"):
        list(read_blocks(source, ReadOptions()))


@pytest.mark.parametrize("name", ["big.jsonl", "big.txt"])
def test_big_files_stream(tmp_path, name):
    line = json.dumps({"text": "word " * 200}) + "\n"
    path = write(tmp_path / name, line * 16_000)
    source = find_sources([path])[0]
    assert source.bytes > 16e6
    tracemalloc.start()
    positions = [block.position for block in read_blocks(source, ReadOptions())]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6
    assert positions == sorted(positions)
    assert positions[0] < source.bytes / 10
    assert positions[-1] == source.bytes


def test_a_torn_gzip_file_is_refused_or_skipped(tmp_path):
    path = write(tmp_path / "t.txt.gz", gzip.compress(b"words " * 5000)[:-20])
    with pytest.raises(DataError, match="not a complete gzip file"):
        documents(path)
    skipped = []
    assert documents(path, ReadOptions(errors="skip"), skipped.append) == []
    assert "t.txt.gz is not a complete gzip file" in skipped[0]
