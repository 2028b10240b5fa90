"""Import of Slurm's sacct output as a job trace."""

from pathlib import Path

import numpy as np
import pytest

from headway.cluster.simulate import import_sacct, read_trace
from headway.errors import UsageError

HEAD = "JobID|Submit|ElapsedRaw|ReqTRES|AllocTRES|Account|User|TimelimitRaw|State"
LINES = [
    "12|2026-03-01T10:00:30|600|cpu=8,gres/gpu=4|cpu=8,gres/gpu=4|vision|ada|120|COMPLETED",
    "12.batch|2026-03-01T10:00:30|600||cpu=8,gres/gpu=4|vision|||COMPLETED",
    "11|2026-03-01T10:00:00|50|gres/gpu:a100=16|billing=64,gres/gpu:a100=16,node=2|speech|bob|UNLIMITED|FAILED",
    "13|2026-03-01T10:01:00|900|cpu=2|cpu=2|vision|ada|60|COMPLETED",
    "14|2026-03-01T10:02:00|0|gres/gpu=8||vision|ada|60|CANCELLED by 1000",
    "15|2026-03-01T10:03:00|77|gres/gpu=1|gres/gpu=1|vision|ada|60|RUNNING",
    "16_3|2026-03-01T11:00:00|5|gres/gpu=1|gres/gpu=1|vision|ada|0|PREEMPTED",
    "16_3|2026-03-01T11:00:00|25|gres/gpu=1|gres/gpu=1|vision|ada|60|COMPLETED",
]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "sacct.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_gpu_jobs_that_ran_and_ended_are_imported(tmp_path: Path) -> None:
    out = tmp_path / "trace.csv"
    imported = import_sacct(write(tmp_path, HEAD, *LINES), out)
    assert (imported.jobs, imported.without_gpus, imported.never_ran, imported.unfinished) == (4, 1, 1, 1)
    trace = read_trace(out)
    assert trace.names == ("11", "12", "16_3", "16_3-2")
    assert trace.submit_s.tolist() == [0, 30, 3600, 3600]
    assert trace.duration_s.tolist() == [50, 600, 5, 25]
    assert trace.gpus.tolist() == [16, 4, 1, 1]
    assert [trace.tenants[row] for row in trace.tenant] == ["speech", "vision", "vision", "vision"]
    np.testing.assert_array_equal(trace.limit_s, [np.nan, 7200, np.nan, 3600])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["JobID|Submit", "1|2026-03-01T10:00:00"], "line 1 lacks ElapsedRaw"),
        (["JobID|Submit|ElapsedRaw", "1|2026-03-01T10:00:00|5"], "neither ReqTRES nor AllocTRES"),
        ([HEAD, LINES[0].replace("|600|", "|ten|", 1)], "line 2: ElapsedRaw is 'ten'"),
        ([HEAD, LINES[2], LINES[0].replace("2026-03-01T10:00:30", "Unknown")], "line 3: Submit is 'Unknown'"),
        ([HEAD, *LINES[:2], LINES[0][:40]], "line 4 does not have as many values"),
        ([HEAD, LINES[0] + "|more"], "line 2 does not have as many values"),
        ([HEAD, LINES[3]], "is a GPU job that ran and ended"),
        ([HEAD], "is a GPU job that ran and ended"),
        ([""], "line 1 lacks JobID"),
    ],
)
def test_invalid_sacct_output_is_rejected(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        import_sacct(write(tmp_path, *lines), tmp_path / "trace.csv")
    assert not (tmp_path / "trace.csv").exists()


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        import_sacct(tmp_path / "none", tmp_path / "trace.csv")
