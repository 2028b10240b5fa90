"""What `hw.log` takes besides numbers: images, audio, tables and artifacts, as the bytes of ordinary files.

hw.log({"attention": hw.Image(array, caption="layer 3")})      PNG, or the file as it is
hw.log({"sample": hw.Audio(samples, rate=16_000)})             WAV, 16 bits
hw.log({"worst": hw.Table(["prompt", "loss"], rows)})          JSON: {"columns": [...], "rows": [[...], ...]}
hw.log({"vocabulary": hw.Artifact("vocab.txt")})               a copy of the file
"""

import io
import math
import struct
import wave
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic_core import to_json

from headway.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MOST_ROWS = 10_000
"""Rows of a table."""
MOST_BYTES = 256 << 20
"""Bytes of a file."""

MediaKind: TypeAlias = Literal["image", "audio", "table", "artifact"]

_IMAGES = {b"\x89PNG\r\n\x1a\n": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}
"""Beginnings of image files, with their suffix."""


class LoggedFile(ABC):
    """A value that becomes a file; the caller's data is copied when it is made, and encoded in another thread."""

    kind: MediaKind
    caption: str

    @abstractmethod
    def encode(self) -> tuple[str, bytes]:
        """Return the suffix and the bytes of its file."""

    @property
    @abstractmethod
    def size(self) -> int:
        """About how many bytes wait in memory until it is written."""


@dataclass(frozen=True, init=False)
class Image(LoggedFile):
    """A picture: an array (height, width[, 1, 3 or 4]) of bytes or of floats from 0 to 1, a Pillow image, or a file."""

    kind = "image"
    caption: str

    def __init__(self, picture: Any, caption: str = "") -> None:
        object.__setattr__(self, "caption", str(caption))
        if isinstance(picture, str | Path):
            data = _read(Path(picture), "image")
            suffix = next((suffix for magic, suffix in _IMAGES.items() if data.startswith(magic)), None)
            if suffix is None:
                raise UsageError(f"{picture} is no PNG, JPEG, GIF or WebP file", hint="convert it, or log an array")
            object.__setattr__(self, "_file", (suffix, data))
        else:
            object.__setattr__(self, "_pixels", _pixels(picture))

    def encode(self) -> tuple[str, bytes]:
        """Return a PNG, or the file as it was given."""
        given: tuple[str, bytes] | None = getattr(self, "_file", None)
        return given or (".png", png(self._pixels))  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        """The bytes of its pixels or file."""
        given: tuple[str, bytes] | None = getattr(self, "_file", None)
        return len(given[1]) if given else int(self._pixels.nbytes)  # type: ignore[attr-defined]


@dataclass(frozen=True, init=False)
class Audio(LoggedFile):
    """A sound: samples (time[, channels]) as floats from -1 to 1 or 16-bit integers, and their rate in Hz."""

    kind = "audio"
    caption: str

    def __init__(self, samples: Any, rate: int, caption: str = "") -> None:
        import numpy as np

        array = to_array(samples, "Audio")
        if array.ndim not in (1, 2) or not array.size or (array.ndim == 2 and array.shape[1] > 16):
            raise UsageError(f"Audio has shape {array.shape}", hint="(time,) or (time, channels)")
        if not (isinstance(rate, int) and 1 <= rate <= 1 << 20):
            raise UsageError(f"Audio has rate {rate!r}", hint="samples per second, such as 16000")
        if array.dtype.kind == "f":
            array = np.rint(np.clip(np.nan_to_num(array.astype(np.float64)), -1, 1) * 32767)
        elif array.dtype != np.int16:
            raise UsageError(f"Audio has samples of type {array.dtype}", hint="floats from -1 to 1, or int16")
        object.__setattr__(self, "caption", str(caption))
        object.__setattr__(self, "_samples", np.ascontiguousarray(array.reshape(len(array), -1), "<i2"))
        object.__setattr__(self, "_rate", rate)

    def encode(self) -> tuple[str, bytes]:
        """Return a WAV file."""
        samples: npt.NDArray[np.int16] = self._samples  # type: ignore[attr-defined]
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(samples.shape[1])
            file.setsampwidth(2)
            file.setframerate(self._rate)  # type: ignore[attr-defined]
            file.writeframes(samples.tobytes())
        return ".wav", out.getvalue()

    @property
    def size(self) -> int:
        """The bytes of its samples."""
        return int(self._samples.nbytes)  # type: ignore[attr-defined]


@dataclass(frozen=True, init=False)
class Table(LoggedFile):
    """Rows of numbers, texts, booleans and None under named columns."""

    kind = "table"
    caption: str

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> None:
        names = [str(column) for column in columns]
        if len(rows) > MOST_ROWS:
            raise UsageError(f"Table has {len(rows):,} rows", hint=f"at most {MOST_ROWS:,}; log more as an Artifact")
        wrong = next((number for number, row in enumerate(rows) if len(row) != len(names)), None)
        if wrong is not None:
            raise UsageError(f"Table has {len(names)} columns, but row {wrong} has {len(rows[wrong])} values")
        cells = [[_cell(value) for value in row] for row in rows]
        object.__setattr__(self, "caption", str(caption))
        object.__setattr__(self, "_json", to_json({"columns": names, "rows": cells}, inf_nan_mode="null"))

    def encode(self) -> tuple[str, bytes]:
        """Return JSON."""
        return ".json", self._json  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        """The bytes of its JSON."""
        return len(self._json)  # type: ignore[attr-defined]


@dataclass(frozen=True, init=False)
class Artifact(LoggedFile):
    """Any file; a copy of it is kept with the run, and its sha256."""

    kind = "artifact"
    caption: str

    def __init__(self, file: str | Path, caption: str = "") -> None:
        path = Path(file)
        object.__setattr__(self, "caption", str(caption) or path.name)
        object.__setattr__(self, "_data", _read(path, "artifact"))
        object.__setattr__(self, "_suffix", path.suffix if path.suffix[1:].isalnum() and path.suffix.isascii() else "")

    def encode(self) -> tuple[str, bytes]:
        """Return the file's bytes."""
        return self._suffix, self._data  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self._data)  # type: ignore[attr-defined]


def to_number(value: Any) -> float | None:
    """Return a number, a bool, or a NumPy or torch scalar as a float; None for anything else."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "item"):
        try:
            return float(value.item())
        except (TypeError, ValueError, RuntimeError):
            return None
    return None


def to_array(value: Any, what: str) -> "npt.NDArray[Any]":
    """Return a copy of an array, a tensor on any device, or nested lists, as an array of numbers."""
    import numpy as np

    if hasattr(value, "detach"):  # a torch tensor; this module does not import torch
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) in ("torch.bfloat16", "torch.float16") else value).numpy()
    try:
        array = np.array(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{what} is no array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{what} has values of type {array.dtype}", hint="numbers are needed")
    return array


def png(pixels: "npt.NDArray[np.uint8]") -> bytes:
    """Return an array (height, width, 1, 3 or 4) of bytes as a PNG file."""
    height, width, channels = pixels.shape
    color = {1: 0, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: the row is stored unfiltered
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def _pixels(picture: Any) -> "npt.NDArray[np.uint8]":
    import numpy as np

    if hasattr(picture, "convert") and hasattr(picture, "mode"):  # Pillow's
        picture = picture if picture.mode in ("L", "RGB", "RGBA") else picture.convert("RGB")
    array = to_array(picture, "Image")
    array = array[:, :, None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        raise UsageError(f"Image has shape {array.shape}", hint="(height, width), or with 1, 3 or 4 channels last")
    if array.dtype.kind == "f":
        array = np.rint(np.clip(np.nan_to_num(array), 0, 1) * 255)
    elif array.dtype.kind == "b":
        array = array * np.uint8(255)
    elif array.dtype != np.uint8 and (int(array.min()) < 0 or int(array.max()) > 255):
        raise UsageError("Image has values outside of 0 to 255", hint="floats from 0 to 1, or bytes")
    return np.ascontiguousarray(array, np.uint8)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    number = to_number(value)
    return str(value) if number is None else number


def _read(path: Path, what: str) -> bytes:
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise UsageError(f"{what} {path} has {size:,} bytes", hint=f"at most {MOST_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from None
