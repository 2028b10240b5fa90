"""The trainer: `loop.py` is the training step, `build.py` builds its parts, `worker.py` is the process."""

from headway.callable_package import make_callable

make_callable(__name__)
