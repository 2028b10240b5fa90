"""Parallelism: how a model is distributed over devices."""

from headway.parallel.apply import parallelize_model
from headway.parallel.gradients import finish_gradients, total_norm
from headway.parallel.parallel_model import ParallelModel
from headway.parallel.world import World, join, leave, make_mesh

__all__ = [
    "ParallelModel",
    "World",
    "finish_gradients",
    "join",
    "leave",
    "make_mesh",
    "parallelize_model",
    "total_norm",
]
