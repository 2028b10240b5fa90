"""`headway ui` as a process: its address, its end, and what it refuses."""

import json
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from written_runs import falling, write_run

MAIN = [sys.executable, "-m", "headway", "ui"]


def test_server_says_its_address_and_ends_in_order(runs: Path) -> None:
    write_run(runs, "a", falling(3))
    command = [*MAIN, "--port", "0", "--runs", str(runs), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                line = server.stdout.readline()
                assert line, server.stderr and server.stderr.read()
                text += line
            facts = json.loads(text)
            base, token = facts["listening"], facts["address"].partition("token=")[2]
            assert len(token) >= 32
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{base}api/runs").close()
            request = urllib.request.Request(f"{base}api/runs", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request) as answer:
                assert [row["name"] for row in json.load(answer)["runs"]] == ["a"]
            live = urllib.request.Request(f"{base}api/live", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(live) as stream:
                assert stream.readline() == b"event: hello\n"
                server.send_signal(signal.SIGTERM)  # with a page that is still open
                assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--host", "0.0.0.0", "--api-key-file", "none"], "cannot read none"),
        (["--host", "0.0.0.0", "--api-key-file", "short"], "has a key of 5 characters"),
        (["--host", "203.0.113.1", "--api-key-file", "key"], "cannot listen on"),
        (["--token-file", "key"], "are for another service"),
        (["--service", "http://127.0.0.1:1"], "needs the token of a user"),
        (["--service", "http://127.0.0.1:1", "--token-file", "short"], "has a key of 5 characters"),
        (["--service", "http://203.0.113.1:1", "--token-file", "key"], "without encryption"),
        (["--service", "ftp://127.0.0.1", "--token-file", "key"], "not the address of a service"),
        (["--service", "https://h:1", "--token-file", "key", "--fingerprint", "ab"], "is no fingerprint"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, words: list[str], message: str, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway.cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short\n")
    Path("key").write_text("k" * 32)
    Path("key").chmod(stat.S_IRUSR)
    monkeypatch.setattr(sys, "argv", ["headway", "ui", "--port", "0", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
