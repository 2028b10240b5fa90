"""Images and video as exact, versioned datasets: original bytes in shards, samples by number, decoding.

`build_media` builds a dataset, `open_reader` opens the data of a recipe: `MediaOrder.numbers` says which samples a
step has, `MediaReader.read` decodes them. `sample_spec` is the definition of a sample. Nothing here imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.data.media.build import MediaOptions, MediaProgress, MediaResult, build_media
    from headway.data.media.dataset import Clip, MediaDataset, MediaIndex, open_media
    from headway.data.media.filters import MediaFilters
    from headway.data.media.manifest import MediaManifest, is_media, read_media_manifest
    from headway.data.media.order import MediaOrder, media_order, sample_spec
    from headway.data.media.pool import PooledReader
    from headway.data.media.processes import DecoderLimits, in_processes
    from headway.data.media.reader import MediaBatch, MediaReader, open_reader
    from headway.data.media.specs import SampleSpec

__all__ = [
    "Clip",
    "DecoderLimits",
    "MediaBatch",
    "MediaDataset",
    "MediaFilters",
    "MediaIndex",
    "MediaManifest",
    "MediaOptions",
    "MediaOrder",
    "MediaProgress",
    "MediaReader",
    "MediaResult",
    "PooledReader",
    "SampleSpec",
    "build_media",
    "in_processes",
    "is_media",
    "media_order",
    "open_media",
    "open_reader",
    "read_media_manifest",
    "sample_spec",
]

_LAZY = {
    "Clip": "dataset",
    "DecoderLimits": "processes",
    "MediaBatch": "reader",
    "MediaDataset": "dataset",
    "MediaFilters": "filters",
    "MediaIndex": "dataset",
    "MediaManifest": "manifest",
    "MediaOptions": "build",
    "MediaOrder": "order",
    "MediaProgress": "build",
    "MediaReader": "reader",
    "MediaResult": "build",
    "PooledReader": "pool",
    "SampleSpec": "specs",
    "build_media": "build",
    "in_processes": "processes",
    "is_media": "manifest",
    "media_order": "order",
    "open_media": "dataset",
    "open_reader": "reader",
    "read_media_manifest": "manifest",
    "sample_spec": "order",
}
"""Names that are imported when they are used, and from which module: decoder processes need few of them."""


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name in _LAZY:
        return getattr(importlib.import_module(f"headway.data.media.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'headway.data.media' has no attribute {name!r}")
