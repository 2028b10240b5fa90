"""Encode batches of chats in several processes: each reads the sources, and encodes every n-th batch.

A process gets its job as JSON on its standard input, and writes frames to its standard output: a line of JSON, and the
bytes of the arrays that it describes. Nothing is pickled.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.data.chat_batches import BatchEncoder, EncodedBatch, EncodedUnit, Refusal, read_batches
from headway.data.chat_template import ChatTemplate
from headway.data.chat_tokens import Encode, EncodedSample, SampleEncoder, end_pattern
from headway.data.sources import ReadOptions, SourceFile
from headway.data.template_layout import LayoutMismatch, SampleMaker
from headway.data.tiktoken_encoder import EncodersDiffer, fast_encoder
from headway.data.tokenizer import TextTokenizer, load_tokenizer
from headway.errors import DamagedData, DataError


@dataclass(frozen=True)
class ChatJob:
    """What is encoded, and how."""

    model: str
    """Folder with the tokenizer."""
    template: ChatTemplate
    files: tuple[SourceFile, ...]
    reading: ReadOptions
    fast: bool
    """Whether tiktoken encodes."""
    traced: bool = True
    """Whether layouts of the template save rendering."""
    prompts: bool = False
    """Whether the rows are prompts for reinforcement learning."""

    def to_json(self) -> str:
        """Serialize the job for a process."""
        values = asdict(self)
        values["files"] = [{**file, "path": str(file["path"])} for file in values["files"]]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> "ChatJob":
        """Restore a job."""
        values = json.loads(text)
        files = tuple(SourceFile(**{**file, "path": Path(file["path"])}) for file in values.pop("files"))
        template, reading = ChatTemplate(**values.pop("template")), ReadOptions(**values.pop("reading"))
        return cls(template=template, reading=reading, files=files, **values)


def encoded_batches(
    job: ChatJob, tokenizer: TextTokenizer, encode: Encode, index: int = 0, processes: int = 1
) -> Iterator[EncodedBatch]:
    """Yield every batch of a job whose number is `index` modulo `processes`."""
    maker = SampleMaker(job.template, end_pattern(tokenizer), job.traced, job.prompts)
    encoder = BatchEncoder(maker, SampleEncoder(tokenizer, encode))
    own = read_batches(job.files, job.reading, lambda number: number % processes == index, prompts=job.prompts)
    for batch in own:
        yield encoder.encode(batch)


@contextmanager
def in_processes(job: ChatJob, count: int) -> Iterator[Iterator[EncodedBatch]]:
    """Yield the batches of a job in order, encoded by so many processes, which are ended afterwards."""
    # One native thread each: they share the cores already.
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "headway.data.chat_processes"]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            worker = subprocess.Popen(
                [*command, str(index), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            workers.append(worker)
            assert worker.stdin is not None
            with worker.stdin:
                worker.stdin.write(job.to_json().encode())
        yield _in_turn(workers)
    finally:
        for worker in workers:
            worker.kill()
            assert worker.stdout is not None
            worker.stdout.close()
            worker.wait()


def _in_turn(workers: list[subprocess.Popen[bytes]]) -> Iterator[EncodedBatch]:
    """Yield frames, one from each process in turn, until one has no more."""
    turn = 0
    while True:
        worker = workers[turn % len(workers)]
        assert worker.stdout is not None
        batch = read_frame(worker.stdout)
        if batch is None:
            return
        yield batch
        turn += 1


# -- frames

_ARRAYS = (("tokens", "<u4"), ("lengths", "<i8"), ("spans", "<u4"), ("span_counts", "<i8"))


def write_frame(out: IO[bytes], batch: EncodedBatch) -> None:
    """Write a batch."""
    samples = [sample for unit in batch.units for sample in unit.samples]
    ids = [part for sample in samples for part in sample.ids]
    arrays = (
        np.concatenate(ids) if ids else np.zeros(0),
        np.array([sample.length for sample in samples]),
        np.array([span for sample in samples for span in sample.spans]).reshape(-1),
        np.array([len(sample.spans) for sample in samples]),
    )
    header = {
        "kind": batch.kind,
        "units": [[len(unit.samples), *unit[1:]] for unit in batch.units],
        "refused": batch.refused,
        "position": batch.position,
        "sizes": [len(array) for array in arrays],
    }
    out.write(json.dumps(header).encode() + b"\n")
    for array, (_, dtype) in zip(arrays, _ARRAYS, strict=True):
        out.write(array.astype(dtype).tobytes())
    out.flush()


def read_frame(source: IO[bytes]) -> EncodedBatch | None:
    """Read a batch; None if there are no more. Raise what the process failed with."""
    line = source.readline()
    if not line.endswith(b"\n"):
        raise DamagedData("a process that encodes chats ended", hint="was it killed for lack of memory?")
    header: dict[str, Any] = json.loads(line)
    match header.get("failed"):
        case "encoders":
            raise EncodersDiffer(header["message"])
        case "layout":
            raise LayoutMismatch(header["message"])
        case "data":
            message, hint = header["message"]
            raise DataError(message, hint=hint)
    if "end" in header:
        return None
    arrays = [
        np.frombuffer(_exactly(source, size * np.dtype(dtype).itemsize), dtype=dtype)
        for size, (_, dtype) in zip(header["sizes"], _ARRAYS, strict=True)
    ]
    tokens, lengths, spans, counts = arrays
    ends, span_ends = np.cumsum(lengths).tolist(), np.cumsum(counts).tolist()
    all_spans = [(start, end, role, bool(trained)) for start, end, role, trained in spans.reshape(-1, 4).tolist()]
    samples = iter(
        EncodedSample([tokens[start:end]], all_spans[first:last], end - start)
        for start, end, first, last in zip([0, *ends], ends, [0, *span_ends], span_ends, strict=False)
    )
    units = [EncodedUnit([next(samples) for _ in range(count)], *columns) for count, *columns in header["units"]]
    return EncodedBatch(header["kind"], units, [Refusal(*refusal) for refusal in header["refused"]], header["position"])


def _exactly(source: IO[bytes], size: int) -> bytes:
    content = source.read(size)
    if len(content) != size:
        raise DamagedData("a process that encodes chats ended", hint="was it killed for lack of memory?")
    return content


def main() -> None:
    """Encode this process's batches of the job on standard input."""
    gc.set_threshold(200_000)  # a batch is many small objects without cycles: collecting took a fifth of the time
    job = ChatJob.from_json(sys.stdin.read())
    index, processes = (int(word) for word in sys.argv[1:])
    out = sys.stdout.buffer

    def fail(kind: str, message: object) -> None:
        out.write(json.dumps({"failed": kind, "message": message}).encode() + b"\n")

    try:
        tokenizer = load_tokenizer(job.model, end_of_text=0, special_tokens=True)
        encode = fast_encoder(tokenizer).encode_batch if job.fast else tokenizer.encode_batch
        for batch in encoded_batches(job, tokenizer, encode, index, processes):
            write_frame(out, batch)
        out.write(b'{"end": true}\n')
    except EncodersDiffer as error:
        fail("encoders", str(error))
    except LayoutMismatch as error:
        fail("layout", str(error))
    except DataError as error:
        fail("data", [error.message, error.hint])


if __name__ == "__main__":
    main()
