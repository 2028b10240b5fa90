"""Models: plain modules, one file per family, independent of parallelism."""

from headway.models.attention import LayerKvCache
from headway.models.decoder import Decoder, empty_cache, init_weights, initial_weight
from headway.models.families import empty_decoder
from headway.models.huggingface import load_into, read_weights, stored_weights, write_folder

__all__ = [
    "Decoder",
    "LayerKvCache",
    "empty_cache",
    "empty_decoder",
    "init_weights",
    "initial_weight",
    "load_into",
    "read_weights",
    "stored_weights",
    "write_folder",
]
