"""The training loop: `loop.py` tells the whole step, `build.py` makes its parts, `worker.py` is the process."""
