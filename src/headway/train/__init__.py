"""The trainer: `loop.py` is the training step, `build.py` builds its parts, `worker.py` is the process."""
