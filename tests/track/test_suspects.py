"""Machines that a run does without."""

from headway.track.runs import RunFolder
from headway.track.suspects import note_suspect, read_suspects


def test_they_are_known_for_a_day_and_only_by_names_that_are_names(tmp_path):
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
