"""What `headway simulate --from-live` prints: a job or a policy, tried on the service's cluster as it is now."""

import tomllib
from pathlib import Path
from typing import Any

from headway.cli.text import duration, print_json
from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service.connection import connect
from headway.cluster.submit.commands import with_user
from headway.errors import UsageError

OF_JOB: dict[str, Any] = {
    "name": str,
    "machines": int,
    "gpus": int,
    "cpus": int,
    "memory_gib": (int, float),
    "limit_s": (int, float),
    "tenant": str,
    "priority": int,
    "preemptible": bool,
}
"""Keys of a job's file, as the options of headway submit, and their types."""
KINDS: dict[Any, str] = {str: "text", int: "a whole number", (int, float): "a number", bool: "true or false"}
FILE_HINT = "a file in TOML, such as one line: gpus = 4"


def try_live(root: Path, add: Path | None, policy: str | None, json: bool) -> None:
    """Print what a job or another policy would change."""
    if (add is None) == (policy is None):
        raise UsageError("--from-live tries one change", hint="--add JOB.toml, or --policy NAME")
    request = None if add is None else request_to_json(read_job(add))
    answer = connect(root).post("/api/v1/simulate", {"request": request, "policy": policy})
    if json:
        print_json(answer)
        return
    if answer["job"] is not None:
        print(f"it {answer['job']['state']}: {answer['job']['sentence']}")
        start = answer["job"]["start"]
        if start is not None:
            print(f"start {_within(start)}")
        for change in answer["job"]["instead"]:
            print(f"it would start now by {change['sentence']}")
    else:
        print(f"with policy {answer['policy']} from now on")
    if answer["stops"]:
        print(f"stops now: {', '.join(answer['stops'])}")
    if not answer["waiting"]:
        print("no job waits" if answer["job"] is None else "no other job waits")
    else:
        print(f"{'waiting job':24}{'start as it is':>28}{'after the change':>28}")
    for row in answer["waiting"]:
        name = f"{row['job']} ({row['name']})"
        print(f"{name:24}{_within(row['before']):>28}{_within(row['after']):>28}")


def read_job(file: Path) -> LaunchRequest:
    """Return the job of a file; UsageError for what is not understood."""
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", hint=FILE_HINT) from None
    except ValueError as error:
        raise UsageError(f"{file}: {error}", hint=FILE_HINT) from None
    for key, value in values.items():
        if key not in OF_JOB:
            raise UsageError(f"{file}: unknown key '{key}'", hint=f"known keys: {', '.join(OF_JOB)}")
        if not isinstance(value, OF_JOB[key]) or (isinstance(value, bool) and OF_JOB[key] is not bool):
            raise UsageError(f"{file}: {key} is {value!r}", hint=f"{KINDS[OF_JOB[key]]}, as for headway submit")
    site: dict[str, str] = {key: str(values[key]) for key in ("tenant", "priority") if key in values}
    site["preemptible"] = "yes" if values.get("preemptible", False) else "no"
    memory = values.get("memory_gib")
    return LaunchRequest(
        values.get("name", "added"),
        ("true",),
        Path("/"),
        machines=values.get("machines", 1),
        gpus=values.get("gpus", 0),
        cpus=values.get("cpus", 1),
        memory_bytes=None if memory is None else int(memory * 2**30),
        limit_s=values.get("limit_s"),
        site=with_user(site),
    )


def _within(start: dict[str, Any]) -> str:
    if start["p50_s"] is None:
        return "unknown"
    p90 = "?" if start["p90_s"] is None else duration(start["p90_s"])
    return f"within {duration(start['p50_s'])} to {p90}"
