"""Webhooks: what happens on the cluster, posted as JSON to addresses that the operator has listed.

Each webhook follows the record in a thread of its own, so that a slow or dead receiver delays no cycle and no other
webhook; one that falls too far behind skips events, and counts them. A name is resolved once per post, and the
connection goes to that very address: one in a private network is refused unless the webhook's `allow` has it.
"""

import hashlib
import hmac
import http.client
import ipaddress
import json
import socket
import ssl
import threading
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway.cluster.service.event_sentences import ClusterEvent, events_of
from headway.cluster.service.record_lines import RecordLines
from headway.errors import UsageError
from headway.http_server import read_key

KINDS = (
    "job",
    "start",
    "running",
    "stop",
    "move",
    "resize",
    "stopping",
    "exited",
    "priority",
    "hold",
    "unhold",
    "node",
)
DEFAULT_KINDS = ("exited", "stop", "node")
MOST_EVENTS = 50
"""Of one post."""
MOST_BEHIND = 10_000
"""Lines of the record: events before them are skipped."""
TRIES, FIRST_WAIT_S = 5, 1.0
TIMEOUT_S = 10.0
POLL_S = 0.5
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Iterable[str]]
Counted = Callable[[str, int], None]
"""Told what became of how many events: sent, failed or skipped."""


@dataclass(frozen=True)
class Webhook:
    """Where events go."""

    url: str
    events: tuple[str, ...] = DEFAULT_KINDS
    allow: tuple[Network, ...] = ()
    """Networks that it may be in although they are not public."""
    key: str | None = None
    """Signs each post."""


def read_webhooks(file: Path) -> list[Webhook]:
    """Return the webhooks of a file; UsageError for what is not understood."""
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None
    listed = values.get("webhook")
    if set(values) != {"webhook"} or not isinstance(listed, list):
        raise UsageError(f"{file} lists no webhooks", hint='[[webhook]] with url = "https://..."')
    return [_read_webhook(file, fields) for fields in listed]


def _read_webhook(file: Path, fields: dict[str, Any]) -> Webhook:
    unknown = set(fields) - {"url", "events", "allow", "secret_file"}
    url, events = fields.get("url", ""), fields.get("events", DEFAULT_KINDS)
    if unknown:
        raise UsageError(f"{file}: unknown key '{min(unknown)}'", hint="url, events, allow, secret_file")
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UsageError(f"{file}: a webhook's url is no URL", hint="https://HOST/PATH")
    if not isinstance(events, list | tuple) or not set(events) <= set(KINDS):
        raise UsageError(f"{file}: unknown events in {events}", hint=f"some of {', '.join(KINDS)}")
    try:
        allow = tuple(ipaddress.ip_network(network) for network in fields.get("allow", ()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file}: allow: {error}", hint='networks such as "10.1.0.0/16"') from None
    key = read_key(file.parent / fields["secret_file"], 16) if "secret_file" in fields else None
    return Webhook(url, tuple(events), allow, key)


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def permitted_address(addresses: Iterable[str], allow: Sequence[Network]) -> str:
    """Return the first address that is public or allowed; OSError if there is none."""
    refused = []
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        address = mapped or address
        if (address.is_global and not address.is_multicast) or any(address in network for network in allow):
            return text
        refused.append(text)
    raise OSError(f"address {', '.join(refused) or 'unknown'} is not public, and not listed in allow")


def post(webhook: Webhook, body: bytes, look_up: Resolve = resolve, timeout_s: float = TIMEOUT_S) -> None:
    """Post a body; OSError if it was not accepted. Redirects are not followed."""
    parts = urlsplit(webhook.url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    address = permitted_address(look_up(host, port), webhook.allow)
    connection = _PinnedConnection(host, port, address, secure, timeout_s)
    headers = {"content-type": "application/json", "user-agent": "headway"}
    if webhook.key is not None:
        headers["x-headway-signature"] = "sha256=" + hmac.new(webhook.key.encode(), body, hashlib.sha256).hexdigest()
    try:
        connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
        answer = connection.getresponse()
        answer.read(1 << 16)
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from None
    finally:
        connection.close()
    if not 200 <= answer.status < 300:
        raise OSError(f"status {answer.status}")


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to an address that was checked, whatever the name resolves to by then."""

    def __init__(self, host: str, port: int, address: str, secure: bool, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address, self._secure = address, secure

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


class WebhookFollower:
    """Posts the events of a record as it grows."""

    def __init__(
        self,
        webhook: Webhook,
        lines: Callable[[], RecordLines],
        counted: Counted,
        send: Callable[[Webhook, bytes], None] = post,
    ) -> None:
        self._webhook, self._lines, self._counted, self._send = webhook, lines, counted, send
        self._seen = len(lines())

    def run(self, stopping: threading.Event) -> None:
        """Follow the record until the service ends."""
        while not stopping.wait(POLL_S):
            self.look(stopping)

    def look(self, stopping: threading.Event) -> None:
        """Post what is new."""
        lines = self._lines()
        first = max(self._seen, lines.first, len(lines) - MOST_BEHIND)
        self._counted("skipped", first - self._seen)
        fresh = lines[first:]
        self._seen = first + len(fresh)
        events = [
            event
            for seq, line in enumerate(fresh, first + 1)
            for event in events_of(seq, line)
            if event.kind in self._webhook.events
        ]
        for begin in range(0, len(events), MOST_EVENTS):
            some = events[begin : begin + MOST_EVENTS]
            self._counted("sent" if self._deliver(some, stopping) else "failed", len(some))

    def _deliver(self, events: Sequence[ClusterEvent], stopping: threading.Event) -> bool:
        """Post events, again after a failure; whether it succeeded."""
        text = "\n".join(f"job {event.job}: {event.sentence}" if event.job else event.sentence for event in events)
        body = json.dumps({"text": text, "events": [asdict(event) for event in events]}).encode()
        for number in range(TRIES):
            try:
                self._send(self._webhook, body)
                return True
            except OSError:
                if number + 1 == TRIES or stopping.wait(FIRST_WAIT_S * 2**number):
                    return False
        return False
