"""Time limits that leave a start no time for a step are refused, with the limit that would be enough."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.engine import check_limit
from headway.cluster.engines.kubernetes.engine import job_sets
from headway.cluster.engines.local.engine import LocalEngine
from headway.cluster.engines.slurm.engine import SlurmEngine
from headway.errors import UsageError

JOB = LaunchRequest("x", ("true",), Path("/x"), startup_s=31, grace_s=60)


@pytest.mark.parametrize(
    ("limit_s", "early_s", "refused"),
    [(120, 60, True), (150, 60, True), (151, 60, False), (90, 0, True), (91, 0, False), (None, 60, False)],
)
def test_limit_must_hold_startup_a_step_and_grace(limit_s: float | None, early_s: float, refused: bool) -> None:
    request = replace(JOB, limit_s=limit_s)
    if not refused:
        check_limit(request, limit_s, early_s)
        return
    with pytest.raises(UsageError) as raised:
        check_limit(request, limit_s, early_s)
    needed = 31 + 60 + early_s
    assert (
        f"a time limit of {limit_s} s cannot hold 31 s to start and take a step, 60 s of grace" in raised.value.message
    )
    assert raised.value.exit_status == 2
    assert f"set limit_s to {needed} or more" in str(raised.value.hint)
    check_limit(replace(request, limit_s=needed), needed, early_s)  # the hint helps


def test_shorter_grace_is_suggested_only_where_it_helps() -> None:
    for grace_s, hint in ((60, "or set grace_s to 59 or less"), (0.5, None)):
        with pytest.raises(UsageError) as raised:
            check_limit(replace(JOB, grace_s=grace_s, limit_s=31 + grace_s - 1), 31 + grace_s - 1)
        assert ("grace_s to" in str(raised.value.hint)) == (hint is not None)
        assert hint is None or hint in str(raised.value.hint)


def test_jobs_of_unknown_startup_are_not_refused() -> None:
    check_limit(replace(JOB, startup_s=0, limit_s=1), 1)


def test_every_engine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(JOB, folder=tmp_path, limit_s=80)
    with pytest.raises(UsageError, match="time limit of 80 s"):
        LocalEngine(tmp_path / "queue", cpus=1, gpus=0).launch(request)
    with pytest.raises(UsageError, match="time limit of 80 s"):
        job_sets(replace(request, site={"image": "i", "claim": "c", "mount": str(tmp_path)}))
    nodes = 'case "$*" in *Format=*) echo "n0|idle|8|1000|(null)|(null)|short*|none|";; *) echo "short*|2:00";; esac'
    (tmp_path / "sinfo").write_text(f"#!/bin/bash\n{nodes}\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UsageError, match="time limit of 120 s") as raised:  # its partition's, which is shorter
        SlurmEngine(tmp_path / "records").launch(replace(request, limit_s=3600))
    assert "60 s by which the signal may come early" in raised.value.message
    assert "use a partition that allows 151 s" in str(raised.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["sinfo"], "nothing is left behind"
