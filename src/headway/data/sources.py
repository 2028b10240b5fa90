"""Where text comes from: files found by glob or list, read as a stream of documents.

A source is one file, plain or gzip. A text file is one document; a JSONL file has one document a line.
Documents leave here as blocks, so that neither a huge text file nor a huge JSONL file is ever held in
memory whole.
"""

import functools
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, get_args

from headway.errors import DataError

__all__ = ["Block", "Errors", "Format", "Reading", "Source", "find_sources", "read_blocks"]

Format = Literal["auto", "text", "jsonl"]
Errors = Literal["strict", "replace", "skip"]

BLOCK_CHARS = 1 << 18
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Source:
    """One file to read, with its size on disk."""

    path: Path
    format: Literal["text", "jsonl"]
    bytes: int


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    format: Format = "auto"
    """`auto` goes by the file's name."""
    text_field: str = "text"
    """The JSONL field that is trained on."""
    prompt_field: str | None = None
    """The JSONL field put before the text and not trained on."""
    errors: Errors = "strict"
    """What to do with what cannot be read: fail, replace the bad characters, or skip the file or line."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("format", self.format, get_args(Format)),
            ("errors", self.errors, get_args(Errors)),
        ):
            if value not in allowed:
                raise DataError(f"{name} is {value!r}", hint=f"one of: {', '.join(allowed)}")


class Block(NamedTuple):
    """A run of text of one document, in order; `last` ends the document. A prompt is always one block."""

    text: str
    prompt: bool
    last: bool
    position: int
    """Bytes of the file on disk read so far."""


def find_sources(
    patterns: Sequence[str | Path], *, exclude: Sequence[str] = (), format: Format = "auto"
) -> list[Source]:
    """The files that the patterns name, each once, sorted by path."""
    named = sorted({found for pattern in patterns for found in _expand(str(pattern))})
    rejects = [_exclude_test(pattern) for pattern in exclude]
    sources: dict[Path, Source] = {}
    for path, relative in named:
        if any(reject(path, relative) for reject in rejects):
            continue
        real = path.resolve()
        if real not in sources:
            sources[real] = Source(path, _format_of(path.name, format), real.stat().st_size)
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


def _format_of(path: str, format: Format) -> Literal["text", "jsonl"]:
    if format != "auto":
        return format
    return "jsonl" if path.lower().removesuffix(".gz").endswith(_JSONL_SUFFIXES) else "text"


def read_blocks(source: Source, reading: Reading, on_skip: Callable[[str], None] | None = None) -> Iterator[Block]:
    """The documents of one source as blocks; `on_skip` is told what was left out, and why."""
    skip = on_skip or (lambda _: None)
    if source.format == "jsonl":
        yield from _read_jsonl(source, reading, skip)
    elif reading.errors == "skip" and (why := _unreadable(source)):
        skip(why)
    else:
        yield from _read_text(source, reading)


@contextmanager
def _open(source: Source) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The file's plain bytes, and a function that says how far into the file on disk we are."""
    try:
        with source.path.open("rb") as raw:
            if source.path.suffix.lower() == ".gz":
                with gzip.GzipFile(fileobj=raw) as plain:
                    yield io.BufferedReader(plain), raw.tell
            else:
                yield raw, raw.tell
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{source.path} is not a whole gzip file: {error}", hint="fetch or pack it again") from None
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror or error}") from None


def _decoded(plain: IO[bytes], errors: str) -> Iterator[str]:
    # A byte order mark is no text; line ends are kept as they are.
    text = io.TextIOWrapper(plain, encoding="utf-8-sig", errors=errors, newline="")
    try:
        yield from iter(functools.partial(text.read, BLOCK_CHARS), "")
    finally:
        text.detach()  # the file below belongs to the caller


def _unreadable(source: Source) -> str | None:
    """Why a text file cannot be read to its end; None if it can."""
    try:
        with _open(source) as (plain, _):
            for _block in _decoded(plain, "strict"):
                pass
    except UnicodeDecodeError:
        return f"{source.path} is not UTF-8 text"
    except DataError as error:
        return error.message
    return None


def _read_text(source: Source, reading: Reading) -> Iterator[Block]:
    errors = "replace" if reading.errors == "replace" else "strict"
    with _open(source) as (plain, tell):
        held: str | None = None
        try:
            for text in _decoded(plain, errors):
                if held is not None:
                    yield Block(held, prompt=False, last=False, position=tell())
                held = text
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason})",
                hint="--errors replace keeps it with bad bytes replaced, --errors skip leaves the file out",
            ) from None
        if held is not None:  # an empty file is no document
            yield Block(held, prompt=False, last=True, position=source.bytes)


class _BadLineError(Exception):
    """A JSONL line that cannot be used, and why."""


def _read_jsonl(source: Source, reading: Reading, skip: Callable[[str], None]) -> Iterator[Block]:
    with _open(source) as (plain, tell):
        for number, line in enumerate(_lines(plain), start=1):
            if not line.strip():
                continue
            try:
                prompt, text = _fields(line, reading)
            except _BadLineError as bad:
                if reading.errors == "skip":
                    skip(f"{source.path} line {number}: {bad}")
                    continue
                raise DataError(
                    f"{source.path} line {number}: {bad}",
                    hint="--errors skip leaves such lines out; --text-field, --prompt-field name fields",
                ) from None
            if prompt:
                yield Block(prompt, prompt=True, last=False, position=tell())
            if prompt or text:
                yield Block(text, prompt=False, last=True, position=tell())


def _lines(plain: Iterable[bytes]) -> Iterator[bytes]:
    for index, line in enumerate(plain):
        yield line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line


def _fields(line: bytes, reading: Reading) -> tuple[str, str]:
    """The prompt (empty when there is none) and the text of one line."""
    replace = reading.errors == "replace"
    try:
        record = json.loads(line.decode("utf-8", "replace" if replace else "strict"))
    except UnicodeDecodeError as error:
        raise _BadLineError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _BadLineError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise _BadLineError("JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise _BadLineError(f"a JSON {type(record).__name__}, not an object")
    prompt = "" if reading.prompt_field is None else _field(record, reading.prompt_field, replace)
    return prompt, _field(record, reading.text_field, replace)


def _field(record: dict[str, object], name: str, replace: bool) -> str:
    if name not in record:
        raise _BadLineError(f"no field {name!r}; it has {', '.join(sorted(record)) or 'none'}")
    value = record[name]
    if not isinstance(value, str):
        raise _BadLineError(f"field {name!r} is {'null' if value is None else type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which is no character
        if not replace:
            raise _BadLineError(f"field {name!r} holds half a surrogate pair") from None
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value
