"""Examine files of images or video on the cores of a Ray cluster: the same dataset, from more cores.

Tasks receive the bytes of a file and return numbers, so that the cluster needs no access to the files.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from headway.cluster.engines.ray.engine import RayEngine, ray_errors
from headway.data.media.examiner import Examined, examine_content
from headway.data.media.manifest import Kind
from headway.data.media.sources import MediaSource

AHEAD_PER_CORE = 2
"""Files in flight per core: one being decoded, one on its way."""


def ray_examiners(engine: RayEngine) -> Callable[[Kind, Sequence[MediaSource]], Iterator[Examined]]:
    """Return what examines files on a cluster, for `build_media`."""

    def examine(kind: Kind, sources: Sequence[MediaSource]) -> Iterator[Examined]:
        if not sources:
            return
        ray = engine.connect(start=True)
        most = AHEAD_PER_CORE * max(1, sum(machine.cpus for machine in engine.inventory()))
        task = ray.remote(num_cpus=1)(examine_bytes)
        waiting, pending = iter(sources), set[Any]()
        try:
            while True:
                for source in islice(waiting, most - len(pending)):
                    try:
                        pending.add(task.remote(kind, source.name, source.path.read_bytes()))
                    except OSError as error:
                        yield Examined(source.name, refused=f"it cannot be read: {error.strerror}")
                if not pending:
                    return
                with ray_errors(ray):
                    done, _ = ray.wait(list(pending), num_returns=1)
                    pending -= set(done)
                    results = ray.get(done)
                yield from map(Examined.from_json, results)
        finally:
            for left in pending:
                ray.cancel(left)

    return examine


def examine_bytes(kind: Kind, name: str, content: bytes) -> dict[str, Any]:
    """The task: decode a file and return what is known of it, as JSON has it."""
    return examine_content(kind, name, content).to_json()
