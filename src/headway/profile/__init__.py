"""Profile: what a device does in fact. Run as processes; `headway.profile.measure` takes its ceilings."""

__all__: list[str] = []
