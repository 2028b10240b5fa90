"""Live updates: a page hears of what was written, and streams end with the server."""

import asyncio
import shutil
from pathlib import Path
from threading import Event

from written_runs import falling, lines, step, write_run

from headway.dashboard.live import changes, look
from headway.dashboard.recorded import RecordedRuns


def test_page_hears_of_changes_until_the_server_stops(runs: Path, monkeypatch) -> None:
    monkeypatch.setattr("headway.dashboard.live.POLL_S", 0.0)
    folder, stopping = write_run(runs, "a", falling(3)), Event()
    write_run(runs, "b", falling(3))

    async def follow() -> list[str]:
        heard = []
        async for message in changes(RecordedRuns(runs), None, stopping):
            heard.append(message)
            if len(heard) == 1:
                with (folder / "events" / "0001-rank-0.jsonl").open("a") as file:
                    file.write(lines(step(4, 1.0)))
            elif len(heard) == 2:
                shutil.rmtree(folder)
            else:
                stopping.set()
        return heard

    heard = asyncio.run(follow())
    assert heard[0].startswith("event: hello\n")
    assert heard[1] == heard[2] == 'event: changed\ndata: {"runs":["a"]}\n\n'
    assert len(heard) == 3


def test_looking_opens_no_event_file(runs: Path, monkeypatch) -> None:
    """What a page costs a run does not grow with what it recorded."""
    write_run(runs, "a", falling(3))
    recorded = RecordedRuns(runs)
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(AssertionError("a file was read")))
    monkeypatch.setattr(Path, "read_bytes", lambda *_: (_ for _ in ()).throw(AssertionError("a file was read")))
    assert look(recorded, None).keys() == look(recorded, "a").keys() == {"a"}
    assert look(recorded, "none") == {}
