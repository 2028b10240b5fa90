"""From text to batches: sources, tokenizer, versioned shards, sample order and the loader.

`build_dataset` builds a dataset, `open_dataset` opens it, `split_windows` and `window_order` decide which windows are
trained on and when, `Loader` reads them. `corpus.open_corpus` opens the data of a recipe. Nothing here imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.data.build import BuildOptions, BuildProgress, BuildResult, build_dataset
    from headway.data.loader import MASKED, Loader, WindowReader
    from headway.data.manifest import read_manifest
    from headway.data.order import Split, count_windows, held_out, order_at, split_windows, window_order
    from headway.data.shards import Dataset, check_version, open_dataset, split_dataset, verify
    from headway.data.sources import ReadOptions
    from headway.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
    from headway.data.writer import ShardWriter, finish_dataset

__all__ = [
    "MASKED",
    "BuildOptions",
    "BuildProgress",
    "BuildResult",
    "Dataset",
    "Loader",
    "ReadOptions",
    "ShardWriter",
    "Split",
    "TextTokenizer",
    "WindowReader",
    "build_dataset",
    "check_version",
    "count_windows",
    "finish_dataset",
    "held_out",
    "load_tokenizer",
    "open_dataset",
    "order_at",
    "read_manifest",
    "split_dataset",
    "split_windows",
    "train_tokenizer",
    "verify",
    "window_order",
]

_LAZY = {
    "BuildOptions": "build",
    "BuildProgress": "build",
    "BuildResult": "build",
    "Dataset": "shards",
    "Loader": "loader",
    "MASKED": "loader",
    "ReadOptions": "sources",
    "ShardWriter": "writer",
    "Split": "order",
    "TextTokenizer": "tokenizer",
    "WindowReader": "loader",
    "build_dataset": "build",
    "check_version": "shards",
    "count_windows": "order",
    "finish_dataset": "writer",
    "held_out": "order",
    "load_tokenizer": "tokenizer",
    "open_dataset": "shards",
    "order_at": "order",
    "read_manifest": "manifest",
    "split_dataset": "shards",
    "split_windows": "order",
    "train_tokenizer": "tokenizer",
    "verify": "shards",
    "window_order": "order",
}
"""Names that are imported when they are used, and from which module: decoder processes need few of them."""


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name in _LAZY:
        return getattr(importlib.import_module(f"headway.data.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'headway.data' has no attribute {name!r}")
