"""From text to batches: sources, tokenizer, versioned shards, sample order and the loader.

`build_dataset` builds a dataset, `open_dataset` opens it, `split_windows` and `window_order` decide which windows are
trained on and when, `Loader` reads them. `corpus.open_corpus` opens the data of a recipe. Nothing here imports torch.
"""

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
