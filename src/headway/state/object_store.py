"""Objects in a bucket (S3, GCS, Azure) or a folder: put, create-if-absent, ranged reads, list, delete.

Transient errors are retried for `patience_s`: failed or broken connections, missing or truncated responses, a busy
server. The client library retries some of these itself, but no conditional put or deletion whose response was lost and
no truncated response. So all retries are done here, by one clock, except for what only the client knows: the parts of a
large upload and the pages of a long listing. A failed multipart upload is also aborted, which takes as long again if
the store is unreachable.

The client has its own threads: a process that has used an ObjectStore must not fork and use it in the child.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, final
from urllib.parse import unquote, urlsplit

from headway.errors import DamagedState, StateError, UsageError

PART_BYTES = 16 << 20
"""Bytes of a large object per request."""

_Result = TypeVar("_Result")

_IN_FLIGHT = 4  # concurrent requests per object: at most 64 MiB of memory
_MAX_PARTS = 10_000  # S3's limit per object
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE", "file": "", "memory": ""}
_FROM_ENVIRONMENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_SPENT = re.compile(r" in ([\d.]+)(s|ms|µs|ns)(?:, after (\d+) retries)?")
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
_METADATA = re.compile(r"//169\.254\.|//metadata\.google")
_NO_CREDENTIALS = "no credentials in the environment or from this machine's metadata service"
_NO_BUCKET = "NoSuchBucket"
_GUIDE = "docs/guides/object-stores.md lists the environment variables"
_TRANSIENT = {408, 409, 425, 429}
_TRANSIENT_CODES = {"RequestTimeout", "NoSuchUpload"}  # the latter if the response that ended an upload was lost
_MEANINGS = {
    "Timeout": "the request timed out",
    "Connect": "cannot connect",
    "Interrupted": "the connection was interrupted",
    "Request": "cannot send the request",
}


class StoredObject(NamedTuple):
    """An object in a listing."""

    key: str
    bytes: int
    modified: datetime
    """When it was written, by the store's clock."""


@dataclass(frozen=True)
class _RequestFailure:
    """What went wrong with a request, described without its url and so without secrets."""

    reason: str
    transient: bool
    """Whether a retry may succeed."""
    status: int = 0
    spent_s: float = 0.0
    """How long the client itself retried this request."""
    retries: int = 0
    """How often the client itself retried it."""


class _Conflict(Exception):
    """The store refused to create an object that does not exist."""


def open_store(url: str, *, patience_s: float = 60.0, timeout_s: float = 30.0) -> "ObjectStore":
    """Open s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, or memory:// (not persisted).

    Credentials and endpoints come from the environment. A request times out after `timeout_s` and is retried; if it has
    not succeeded `patience_s` after it was first sent, it raises StateError.
    """
    _check_url(url)
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise StateError(f"{url} cannot be opened: obstore is not installed", hint="pip install obstore") from error
    try:
        single, retrying = _clients(url, patience_s, timeout_s)
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise StateError(f"{url} cannot be opened: {reason}", hint=_GUIDE) from None
    return ObjectStore(url.rstrip("/"), single, retrying, patience_s)


@final
class ObjectStore:
    """Objects by key. Thread-safe; contents are never logged."""

    def __init__(self, url: str, single: Any, retrying: Any, patience_s: float) -> None:
        """Use open_store. The client `single` never retries, `retrying` retries idempotent requests."""
        self.url = url
        self.patience_s = patience_s
        self._single, self._retrying = single, retrying

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def name(self, key: str) -> str:
        """The name of an object in messages."""
        return f"{self.url}/{key}"

    def put(self, key: str, view: memoryview) -> None:
        """Write an object straight from the caller's memory, a large one in several parts at a time."""
        import obstore

        view = view.cast("B")
        large = len(view) > PART_BYTES

        def write() -> None:
            client = _client(self._retrying if large else self._single, to_write=True)
            part_bytes = _part_bytes(len(view))
            obstore.put(client, key, view, use_multipart=large, chunk_size=part_bytes, max_concurrency=_IN_FLIGHT)

        self._retry(f"{self.name(key)} could not be written", write)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that must not exist yet; return False if it does. Of concurrent callers one gets True.

        If the response to a request was lost, an object with these bytes counts as created by it.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        unsure = look = False

        def write() -> bool:
            nonlocal unsure, look
            content = self._find_once(key) if look else None
            if content is not None:
                return unsure and content == data
            try:
                obstore.put(_client(self._single, to_write=True), key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # Status 409 looks the same, but means a conflict with another request, which may have failed.
                look = True
                content = self._find_once(key)
                if content is None:
                    raise _Conflict from None
                return unsure and content == data
            except BaseError:
                # Look only before every other attempt: a store that fails every other request would fail all of them.
                unsure, look = True, not look
                raise
            return True

        return self._retry(f"{self.name(key)} could not be created", write)

    def read(self, key: str, begin: int, out: memoryview) -> None:
        """Fill `out` with an object's bytes from `begin` on; raise DamagedState if it is missing or too short."""
        out = out.cast("B")
        pieces = [(begin + at, out[at : at + PART_BYTES]) for at in range(0, len(out), PART_BYTES)]
        if len(pieces) == 1:
            self._read(key, *pieces[0])
        elif pieces:
            pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="read")
            try:
                for done in [pool.submit(self._read, key, *piece) for piece in pieces]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)  # not needed once one has failed

    def find(self, key: str) -> bytes | None:
        """Return an object's content, or None if it does not exist."""
        return self._retry(f"{self.name(key)} could not be read", lambda: self._find_once(key))

    def get(self, key: str) -> bytes:
        """Return an object's content; raise StateError if it does not exist."""
        content = self.find(key)
        if content is None:
            raise StateError(f"{self.name(key)} does not exist", hint="check the url")
        return content

    def size(self, key: str) -> int:
        """Return an object's size in bytes; raise DamagedState if it does not exist."""
        import obstore

        return self._retry(
            f"{self.name(key)} could not be read", lambda: int(obstore.head(_client(self._single), key)["size"]), key
        )

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return all objects under a prefix of whole path segments, sorted by key."""
        import obstore

        def read() -> list[StoredObject]:
            batches = obstore.list(_client(self._retrying), prefix or None, chunk_size=1000)
            return [
                StoredObject(meta["path"], meta["size"], meta["last_modified"]) for batch in batches for meta in batch
            ]

        return sorted(self._retry(f"{self.name(prefix).rstrip('/')} could not be listed", read))

    def folders(self) -> Sequence[str]:
        """Return the names of the first path segments that have objects below them, in order."""
        import obstore

        def read() -> Sequence[str]:
            prefixes = obstore.list_with_delimiter(_client(self._retrying))["common_prefixes"]
            return sorted({str(prefix).strip("/").rpartition("/")[2] for prefix in prefixes})

        return self._retry(f"{self.name('').rstrip('/')} could not be listed", read)

    def delete(self, keys: Sequence[str], *, patience_s: float | None = None) -> None:
        """Delete objects; missing ones are ignored."""
        import obstore

        def remove(some: Sequence[str]) -> None:
            try:
                obstore.delete(_client(self._single), list(some))
            except FileNotFoundError:
                # Some stores stop at the first missing object: delete one by one.
                for key in some if len(some) > 1 else ():
                    remove([key])

        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            failed = f"{self.name(keys[0])}{more} could not be removed"
            self._retry(failed, lambda: remove(keys), patience_s=patience_s)

    def _find_once(self, key: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(_client(self._single), key).bytes())
        except FileNotFoundError as error:
            if _NO_BUCKET in str(error):
                raise
            return None

    def _read(self, key: str, begin: int, out: memoryview) -> None:
        """Read one range; a short result means a short object, since truncated responses raise."""
        import obstore

        def fill() -> int:
            data = memoryview(obstore.get_range(_client(self._single), key, start=begin, end=begin + len(out)))
            out[: len(data)] = data
            return len(data)

        count = self._retry(f"{self.name(key)} could not be read", fill, key)
        if count != len(out):
            raise DamagedState(f"{self.name(key)} is damaged: it ends at byte {begin + count}")

    def _retry(
        self,
        failed: str,
        call: Callable[[], _Result],
        required: str | None = None,
        patience_s: float | None = None,
    ) -> _Result:
        """Call until it succeeds, fails for good, or time is up; `required` is the key of an object that must exist."""
        from obstore.exceptions import BaseError

        patience_s = self.patience_s if patience_s is None else patience_s
        tries, deadline, pause_s = 0, None, _FIRST_PAUSE_S
        while True:
            tries += 1
            try:
                return call()
            except (BaseError, OSError, _Conflict) as error:
                failure = _classify(error)
            tries += failure.retries
            if deadline is None:
                deadline = time.monotonic() + patience_s - failure.spent_s
            if not failure.transient or time.monotonic() + pause_s > deadline:
                self._give_up(failed, failure, tries, required)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _give_up(self, failed: str, failure: _RequestFailure, tries: int, required: str | None) -> NoReturn:
        # Raised outside of any handler: the client's own errors quote requests, which must not be logged.
        if required is not None and failure.status == 404:
            raise DamagedState(f"{self.name(required)} does not exist", hint="an older checkpoint may be intact")
        if required is not None and failure.status == 416:
            raise DamagedState(f"{self.name(required)} is damaged: it is too short")
        attempts = f" ({tries} tries)" if tries > 1 else ""
        missing = _NO_BUCKET in failure.reason  # a mistake in the url; a key that is missing may appear
        raise StateError(f"{failed}: {failure.reason}{attempts}", hint=_hint(failure), usage=missing)


class _Folder:
    """A folder as a store. The first write creates it; until then it is empty."""

    def __init__(self, path: Path) -> None:
        """Raise OSError if the folder could not be created."""
        self._path = path
        self._client: Any = None
        nearest = next(folder for folder in (path, *path.parents) if folder.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(f"{nearest} is not a folder")
        if nearest != path and not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to create a folder in {nearest}")

    def client(self, to_write: bool) -> Any:
        from obstore.store import LocalStore, MemoryStore

        if self._client is None and (to_write or self._path.is_dir()):
            self._client = LocalStore(self._path, mkdir=True, automatic_cleanup=True)
        return MemoryStore() if self._client is None else self._client


def _client(client: Any, to_write: bool = False) -> Any:
    """Return the client to send requests with."""
    return client.client(to_write) if isinstance(client, _Folder) else client


def _check_url(url: str) -> None:
    """Raise UsageError if this is not the url of a store, or has a secret in it."""
    parts = urlsplit(url)
    hint = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder"
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        shown = f"{parts.scheme}://..." if parts.scheme else repr(url)
        raise UsageError(f"{shown} is not an object store url; supported are {known}", hint=hint)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"the url of the {parts.scheme}:// store contains a user, a password or a query",
            hint="put credentials into the environment, so that no log shows them",
        )
    if bool(parts.netloc) == (parts.scheme in ("file", "memory")) or (parts.scheme == "file" and not parts.path):
        raise UsageError(f"{url} is not an object store url", hint=hint)
    for name in _ENDPOINTS if parts.scheme == "s3" else ():
        if not re.match(r"https?://[^/]", os.environ.get(name, "http://none")):
            raise UsageError(f"{name} does not begin with http:// or https://", hint="such as http://127.0.0.1:9000")


def _clients(url: str, patience_s: float, timeout_s: float) -> tuple[Any, Any]:
    """Return a client that never retries, and one that retries idempotent requests."""
    from obstore.store import MemoryStore, from_url

    scheme = urlsplit(url).scheme
    client: Any
    if scheme == "memory":
        client = MemoryStore()
        return client, client
    if scheme == "file":
        client = _Folder(Path(unquote(urlsplit(url).path)))
        return client, client
    options: Any = {"timeout": timedelta(seconds=timeout_s), **_client_environment(_SCHEMES[scheme])}
    backoff: Any = {
        "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
        "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
        "base": 2,
    }
    retries: Any = {"max_retries": 10_000, "retry_timeout": timedelta(seconds=patience_s), "backoff": backoff}
    single = from_url(url, client_options=options, retry_config={"max_retries": 0})
    return single, from_url(url, client_options=options, retry_config=retries)


def _client_environment(prefix: str) -> dict[str, str]:
    """Connection options from the environment, which the client ignores once it is given any option."""
    variables = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in _FROM_ENVIRONMENT}
    return {name: value for name, value in variables.items() if value is not None}


def _part_bytes(size: int) -> int:
    """Return the part size of a multipart upload within the store's limit on parts."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


def _classify(error: Exception) -> _RequestFailure:
    """Classify an error of the client, which only its text describes; nothing else depends on that text."""
    if isinstance(error, _Conflict):
        return _RequestFailure("conflict with another request", transient=True, status=409)
    text = str(error)
    spent_s, retries = 0.0, 0
    if match := _SPENT.search(text):
        spent_s, retries = float(match[1]) * _UNITS[match[2]], int(match[3] or 0)
    if match := _STATUS.search(text):
        status, code = int(match[1]), _CODE.search(text)
        reason = f"the store answered {status}{f' ({code[1]})' if code else ''}"
        transient = status in _TRANSIENT or 500 <= status != 501 or bool(code and code[1] in _TRANSIENT_CODES)
        reason = _NO_CREDENTIALS if _METADATA.search(text) else reason
        return _RequestFailure(reason, transient, status, spent_s, retries)
    if isinstance(error, FileNotFoundError):
        return _RequestFailure("it does not exist", transient=False, status=404)
    if "StartTooLarge" in text:
        return _RequestFailure("it is too short", transient=False, status=416)
    kind = _KIND.search(text)
    if kind is None or "builder error" in text:
        return _RequestFailure(text.partition("\n")[0].removeprefix("Generic "), transient=False)
    reason = _NO_CREDENTIALS if _METADATA.search(text) else _MEANINGS.get(kind[1], "the connection failed")
    return _RequestFailure(reason, transient=True, spent_s=spent_s, retries=retries)


def _hint(failure: _RequestFailure) -> str:
    if failure.status in (401, 403) or failure.reason == _NO_CREDENTIALS:
        return "set credentials in the environment that may read, write, list and delete there"
    if failure.status == 404:
        return "check that the bucket exists, and the url"
    if failure.transient:
        return "check that the store can be reached from this machine, and its endpoint"
    return _GUIDE
