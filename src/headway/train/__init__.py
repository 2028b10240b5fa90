"""The trainer: `loop.py` is the training step, `build.py` builds its parts, `worker.py` is the process."""

import headway.callable_package

headway.callable_package.make_callable(__name__)
