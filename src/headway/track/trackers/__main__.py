"""The process that sends a run to its trackers: `python -m headway.track.trackers RUN_FOLDER`.

Its stdin is a pipe from the agent: once that closes, the process sends what is left, for `track.linger_s` at most, and
ends. Each tracker has a thread, so that a server that hangs delays no other. It shares nothing else with the run than
the run's folder, of which it only reads events.
"""

import fcntl
import os
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from headway.recipe.track import Track
from headway.track.access import adopt_umask
from headway.track.files import read_recipe
from headway.track.run_folder import RunFolder, run_id
from headway.track.trackers.base import RunFacts, Tracker
from headway.track.trackers.sender import Sender

POLL_S = 1.0
BUSY = 3
"""Exit status where another process sends this run."""


def trackers_of(settings: Track) -> list[Tracker]:
    """Return the trackers of a recipe; their libraries are imported when they are opened."""
    trackers: list[Tracker] = []
    if settings.mlflow is not None:
        from headway.track.trackers.mlflow import MLflowTracker

        trackers.append(MLflowTracker(settings.mlflow))
    if settings.wandb is not None:
        from headway.track.trackers.wandb import WandbTracker

        trackers.append(WandbTracker(settings.wandb))
    if settings.tensorboard is not None:
        from headway.track.trackers.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(settings.tensorboard))
    if settings.webhook is not None:
        from headway.track.trackers.webhook import WebhookTracker

        trackers.append(WebhookTracker(settings.webhook))
    return trackers


def main() -> int:
    """Send until the pipe closes and all is sent."""
    run = RunFolder(Path(sys.argv[1]))
    adopt_umask(run.path)
    with suppress(OSError):
        os.nice(10)
    run.trackers.mkdir(exist_ok=True)
    lock = os.open(run.trackers / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return BUSY
    recipe = read_recipe(run)
    settings = recipe.track or Track()
    facts = RunFacts(run.name, run_id(run), run.path.resolve(), recipe)
    senders = [Sender(run, facts, tracker, settings.every_steps) for tracker in trackers_of(settings)]
    ended = threading.Event()
    threads = [threading.Thread(target=_send, args=(sender, ended), daemon=True) for sender in senders]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if select.select([0], [], [], POLL_S)[0] and not os.read(0, 4096):
            break
    ended.set()
    until = time.monotonic() + settings.linger_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in a library must not keep the process


def _send(sender: Sender, ended: threading.Event) -> None:
    while True:
        last = ended.is_set()
        done = sender.advance(ended=last)
        if last and done:
            sender.close()
            return
        if last:
            time.sleep(POLL_S)
        else:
            ended.wait(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
