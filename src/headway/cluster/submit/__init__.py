"""Runs and sweeps as jobs of an engine."""
