"""Where text comes from: files found by glob or list, read as a stream of documents.

A source is one file. A text file is one document, a JSONL file has one document a line, and both may be packed by
gzip or Zstandard; a Parquet file has one document a row. Documents leave here as blocks, so that no huge file is ever
held in memory whole.
"""

import functools
import glob
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, get_args

from headway.data.compressed import PACKED_SUFFIXES, open_plain
from headway.data.parquet import read_rows
from headway.errors import DataError

__all__ = ["Errors", "Format", "ReadOptions", "SourceFile", "TextBlock", "find_sources", "read_blocks"]

Format = Literal["auto", "text", "jsonl", "parquet"]
Errors = Literal["strict", "replace", "skip"]

BLOCK_CHARS = 1 << 18
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class SourceFile:
    """One file to read, with its size on disk."""

    path: Path
    format: Literal["text", "jsonl", "parquet"]
    bytes: int


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    format: Format = "auto"
    """`auto` goes by the file's name."""
    text_field: str = "text"
    """The JSONL field or Parquet column that is trained on."""
    prompt_field: str | None = None
    """The JSONL field or Parquet column put before the text and not trained on."""
    errors: Errors = "strict"
    """What to do with what cannot be read: fail, replace the bad characters, or skip the file, line or row."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("format", self.format, get_args(Format)),
            ("errors", self.errors, get_args(Errors)),
        ):
            if value not in allowed:
                raise DataError(f"{name} is {value!r}", hint=f"one of: {', '.join(allowed)}")


class TextBlock(NamedTuple):
    """A run of text of one document, in order; `last` ends the document. A prompt is always one block."""

    text: str
    prompt: bool
    last: bool
    position: int
    """Bytes of the file on disk read so far."""


def find_sources(
    patterns: Sequence[str | Path], *, exclude: Sequence[str] = (), format: Format = "auto"
) -> list[SourceFile]:
    """The files that the patterns name, each once, sorted by path."""
    named = sorted({found for pattern in patterns for found in _expand(str(pattern))})
    rejects = [_exclude_test(pattern) for pattern in exclude]
    sources: dict[Path, SourceFile] = {}
    for path, relative in named:
        if any(reject(path, relative) for reject in rejects):
            continue
        real = path.resolve()
        if real not in sources:
            sources[real] = SourceFile(path, _format_of(path.name, format), real.stat().st_size)
    if not named:
        raise DataError("no source is named", hint="name at least one file or glob")
    if not sources:
        raise DataError(f"nothing is left of {len(named)} files after --exclude", hint="exclude less")
    return list(sources.values())


def _expand(pattern: str) -> list[tuple[Path, str]]:
    """(path, path below the folder that the pattern starts from) of each file that a pattern names."""
    whole = Path(pattern).expanduser()
    if whole.is_file():  # a name with [brackets] is a file before it is a glob
        return [(whole.parent.resolve() / whole.name, whole.name)]
    if whole.is_dir():
        raise DataError(f"{pattern} is a folder", hint=f"name its files: '{pattern.rstrip('/')}/**/*.txt'")
    if not glob.has_magic(pattern):
        raise DataError(f"there is no file {pattern}", hint="check the path; globs such as 'src/**/*.py' work")
    fixed = next(folder for folder in whole.parents if not glob.has_magic(str(folder)))
    root = fixed.resolve()
    # Not Path.glob: it finds hidden files too, and does not follow links to folders.
    below = glob.glob(str(whole.relative_to(fixed)), root_dir=root, recursive=True)  # noqa: PTH207
    files = [(root / relative, relative) for relative in below if (root / relative).is_file()]
    if not files:
        raise DataError(f"no file matches {pattern}", hint="check the path, and use ** to search sub-folders")
    return files


def _exclude_test(pattern: str) -> Callable[[Path, str], bool]:
    """Whether the pattern names a file or a folder above it, given its path and its path below the root.

    Names are looked for below the root only, so that sources moved to another folder exclude the same
    files. A pattern that is itself a path (`lib/test/**`) is also matched from the current folder.
    """
    pattern = pattern.rstrip("/")
    below = re.compile(f"(?:.*/)?{_glob_regex(pattern)}(?:/.*)?", re.DOTALL)
    from_here = re.compile(f"{_glob_regex(str(Path(pattern).expanduser().absolute()))}(?:/.*)?", re.DOTALL)
    is_path = "/" in pattern

    def test(path: Path, relative: str) -> bool:
        return bool(below.fullmatch(relative) or (is_path and from_here.fullmatch(str(path))))

    return test


_GLOB_PART = re.compile(r"\*\*/|/\*\*$|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
_GLOB_MEANING = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _glob_regex(pattern: str) -> str:
    """A glob as a regular expression: `*` and `?` stay inside one folder, `**` crosses folders."""
    return "".join(_glob_part(part) for part in _GLOB_PART.findall(pattern))


def _glob_part(part: str) -> str:
    if part in _GLOB_MEANING:
        return _GLOB_MEANING[part]
    if len(part) == 1:
        return re.escape(part)
    inside = part[1:-1]
    negate = inside.startswith("!")
    # A dash is a range in both languages; everything else is meant as it stands.
    return f"[{'^' * negate}{re.escape(inside[negate:])}]".replace("\\-", "-")


def _format_of(name: str, format: Format) -> Literal["text", "jsonl", "parquet"]:
    if format != "auto":
        return format
    plain = name.lower()
    for suffix in PACKED_SUFFIXES:
        plain = plain.removesuffix(suffix)
    return "parquet" if plain.endswith(".parquet") else "jsonl" if plain.endswith(_JSONL_SUFFIXES) else "text"


def read_blocks(
    source: SourceFile, reading: ReadOptions, on_skip: Callable[[str], None] | None = None
) -> Iterator[TextBlock]:
    """The documents of one source as blocks; `on_skip` is told what was left out, and why."""
    skip = on_skip or (lambda _: None)
    if source.format == "jsonl":
        yield from _read_jsonl(source, reading, skip)
    elif source.format == "parquet":
        yield from _read_parquet(source, reading, skip)
    elif reading.errors == "skip" and (why := _unreadable(source)):
        skip(why)
    else:
        yield from _read_text(source, reading)


def _decoded(plain: IO[bytes], errors: str) -> Iterator[str]:
    # A byte order mark is no text; line ends are kept as they are.
    text = io.TextIOWrapper(plain, encoding="utf-8-sig", errors=errors, newline="")
    try:
        yield from iter(functools.partial(text.read, BLOCK_CHARS), "")
    finally:
        text.detach()  # the file below belongs to the caller


def _unreadable(source: SourceFile) -> str | None:
    """Why a text file cannot be read to its end; None if it can."""
    try:
        with open_plain(source.path) as (plain, _):
            for _block in _decoded(plain, "strict"):
                pass
    except UnicodeDecodeError:
        return f"{source.path} is not UTF-8 text"
    except DataError as error:
        return error.message
    return None


def _read_text(source: SourceFile, reading: ReadOptions) -> Iterator[TextBlock]:
    errors = "replace" if reading.errors == "replace" else "strict"
    with open_plain(source.path) as (plain, tell):
        held: str | None = None
        try:
            for text in _decoded(plain, errors):
                if held is not None:
                    yield TextBlock(held, prompt=False, last=False, position=tell())
                held = text
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason})",
                hint="--errors replace keeps it with bad bytes replaced, --errors skip leaves the file out",
            ) from None
        if held is not None:  # an empty file is no document
            yield TextBlock(held, prompt=False, last=True, position=source.bytes)


class _BadRecordError(Exception):
    """A line or row that cannot be used, and why."""


_Record = tuple[str, Callable[[], tuple[str, str]], Callable[[], int]]
"""(where in the file it is, what makes its prompt and text of it, how far into the file on disk we are)."""


def _read_jsonl(source: SourceFile, reading: ReadOptions, skip: Callable[[str], None]) -> Iterator[TextBlock]:
    with open_plain(source.path) as (plain, tell):
        lines = ((f"line {n}", line) for n, line in enumerate(_lines(plain), start=1) if line.strip())
        records = ((where, functools.partial(_fields, line, reading), tell) for where, line in lines)
        yield from _documents(source, records, reading, skip)


def _read_parquet(source: SourceFile, reading: ReadOptions, skip: Callable[[str], None]) -> Iterator[TextBlock]:
    columns = [reading.text_field] + ([] if reading.prompt_field is None else [reading.prompt_field])
    rows = read_rows(source.path, list(dict.fromkeys(columns)), source.bytes)
    records = (
        (f"row {number}", functools.partial(_columns, values, reading), functools.partial(int, position))
        for number, values, position in rows
    )
    yield from _documents(source, records, reading, skip)


def _documents(
    source: SourceFile, records: Iterable[_Record], reading: ReadOptions, skip: Callable[[str], None]
) -> Iterator[TextBlock]:
    """Documents of records that can be used; what is done with others is the reading's choice."""
    for where, fields, tell in records:
        try:
            prompt, text = fields()
        except _BadRecordError as bad:
            if reading.errors == "skip":
                skip(f"{source.path} {where}: {bad}")
                continue
            raise DataError(
                f"{source.path} {where}: {bad}",
                hint=f"--errors skip leaves such {where.split()[0]}s out; --text-field, --prompt-field name fields",
            ) from None
        if prompt:
            yield TextBlock(prompt, prompt=True, last=False, position=tell())
        if prompt or text:
            yield TextBlock(text, prompt=False, last=True, position=tell())


def _lines(plain: Iterable[bytes]) -> Iterator[bytes]:
    for index, line in enumerate(plain):
        yield line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line


def _fields(line: bytes, reading: ReadOptions) -> tuple[str, str]:
    """The prompt (empty when there is none) and the text of one line."""
    replace = reading.errors == "replace"
    try:
        record = json.loads(line.decode("utf-8", "replace" if replace else "strict"))
    except UnicodeDecodeError as error:
        raise _BadRecordError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _BadRecordError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise _BadRecordError("JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise _BadRecordError(f"a JSON {type(record).__name__}, not an object")
    prompt = "" if reading.prompt_field is None else _field(record, reading.prompt_field, replace)
    return prompt, _field(record, reading.text_field, replace)


def _field(record: dict[str, object], name: str, replace: bool) -> str:
    if name not in record:
        raise _BadRecordError(f"no field {name!r}; it has {', '.join(sorted(record)) or 'none'}")
    value = record[name]
    if not isinstance(value, str):
        raise _BadRecordError(f"field {name!r} is {'null' if value is None else type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which is no character
        if not replace:
            raise _BadRecordError(f"field {name!r} holds half a surrogate pair") from None
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _columns(values: dict[str, bytes | None], reading: ReadOptions) -> tuple[str, str]:
    """The prompt (empty when there is none) and the text of one row."""
    prompt = "" if reading.prompt_field is None else _column(values, reading.prompt_field, reading.errors)
    return prompt, _column(values, reading.text_field, reading.errors)


def _column(values: dict[str, bytes | None], name: str, errors: Errors) -> str:
    value = values[name]
    if value is None:
        raise _BadRecordError(f"column {name!r} is null, not a string")
    try:
        return value.decode("utf-8", "replace" if errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        raise _BadRecordError(f"column {name!r} is not UTF-8 ({error.reason} at byte {error.start})") from None
