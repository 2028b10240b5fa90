"""Rewards: functions of an answer, ours by a short name, a user's own by `package.module:name`."""

from headway.rl.rewards.answer import Answer
from headway.rl.rewards.names import REWARDS, RewardFunction, load_reward

__all__ = ["REWARDS", "Answer", "RewardFunction", "load_reward"]
