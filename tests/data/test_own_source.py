"""Rows from code of the user's own: the same dataset as from a file with these rows."""

import json
import sys
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.data import open_dataset

MODULE = """
import json

TEXTS = [f"line {number}: {'word ' * (number % 7)}" for number in range(200)]


def rows():
    for text in TEXTS:
        yield {"text": text, "more": 1}


def texts():
    return iter(TEXTS)


def broken():
    yield "one"
    raise OSError("the shelf is empty")


def numbers():
    return [1]


def text():
    return "one text"
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rows", raising=False)


def build(monkeypatch: pytest.MonkeyPatch, out: str, source: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headway", "data", "build", out, source, "--vocab-size", "300"])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_rows_from_code_are_rows_of_a_file(monkeypatch, tmp_path) -> None:
    import my_rows  # type: ignore[import-not-found]

    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in my_rows.rows()))
    for out, source in (("a", "rows.jsonl"), ("b", "my_rows:rows"), ("c", "my_rows:texts")):
        assert build(monkeypatch, out, source) == 0
    versions = {open_dataset(tmp_path / out).version for out in "abc"}
    assert len(versions) == 1
    assert not list(tmp_path.glob(".rows-*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "my_rows:broken failed after 1 rows: OSError: the shelf is empty"),
        ("numbers", "my_rows:numbers: row 1 is a int"),
        ("text", "my_rows:text gives a str"),
        ("row", "source names my_rows:row, but my_rows has no row"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(name: str, message: str, monkeypatch, tmp_path, capsys) -> None:
    assert build(monkeypatch, "out", f"my_rows:{name}") != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".rows-*"))
