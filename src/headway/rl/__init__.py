"""Reinforcement learning, without torch: rollouts, rewards and advantages.

The model samples in `train/rollouts.py`; losses are in `train/objectives/policy.py`; rewards run in processes of their
own.
"""
