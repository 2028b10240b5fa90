"""A run of this machine's own queue: told to save and started again, it ends as one that was left alone."""

from pathlib import Path

import pytest
from engine_runs import EngineRun, demo, headway, left_alone

from conftest import Lived


@pytest.mark.slow
def test_a_run_of_two_workers_is_preempted(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engines.toml"
    file.write_text('[local]\ngrace_s = 30\nsetup = ["taskset -pc 0 $$ >/dev/null"]\n')  # a thread a worker
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    short = demo(dataset, parallel__shard=2)
    run = EngineRun.submitted(short, tmp_path / "runs", "local", on="cpux2")
    run.reaches(20, starts=1)
    assert headway("requeue", run.name, "--runs", str(run.root))
    status = run.ended()
    assert (status.state, status.starts) == ("finished", 2), run.told()
    assert "stopped on request, state saved" in run.line_with("stopped")
    lived, unharmed = Lived(run.folder, None), left_alone(short, tmp_path / "unharmed")
    assert (lived.chain, lived.digest) == (unharmed.chain, unharmed.digest), run.told()
    assert "all steps done" in headway("logs", run.name, "--runs", str(run.root))
    assert not run.lives()
