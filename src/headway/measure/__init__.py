"""Profile: what a device does in fact. Run as processes; `headway.measure.device` takes its ceilings."""

__all__: list[str] = []
