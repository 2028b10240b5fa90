"""Machines that a run does without."""

import time

from headway.cli.agent import _tell_engine
from headway.cluster.engines.engine import read_exit_report
from headway.track.run_folder import RunFolder
from headway.track.suspects import note_suspect, read_suspects


def test_suspects_expire_after_a_day_and_need_valid_names(tmp_path):
    run = RunFolder(tmp_path)
    assert read_suspects(tmp_path, 1e9) == {}
    note_suspect(run, "gpu-17", "a worker\n died\tthere", 1e9)
    note_suspect(run, "gpu-18.rack2", "twice", 1e9 + 50_000)
    note_suspect(run, "$(reboot)", "no", 1e9)
    note_suspect(run, "", "no", 1e9)
    assert read_suspects(tmp_path, 1e9 + 1) == {"gpu-17": "a worker died there", "gpu-18.rack2": "twice"}
    assert list(read_suspects(tmp_path, 1e9 + 90_000)) == ["gpu-18.rack2"]
    run.suspects_file.write_text("half a line\n`x`\t1000000000\ty\ngood\t1000000000\n")
    assert read_suspects(tmp_path, 1e9) == {"good": ""}


def test_engines_read_suspects_at_the_end(tmp_path, monkeypatch):
    run, end = RunFolder(tmp_path), tmp_path / "0001-0.end"
    monkeypatch.setenv("HEADWAY_END", str(end))
    _tell_engine(0, run)
    assert read_exit_report(end) == (0, ())
    note_suspect(run, "gpu-17", "twice", time.time())
    note_suspect(run, "gpu-18", "long ago", time.time() - 2e5)
    _tell_engine(75, run)
    assert end.read_text() == "75\ngpu-17\n"
    assert read_exit_report(end) == (75, ("gpu-17",))
    end.write_text("75\n$(reboot)\n--exclude=all\ngpu-9.rack\n")
    assert read_exit_report(end) == (75, ("gpu-9.rack",))
    end.write_text("perhaps\n")
    assert read_exit_report(end) is None
