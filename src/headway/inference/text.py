"""Token ids to text as they come: whole characters only, and nothing of a stop text."""

from collections.abc import Callable, Sequence

WINDOW = 16
"""Tokens that are decoded together: a token may hold part of a character, or depend on those before it."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes the tokens of one output as they come; `before` are the tokens of its prompt."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        before: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._decode, self._stop, self._include_stop = decode, tuple(stop), include_stop
        self._window = list(before)[-WINDOW:]
        self._shown = len(decode(self._window)) if self._window else 0
        self._held = ""
        """Text that may be the beginning of a stop text."""
        self.stopped = False
        """Whether a stop text has come."""

    def add(self, token: int) -> str:
        """Return the text that a token completes; it may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(HALF_CHARACTER):
            return ""
        new = text[self._shown :]
        self._window = self._window[-WINDOW:]
        self._shown = len(self._decode(self._window))
        return self._before_stop(new)

    def end(self) -> str:
        """Return what is left at the end: half characters, and the beginning of a stop text that did not come."""
        if self.stopped:
            return ""
        rest = self._before_stop(self._decode(self._window)[self._shown :])
        held, self._held = self._held, ""
        return rest if self.stopped else rest + held

    def _before_stop(self, new: str) -> str:
        """Return the text up to a stop text, less what may be the beginning of one."""
        if not self._stop or self.stopped:
            return "" if self.stopped else new
        text = self._held + new
        places = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if places:
            place, stop = min(places)
            self.stopped, self._held = True, ""
            return text[: place + len(stop)] if self._include_stop else text[:place]
        longest = max(len(stop) for stop in self._stop) - 1
        for start in range(max(len(text) - longest, 0), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                self._held = text[start:]
                return text[:start]
        self._held = ""
        return text


def text_after(before: Sequence[int], ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Return the text of tokens that follow others: what a stream of them adds up to, decoded once."""
    window = list(before)[-WINDOW:]
    shown = len(decode(window)) if window else 0
    return decode([*window, *ids])[shown:]
