"""The jobs of `headway up --demo`: two tenants on three emulated nodes, and a job that preempts others."""

from pathlib import Path
from typing import Any

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.scripts import inherited_environment
from headway.cluster.service.plane import ControlPlane

DEMO_SHAPE, DEMO_SPEED = "3x4", 60.0
DEMO_TENANTS: list[dict[str, Any]] = [{"name": "vision", "guarantee": 6}, {"name": "nlp", "guarantee": 6}]
_SAVES = 'trap "echo saved; exit 75" USR1; echo "start $HEADWAY_START"; for i in $(seq $0); do sleep 0.5; done'
"""A job that saves and asks to be restarted when it is told to stop; its argument is its length in half seconds."""


def submit_demo(plane: ControlPlane, folder: Path) -> None:
    """Queue the jobs of the demo, once per database."""
    for number, (name, tenant, machines, gpus, priority, length) in enumerate(
        (
            ("pretrain", "vision", 2, 4, 0, 240),
            ("sweep-a", "vision", 1, 2, 0, 120),
            ("sweep-b", "vision", 1, 2, 0, 120),
            ("tune", "nlp", 1, 4, 5, 40),
            ("urgent", "nlp", 2, 4, 10, 30),
            ("eval", "nlp", 1, 1, 0, 20),
        )
    ):
        logs = folder / "demo" / name
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        request = LaunchRequest(
            name,
            ("bash", "-c", _SAVES, str(length)),
            logs,
            machines=machines,
            gpus=gpus,
            grace_s=10,
            environment=inherited_environment(),
            site={
                "tenant": tenant,
                "priority": str(priority),
                "preemptible": "yes" if priority < 10 else "no",
                "restart_s": "60",
            },
        )
        plane.submit(request, key=f"demo-{number}")
