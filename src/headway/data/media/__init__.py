"""Images and video as exact, versioned datasets: original bytes in shards, samples by number, decoding.

`build_media` builds a dataset, `open_reader` opens the data of a recipe: `MediaOrder.numbers` says which samples a
step has, `MediaReader.read` decodes them. `sample_spec` is the definition of a sample. Nothing here imports torch.
"""

from headway.data.media.build import MediaOptions, MediaProgress, MediaResult, build_media
from headway.data.media.dataset import Clip, MediaDataset, MediaIndex, open_media
from headway.data.media.filters import MediaFilters
from headway.data.media.manifest import MediaManifest, is_media, read_media_manifest
from headway.data.media.order import MediaOrder, SampleSpec, media_order, sample_spec
from headway.data.media.pool import PooledReader
from headway.data.media.processes import DecoderLimits, in_processes
from headway.data.media.reader import MediaBatch, MediaReader, open_reader

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
