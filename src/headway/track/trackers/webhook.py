"""A webhook: a POST of JSON for each thing that happens to a run, with a `text` that chat services show."""

import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from headway.recipe.track import Webhook
from headway.track.trackers.base import RunFacts, Scalars, Sent, State, Tracker, Unsendable

TIMEOUT_S = 10.0
_REFUSED = {400, 404, 405, 410, 413, 415, 422}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any) -> None:
        """Follow none: it would lead to a host that the recipe does not name."""


class WebhookTracker(Tracker):
    """Posts states, and metrics of every Nth step if asked to."""

    name = "webhook"

    def __init__(self, settings: Webhook) -> None:
        self._settings = settings

    def open(self, run: RunFacts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Find the address."""
        settings = self._settings
        self._url = settings.url or os.environ.get(settings.variable or "", "")
        if not self._url.startswith(("http://", "https://")):
            raise ValueError(f"the environment variable {settings.variable} has no URL")
        self._run = run
        self._opener = urllib.request.build_opener(_NoRedirect)
        return dict(known)

    def send(self, batch: Sequence[Sent]) -> None:
        """Post what is news."""
        every = self._settings.every_steps
        for item in batch:
            if isinstance(item, State):
                self._post(item.what, item.wall, item.step, item.text, item.values)
            elif isinstance(item, Scalars) and every and item.step % every == 0:
                self._post("metrics", item.wall, item.step, "", item.values)

    def _post(self, what: str, wall: float, step: int | None, text: str, values: Mapping[str, float]) -> None:
        shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        words = [f"{self._run.name} {what}", *([f"at step {step:,}"] if step else [])]
        sentence = " ".join(words) + "".join(f": {part}" for part in (text, shown) if part)
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        body = {"run": self._run.name, "event": what, "time": wall, "step": step, "text": sentence, "values": finite}
        headers = {"Content-Type": "application/json", "User-Agent": "headway"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                answer.read(1 << 16)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _REFUSED:
                raise Unsendable(f"HTTP {error.code}") from None
            raise OSError(f"HTTP {error.code}") from None
        except urllib.error.URLError as error:  # its text has no address
            raise OSError(str(error.reason)) from None
        except (http.client.HTTPException, ValueError) as error:  # whose text may have the address
            raise OSError(type(error).__name__) from None

    def close(self, outcome: str | None) -> None:
        """Nothing is open."""
