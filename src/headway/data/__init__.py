"""Text to batches: sources, a tokenizer, shards with a version, the order of samples, and the loader.

`build` makes a data set, `open_dataset` opens it, `split_windows` and `order` say which windows are trained
on and when, `Loader` reads them. `corpus.open_corpus` opens all that a recipe names. Nothing here imports torch.
"""

from headway.data.build import BuildOptions, BuildProgress, BuildResult, build_dataset
from headway.data.loader import MASKED, Batch, Loader, WindowReader
from headway.data.manifest import DataFile, DatasetManifest, read_manifest
from headway.data.order import Split, count_windows, held_out, order_at, split_windows, window_order
from headway.data.shards import Dataset, Document, check_version, open_dataset, split_dataset, verify
from headway.data.sources import ReadOptions, SourceFile, find_sources
from headway.data.tokenizer import END_OF_TEXT, TextTokenizer, load_tokenizer, train_tokenizer
from headway.data.writer import ShardWriter, finish_dataset

__all__ = [
    "END_OF_TEXT",
    "MASKED",
    "Batch",
    "BuildOptions",
    "BuildProgress",
    "BuildResult",
    "DataFile",
    "Dataset",
    "DatasetManifest",
    "Document",
    "Loader",
    "ReadOptions",
    "ShardWriter",
    "SourceFile",
    "Split",
    "TextTokenizer",
    "WindowReader",
    "build_dataset",
    "check_version",
    "count_windows",
    "find_sources",
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
