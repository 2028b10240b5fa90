"""Sends a run's record to other trackers while it trains, from a process that cannot delay or end the run."""

from headway.track.trackers.base import RunFacts, Scalars, Sent, State, Tracker, Unsendable

__all__ = ["RunFacts", "Scalars", "Sent", "State", "Tracker", "Unsendable"]
