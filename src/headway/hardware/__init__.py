"""Hardware: chips, clusters and networks from data sheets, measured ceilings, and this machine's devices."""

from headway.hardware.ceilings import Ceilings, find_ceilings, read_ceilings, write_ceilings
from headway.hardware.chips import CHIPS, Chip, find_chip, known_chip, precision
from headway.hardware.cluster import Cluster, Level, default_cluster, load_cluster, parse_on
from headway.hardware.detect import Devices, devices, gpu_uuids, this_cpu

__all__ = [
    "CHIPS",
    "Ceilings",
    "Chip",
    "Cluster",
    "Devices",
    "Level",
    "default_cluster",
    "devices",
    "find_ceilings",
    "find_chip",
    "gpu_uuids",
    "known_chip",
    "load_cluster",
    "parse_on",
    "precision",
    "read_ceilings",
    "this_cpu",
    "write_ceilings",
]
