"""Stream gzip and Zstandard files as plain bytes; the file name decides."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headway.errors import DamagedData, DataError

COMPRESSED_SUFFIXES = (".gz", ".zst")

_READ_BYTES = 1 << 14
"""Compressed bytes per read: text compresses to a tenth, so that some 160 kB come out."""
_LARGEST_WINDOW = 1 << 31
"""What `zstd --long=31` needs, as in some published collections; other files allocate far less."""


@contextmanager
def open_plain(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file's plain bytes, and a function that returns the position in the file on disk."""
    try:
        with path.open("rb") as raw:
            match path.suffix.lower():
                case ".gz":
                    with gzip.GzipFile(fileobj=raw) as plain:
                        yield io.BufferedReader(plain), raw.tell
                case ".zst":
                    yield io.BufferedReader(_ZstReader(raw, path), 1 << 18), raw.tell
                case _:
                    yield raw, raw.tell
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        kind = "zst" if path.suffix.lower() == ".zst" else "gzip"
        raise DamagedData(f"{path} is not a complete {kind} file: {error}", hint="download it again") from None
    except OSError as error:
        raise DamagedData(f"cannot read {path}: {error.strerror or error}") from None


class _ZstReader(io.RawIOBase):
    """Plain bytes of a file of one or more Zstandard frames.

    The library's own reader does not notice a truncated file, so frames are tracked here.
    """

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        super().__init__()
        library = _zstandard(path)
        self._raw, self._error = raw, library.ZstdError
        self._decompressor = library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        self._frame: Any = None
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain and self._fill():
            pass
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _fill(self) -> bool:
        """Decompress some more; return False at the end of the file."""
        self._compressed = self._compressed or self._raw.read(_READ_BYTES)
        if not self._compressed:
            if self._frame is not None:
                raise EOFError("it ends inside a frame")
            return False
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            self._plain = memoryview(self._frame.decompress(self._compressed))
        except self._error as error:
            raise EOFError(str(error)) from None
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        self._frame = None if self._frame.eof else self._frame
        return True


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"cannot read {path}: the zstandard package is not installed",
            hint="pip install 'headway[zst]', or decompress it",
        ) from None
    return zstandard
