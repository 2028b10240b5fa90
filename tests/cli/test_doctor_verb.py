"""`headway doctor` as a person types it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli.main import main

PROGRAM = "from headway.cli.main import main; main()"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["headway", "doctor", *words])
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_storage_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(monkeypatch, capsys, "--storage", str(tmp_path), "--seconds", "0.4")
    assert status == 0
    assert re.search(r"write +[\d,]+ MB/s, fsync included", out)
    assert "checkpoints: " in out
    assert out.splitlines()[-1].startswith("next: headway ")
    assert "measuring write" in err
    assert max(map(len, out.splitlines()[1:])) <= 80


def test_programs_get_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--storage", str(tmp_path), "--network", "--seconds", "0.4", "--json")
    status, out, _ = run(monkeypatch, capsys, *words)
    found = json.loads(out)
    assert status == 0
    assert found["storage"]["write_bytes_s"] > 0
    assert {use["what"] for use in found["storage"]["uses"]} == {"checkpoints", "data", "runs, logs"}
    assert "lo" in {one["name"] for one in found["network"]["interfaces"]}
    assert found["network"]["transport"]["name"] in ("InfiniBand", "RoCE", "EFA", "TCP", "none")


def test_sandbox_is_reported_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headway.cli.doctor.why_no_sandbox", lambda: "the kernel allows no user namespaces")
    status, out, _ = run(monkeypatch, capsys, "--sandbox")
    assert (status, out) == (1, "sandbox: cannot be built: the kernel allows no user namespaces\n")
    status, out, _ = run(monkeypatch, capsys, "--sandbox", "--json")
    assert status == 1
    assert json.loads(out)["sandbox"] == {"works": False, "why": "the kernel allows no user namespaces"}
    monkeypatch.setattr("headway.cli.doctor.why_no_sandbox", lambda: None)
    assert run(monkeypatch, capsys, "--sandbox")[:2] == (0, "sandbox: works\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "nothing to check"),
        (("--with", "127.0.0.1:9"), "--with needs --network"),
        (("--network", "--with", "a:1", "--listen", "b:1"), "--with and --listen exclude each other"),
        (("--network", "--listen", "0.0.0.0:0"), "needs a token"),
        (
            ("--network", "--with", "a:1", "--token-env", "NO_SUCH_VARIABLE"),
            "environment variable NO_SUCH_VARIABLE is unset",
        ),
        (("--storage", "none"), "none is not a folder"),
    ],
)
def test_invalid_options_are_errors(
    words: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(monkeypatch, capsys, *words)
    assert status == 2
    assert error in err


def test_two_processes_measure_their_link(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("A_TOKEN", "known to both")
    words = ["doctor", "--network", "--listen", "127.0.0.1:0", "--token-env", "A_TOKEN"]
    listener = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert listener.stderr is not None
    with listener, listener.stderr as said:
        found = re.search(r"listening on (\S+) until", said.readline())
        assert found
        words = ["--network", "--with", found[1], "--token-env", "A_TOKEN", "--seconds", "0.4"]
        status, out, _ = run(monkeypatch, capsys, *words)
        assert said.readline() == "127.0.0.1: measured\n"
        listener.send_signal(signal.SIGINT)
        assert listener.wait(20) == 130
    assert status == 0
    assert re.search(r"TCP with 127.0.0.1:\d+: [\d.]+ GB/s out, [\d.]+ GB/s back, \d+ us", out)
