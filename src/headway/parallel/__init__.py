"""How a model is put onto several devices."""

from headway.parallel.apply import Spread, apply
from headway.parallel.gradients import finish_gradients, total_norm
from headway.parallel.world import World, join, leave, make_mesh

__all__ = ["Spread", "World", "apply", "finish_gradients", "join", "leave", "make_mesh", "total_norm"]
