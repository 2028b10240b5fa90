"""Models: plain modules, one file per family, independent of parallelism."""

from headway.models.decoder import Decoder, init_weights, initial_weight
from headway.models.families import empty_decoder
from headway.models.huggingface import load_into, read_weights, stored_weights, write_folder
from headway.models.kv_cache import KvCache, LayerCache

__all__ = [
    "Decoder",
    "KvCache",
    "LayerCache",
    "empty_decoder",
    "init_weights",
    "initial_weight",
    "load_into",
    "read_weights",
    "stored_weights",
    "write_folder",
]
