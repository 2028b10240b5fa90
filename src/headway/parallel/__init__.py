"""How a model is put onto several devices."""

from headway.parallel.apply import apply, precision, reshard, sync_gradients, total_norm
from headway.parallel.world import World, join, leave

__all__ = ["World", "apply", "join", "leave", "precision", "reshard", "sync_gradients", "total_norm"]
