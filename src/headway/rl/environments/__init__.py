"""Multi-turn environments: what a user's class is given, what it returns, and how it is loaded."""

from headway.rl.environments.load import load_environment
from headway.rl.environments.turns import Environment, Reply, Turn

__all__ = ["Environment", "Reply", "Turn", "load_environment"]
