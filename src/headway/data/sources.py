"""Find source files by path or glob, and read them as a stream of documents.

A text file is one document, a JSONL file has one document per line, and both may be compressed with gzip or Zstandard;
a Parquet file has one document per row. Documents are yielded as blocks, so that no huge file is ever in memory whole.
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

from headway.data.compressed import COMPRESSED_SUFFIXES, open_plain
from headway.data.parquet import read_dicts, read_rows
from headway.errors import DataError, plural

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
    """`auto` decides by the file name."""
    text_field: str = "text"
    """The JSONL field or Parquet column to train on."""
    prompt_field: str | None = None
    """The JSONL field or Parquet column that precedes the text and is not trained on."""
    errors: Errors = "strict"
    """On unreadable input: fail, replace the bad characters, or skip the file, line or row."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("format", self.format, get_args(Format)),
            ("errors", self.errors, get_args(Errors)),
        ):
            if value not in allowed:
                raise DataError(f"{name} is {value!r}", hint=f"one of: {', '.join(allowed)}")


class TextBlock(NamedTuple):
    """A piece of a document's text, in order; `last` ends the document. A prompt is always one block."""

    text: str
    prompt: bool
    last: bool
    position: int
    """Position in the file on disk, in bytes."""
    record: int = 0
    """The line or row that the document is, from 1; 0 for the whole file."""
    offset: int = 0
    """Where it begins in the plain text, in bytes."""
    file: int = 0
    """The number of the source file."""


def find_sources(
    patterns: Sequence[str | Path], *, exclude: Sequence[str] = (), format: Format = "auto"
) -> list[SourceFile]:
    """Return the files that match the patterns, each once, sorted by path."""
    matches = sorted({match for pattern in patterns for match in _expand(str(pattern))})
    excluded = [_exclude_test(pattern) for pattern in exclude]
    sources: dict[Path, SourceFile] = {}
    for path, relative in matches:
        if any(test(path, relative) for test in excluded):
            continue
        real = path.resolve()
        if real not in sources:
            sources[real] = SourceFile(path, _format_of(path.name, format), real.stat().st_size)
    if not matches:
        raise DataError("no sources given", hint="name at least one file or glob")
    if not sources:
        raise DataError(f"--exclude removes all of {plural(len(matches), 'file')}", hint="exclude less")
    return list(sources.values())


def _expand(pattern: str) -> list[tuple[Path, str]]:
    """Return (path, path below the folder that the pattern starts from) of each file that matches a pattern."""
    path = Path(pattern).expanduser()
    if path.is_file():  # a name with [brackets] is a file before it is a glob
        return [(path.parent.resolve() / path.name, path.name)]
    if path.is_dir():
        raise DataError(f"{pattern} is a folder", hint=f"name its files: '{pattern.rstrip('/')}/**/*.txt'")
    if not glob.has_magic(pattern):
        raise DataError(f"file {pattern} does not exist", hint="check the path; globs such as 'src/**/*.py' work")
    fixed = next(folder for folder in path.parents if not glob.has_magic(str(folder)))
    root = fixed.resolve()
    # Not Path.glob: it finds hidden files too, and does not follow links to folders.
    below = glob.glob(str(path.relative_to(fixed)), root_dir=root, recursive=True)  # noqa: PTH207
    files = [(root / relative, relative) for relative in below if (root / relative).is_file()]
    if not files:
        raise DataError(f"no file matches {pattern}", hint="check the path, and use ** to search sub-folders")
    return files


def _exclude_test(pattern: str) -> Callable[[Path, str], bool]:
    """Return a test whether the pattern matches a file or a folder above it, by its path and its path below the root.

    Names are matched below the root only, so that sources moved to another folder exclude the same files. A pattern
    that is itself a path (`lib/test/**`) is also matched from the current folder.
    """
    pattern = pattern.rstrip("/")
    below = re.compile(f"(?:.*/)?{glob_regex(pattern)}(?:/.*)?", re.DOTALL)
    from_here = re.compile(f"{glob_regex(str(Path(pattern).expanduser().absolute()))}(?:/.*)?", re.DOTALL)
    is_path = "/" in pattern

    def test(path: Path, relative: str) -> bool:
        return bool(below.fullmatch(relative) or (is_path and from_here.fullmatch(str(path))))

    return test


_GLOB_PART = re.compile(r"\*\*/|/\*\*$|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
_GLOB_MEANING = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def glob_regex(pattern: str) -> str:
    """Convert a glob to a regular expression: `*` and `?` stay inside one folder, `**` crosses folders."""
    return "".join(_glob_part(part) for part in _GLOB_PART.findall(pattern))


def _glob_part(part: str) -> str:
    if part in _GLOB_MEANING:
        return _GLOB_MEANING[part]
    if len(part) == 1:
        return re.escape(part)
    inside = part[1:-1]
    negate = inside.startswith("!")
    # A dash is a range in both languages; everything else is literal.
    return f"[{'^' * negate}{re.escape(inside[negate:])}]".replace("\\-", "-")


def _format_of(name: str, format: Format) -> Literal["text", "jsonl", "parquet"]:
    if format != "auto":
        return format
    plain = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        plain = plain.removesuffix(suffix)
    return "parquet" if plain.endswith(".parquet") else "jsonl" if plain.endswith(_JSONL_SUFFIXES) else "text"


def read_blocks(
    source: SourceFile, reading: ReadOptions, on_skip: Callable[[str], None] | None = None
) -> Iterator[TextBlock]:
    """Yield the documents of one source as blocks; `on_skip` gets what was skipped, and why."""
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
    # A byte order mark is not text; line ends are kept.
    text = io.TextIOWrapper(plain, encoding="utf-8-sig", errors=errors, newline="")
    try:
        yield from iter(functools.partial(text.read, BLOCK_CHARS), "")
    finally:
        text.detach()  # the file below belongs to the caller


def _unreadable(source: SourceFile) -> str | None:
    """Return why a text file cannot be read to its end, or None if it can."""
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
        previous: str | None = None
        try:
            for text in _decoded(plain, errors):
                if previous is not None:
                    yield TextBlock(previous, prompt=False, last=False, position=tell())
                previous = text
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason})",
                hint="use --errors replace to replace bad bytes, or --errors skip to skip the file",
            ) from None
        if previous is not None:  # an empty file is not a document
            yield TextBlock(previous, prompt=False, last=True, position=source.bytes)


class BadRecordError(Exception):
    """Why a line or row cannot be used."""


_Record = tuple[str, Callable[[], Callable[[str], str]], int, int]
"""(line or row, function that parses it and returns a getter of its fields, position in the file on disk, and where it
begins in the plain text)."""


def _read_jsonl(source: SourceFile, reading: ReadOptions, skip: Callable[[str], None]) -> Iterator[TextBlock]:
    replace = reading.errors == "replace"
    with open_plain(source.path) as (plain, tell):
        records = (
            (f"line {number}", functools.partial(_parse_line, line, replace), tell(), offset)
            for number, (line, offset) in enumerate(_with_offsets(plain), start=1)
            if line.strip()
        )
        yield from _documents(source, records, reading, skip)


def _read_parquet(source: SourceFile, reading: ReadOptions, skip: Callable[[str], None]) -> Iterator[TextBlock]:
    columns = [reading.text_field] + ([] if reading.prompt_field is None else [reading.prompt_field])
    rows = read_rows(source.path, list(dict.fromkeys(columns)), source.bytes)
    records = (
        (f"row {number}", lambda values=values: functools.partial(_column, values, reading.errors), position, 0)
        for number, values, position in rows
    )
    yield from _documents(source, records, reading, skip)


def _documents(
    source: SourceFile, records: Iterable[_Record], reading: ReadOptions, skip: Callable[[str], None]
) -> Iterator[TextBlock]:
    """Yield the documents of valid records; fail at or skip the others."""
    for where, parse, position, offset in records:
        try:
            field = parse()
            prompt = "" if reading.prompt_field is None else field(reading.prompt_field)
            text = field(reading.text_field)
        except BadRecordError as bad:
            if reading.errors == "skip":
                skip(f"{source.path} {where}: {bad}")
                continue
            raise DataError(
                f"{source.path} {where}: {bad}",
                hint=f"set --text-field and --prompt-field, or skip such {where.split()[0]}s: --errors skip",
            ) from None
        if prompt:
            yield TextBlock(prompt, True, False, position, _number(where), offset)
        if prompt or text:
            yield TextBlock(text, False, True, position, _number(where), offset)


def read_objects(
    source: SourceFile, reading: ReadOptions, keys: Sequence[str] | None, wanted: Callable[[int], bool]
) -> Iterator[tuple[str, "dict[str, object] | BadRecordError | None", int]]:
    """Yield (line or row, its object or why it is none, position in the file on disk) of a JSONL or Parquet file.

    Objects are parsed if `wanted` says so of their number from 0, else None. Of a Parquet file only the columns in
    `keys` are read; None reads all.
    """
    if source.format == "text":
        raise DataError(
            f"{source.path} is neither JSONL nor Parquet by its name", hint="rename it, or say --format jsonl"
        )
    if source.format == "parquet":
        for number, values, position in read_dicts(source.path, keys, source.bytes, wanted):
            yield f"row {number}", values, position
        return
    replace = reading.errors == "replace"
    with open_plain(source.path) as (plain, tell):
        records = ((number, line) for number, line in enumerate(_lines(plain), start=1) if not line.isspace())
        for index, (number, line) in enumerate(records):
            yield f"line {number}", _parse_chat(line, replace) if wanted(index) else None, tell()


def _parse_chat(line: bytes, replace: bool) -> "dict[str, object] | BadRecordError":
    try:
        record = _parse_object(line, replace)
        if b"\\ud" in line.lower():  # JSON can encode half a surrogate pair, which is not a character
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRecordError("it holds half a surrogate pair")
    except BadRecordError as bad:
        return bad
    return record


def _number(where: str) -> int:
    return int(where.rpartition(" ")[2])


def _with_offsets(plain: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield lines without a byte order mark, and where each begins."""
    offset = 0
    for index, line in enumerate(plain):
        yield line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line, offset
        offset += len(line)


def _lines(plain: Iterable[bytes]) -> Iterator[bytes]:
    for index, line in enumerate(plain):
        yield line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line


def _parse_line(line: bytes, replace: bool) -> Callable[[str], str]:
    """Parse a line of JSONL; return a getter of its fields."""
    return functools.partial(_field, _parse_object(line, replace), replace)


def _parse_object(line: bytes, replace: bool) -> dict[str, object]:
    """Parse a line of JSONL."""
    try:
        record = json.loads(line.decode("utf-8", "replace" if replace else "strict").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not JSON ({error.msg} at column {error.colno})") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise BadRecordError("a number with too many digits") from None
    except RecursionError:
        raise BadRecordError("JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"a JSON {type(record).__name__}, not an object")
    return record


def _field(record: dict[str, object], replace: bool, name: str) -> str:
    if name not in record:
        raise BadRecordError(f"no field {name!r}; it has {', '.join(sorted(record)) or 'none'}")
    value = record[name]
    if not isinstance(value, str):
        raise BadRecordError(f"field {name!r} is {'null' if value is None else type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can encode half a surrogate pair, which is not a character
        if not replace:
            raise BadRecordError(f"field {name!r} holds half a surrogate pair") from None
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _column(values: dict[str, bytes | None], errors: Errors, name: str) -> str:
    value = values[name]
    if value is None:
        raise BadRecordError(f"column {name!r} is null, not a string")
    try:
        return value.decode("utf-8", "replace" if errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        raise BadRecordError(f"column {name!r} is not UTF-8 ({error.reason} at byte {error.start})") from None
