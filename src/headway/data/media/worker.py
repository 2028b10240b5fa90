"""A process that decodes, with limits of its own: damaged or hostile files can hurt nothing else.

Requests are lines of JSON on standard input. Each is answered on standard output by a line of JSON, and for samples by
their pixels. Nothing is pickled.
"""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headway.data.media.dataset import MediaDataset, open_media
from headway.data.media.decode import Undecodable, decode_samples
from headway.data.media.sources import MediaSource
from headway.data.media.specs import SampleSpec
from headway.errors import DataError

LOOK_S = 2.0
"""How often a process looks whether its parent is there."""


def main() -> None:
    """Answer requests until there are no more."""
    memory_mb, parent = (int(word) for word in sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_without_parent, args=(parent,), daemon=True).start()
    out = sys.stdout.buffer
    dataset: MediaDataset | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if "examine" in request:
                answer: dict[str, Any] = examined(request)
                parts: list[memoryview] = []
            else:
                if dataset is None or str(dataset.path) != request["dataset"]:
                    dataset = open_media(request["dataset"], verify="sizes")  # the parent has verified it
                answer, parts = decoded(dataset, request)
        except MemoryError:
            answer, parts = {"failed": f"decoding it needs more than {memory_mb:,} MB"}, []
        except (Undecodable, DataError) as error:
            answer, parts = {"failed": error.message}, []
        out.write(json.dumps(answer).encode() + b"\n")
        for part in parts:
            out.write(part)
        out.flush()


def examined(request: dict[str, Any]) -> dict[str, Any]:
    """Examine a file."""
    from headway.data.media.examiner import examine_file  # processes that only decode start faster without it

    source = request["examine"]
    file = MediaSource(source["name"], Path(source["root"]), source["bytes"], source["mtime_ns"])
    return examine_file(request["kind"], file).to_json()


def decoded(dataset: MediaDataset, request: dict[str, Any]) -> tuple[dict[str, Any], list[memoryview]]:
    """Decode samples of one clip."""
    specs = [spec_from_json(values) for values in request["specs"]]
    clip = dataset.clip(specs[0].clip)
    pixels = decode_samples(dataset.kind, dataset.content(clip), clip, specs)
    return {"shapes": [sample.shape for sample in pixels]}, [sample.data.cast("B") for sample in pixels]


def spec_from_json(values: list[Any]) -> SampleSpec:
    """Restore a sample."""
    return SampleSpec._make(tuple(value) if isinstance(value, list) else value for value in values)


def _end_without_parent(parent: int) -> None:
    """End this process when its parent is gone, whatever a decoder is doing."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
