"""Measures a device's ceilings; runs as separate processes (`python -m headway.measure.device`)."""

__all__: list[str] = []
