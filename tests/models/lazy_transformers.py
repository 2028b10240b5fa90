"""The `transformers` library, imported when a test first needs it: finding its thousand modules takes two seconds."""

import warnings
from typing import Any

__all__ = ["transformers"]


class _Later:
    def __getattr__(self, name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers

            return getattr(transformers, name)


transformers: Any = _Later()
