"""Files of a run: only samples, only inside of its folder, and never as something that a browser executes."""

import os
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from written_runs import falling, write_run

SECRET = "the-secret-of-another-folder"


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "secret.log").write_text(SECRET)
    folder = write_run(runs, "demo", falling(3))
    (folder / "samples").mkdir()
    (folder / "key").write_text(SECRET)
    (folder / "checkpoints" / "secret.txt").write_text(SECRET)
    return folder


OUTSIDE = [
    "../../secret.txt", "samples/../../../secret.txt", "samples/../key", "/etc/passwd", "key", "recipe.json", "..", "",
    ".", "samples", "samples/", "checkpoints/secret.txt", "events/0001-agent.jsonl", "logs/0001-agent.log",
    "samples/.hidden.txt", "samples//../../../secret.txt", "samples/%2e%2e/%2e%2e/secret.txt",
    "samples\\..\\..\\secret.txt", "samples/\x00.txt", "samples/link.txt", "samples/folder/secret.txt",
    "samples/page.html", "samples/drawing.svg", "a" * 5000 + "/b.txt",
]  # fmt: skip


def test_nothing_but_samples_is_served(client: TestClient, run: Path, tmp_path: Path) -> None:
    (run / "samples" / ".hidden.txt").write_text(SECRET)
    (run / "samples" / "page.html").write_text(f"<script>{SECRET}</script>")
    (run / "samples" / "drawing.svg").write_text(f"<svg onload='{SECRET}'/>")
    (run / "samples" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (run / "samples" / "folder").symlink_to(tmp_path)
    for path in OUTSIDE:
        for address in ("/files", "/api/sample-text"):
            answer = client.get(address, params={"run": "demo", "path": path})
            assert answer.status_code == 404, path
            assert SECRET not in answer.text


def test_only_listed_logs_are_read(client: TestClient, run: Path, tmp_path: Path) -> None:
    (run / "logs" / "link.log").symlink_to(tmp_path / "secret.log")
    for name in ("../../../secret.log", "..", "", "none.log", "../key", "link.log", ".log", "a/b.log"):
        answer = client.get("/api/logs", params={"run": "demo", "file": name})
        assert answer.status_code in (404, 500), name
        assert SECRET not in answer.text


def test_runs_are_found_by_their_exact_names_only(client: TestClient, run: Path) -> None:
    for name in ("..", "../runs", "../secret.txt", ".", "/etc", "demo/samples", ".failed/../demo", "demo/", "dem", ""):
        for path in ("/api/run", "/api/logs", "/api/samples", "/api/ledger"):
            assert client.get(path, params={"run": name}).status_code == 404, name


def test_static_files_come_from_memory(client: TestClient) -> None:
    for path in ("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/guard.py", "/static/x"):
        answer = client.get(path)
        assert "import" not in answer.text or '<div id="app">' in answer.text
        assert answer.status_code in (200, 404)


def test_samples_are_listed_and_sent_as_what_they_are(client: TestClient, run: Path) -> None:
    (run / "samples" / "step-3").mkdir()
    (run / "samples" / "step-3" / "cat <1>.png").write_bytes(b"\x89PNG")
    (run / "samples" / "text.txt").write_text("<script>alert(1)</script>")
    (run / "samples" / "sound.wav").write_bytes(b"RIFF" + bytes(100))
    (run / "samples" / "program.py").write_text("no sample")
    files = {file["path"]: file["kind"] for file in client.get("/api/samples", params={"run": "demo"}).json()["files"]}
    assert files == {"samples/step-3/cat <1>.png": "image", "samples/text.txt": "text", "samples/sound.wav": "audio"}
    text = client.get("/files", params={"run": "demo", "path": "samples/text.txt"})
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert text.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert text.headers["x-content-type-options"] == "nosniff"
    image = client.get(f"/files?run=demo&path={quote('samples/step-3/cat <1>.png')}")
    assert (image.status_code, image.content) == (200, b"\x89PNG")
    part = client.get("/files", params={"run": "demo", "path": "samples/sound.wav"}, headers={"Range": "bytes=0-3"})
    assert (part.status_code, part.content) == (206, b"RIFF")


def test_samples_that_cannot_be_read_are_left_out(client: TestClient, run: Path) -> None:
    os.mkfifo(run / "samples" / "pipe.txt")
    (run / "samples" / "folder.png").mkdir()
    answer = client.get("/files", params={"run": "demo", "path": "samples/pipe.txt"})
    assert answer.status_code == 404
    assert client.get("/files", params={"run": "demo", "path": "samples/folder.png"}).status_code == 404
