"""Objects in a bucket (S3, GCS, Azure) or under a folder: put, created once, read in ranges, listed, deleted.

Whatever may pass is tried again for `patience_s`: connections that fail or break off, answers that do not come, that
are cut short, or that say the server is busy. The client retries some of these itself, and some not: no conditional
put or deletion whose answer was lost, no answer cut short. So all of it is done here, by one clock, except for what
only the client knows: the parts of a large upload and the pages of a long listing. An upload of parts that fails is
also called off, which takes as long again where the store is gone.

The client has threads of its own: a process that has used a Store must not fork and use it in the child.
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

__all__ = ["ObjectStore", "StoredObject", "open_store"]

PART_BYTES = 16 << 20
"""What one request carries of a large object."""

_Result = TypeVar("_Result")

_IN_FLIGHT = 4  # requests for one object at a time: 64 MiB of memory at most
_MAX_PARTS = 10_000  # S3 takes no more of one object
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
_NO_CREDENTIALS = "the environment has no credentials, and this machine's metadata service gave none"
_GUIDE = "docs/guides/object-stores.md says what the environment must hold"
_PASSING = {408, 409, 425, 429}
_PASSING_CODES = {"RequestTimeout", "NoSuchUpload"}  # the latter when a lost answer had ended an upload of parts
_MEANINGS = {
    "Timeout": "no answer came in time",
    "Connect": "no connection could be made",
    "Interrupted": "the connection broke off",
    "Request": "the request could not be sent",
}


class StoredObject(NamedTuple):
    """One object of a listing."""

    key: str
    bytes: int
    modified: datetime
    """When it was written, by the store's clock."""


@dataclass(frozen=True)
class _Trouble:
    """What went wrong with a request, in words that hold no url and so no secret."""

    reason: str
    passing: bool
    """Whether it may go well another time."""
    status: int = 0
    spent_s: float = 0.0
    """How long the client has tried this request for."""
    retries: int = 0
    """How often it did so again."""


class _Conflict(Exception):
    """The store refused to create an object, and there is none."""


def open_store(url: str, *, patience_s: float = 60.0, timeout_s: float = 30.0) -> "ObjectStore":
    """The store at s3://bucket/prefix, gs://..., az://container/prefix, file:///folder, or memory:// (gone at the end).

    Credentials and endpoints come from the environment. A request is given up after `timeout_s` and tried again; one
    that has not gone well `patience_s` after it was first sent raises StateError.
    """
    _check_url(url)
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise StateError(f"{url} cannot be opened: obstore is not installed", hint="pip install obstore") from error
    try:
        once, often = _clients(url, patience_s, timeout_s)
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise StateError(f"{url} cannot be opened: {reason}", hint=_GUIDE) from None
    return ObjectStore(url.rstrip("/"), once, often, patience_s)


@final
class ObjectStore:
    """Objects by key. Several threads may use one; what it holds is never logged."""

    def __init__(self, url: str, once: Any, often: Any, patience_s: float) -> None:
        """Use open_store. `once` sends each request once, `often` retries those it knows to be harmless."""
        self.url = url
        self.patience_s = patience_s
        self._once, self._often = once, often

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def name(self, key: str) -> str:
        """How messages call an object."""
        return f"{self.url}/{key}"

    def put(self, key: str, view: memoryview) -> None:
        """Write a whole object, several parts at a time if it is large, straight from the caller's memory."""
        import obstore

        view = view.cast("B")
        sender, part = (self._once, None) if len(view) <= PART_BYTES else (self._often, _part_bytes(len(view)))

        def write() -> None:
            client = _ready(sender, to_write=True)
            if part is None:
                obstore.put(client, key, view, use_multipart=False)
            else:
                obstore.put(client, key, view, use_multipart=True, chunk_size=part, max_concurrency=_IN_FLIGHT)

        self._patiently(f"{self.name(key)} could not be written", write)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that must not be there yet; False if it is. Of two callers at once one gets True.

        When an answer was lost, the object itself tells: if it has these bytes, they are taken for ours.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        unsure = look = False

        def write() -> bool:
            nonlocal unsure, look
            there = self._find_once(key) if look else None
            if there is not None:
                return unsure and there == data
            try:
                obstore.put(_ready(self._once, to_write=True), key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # Status 409 looks the same and means that another request was in the way, which may have failed.
                look = True
                there = self._find_once(key)
                if there is None:
                    raise _Conflict from None
                return unsure and there == data
            except BaseError:
                # Not always with a look before: a store that fails every other request would fail each of these.
                unsure, look = True, not look
                raise
            return True

        return self._patiently(f"{self.name(key)} could not be created", write)

    def read(self, key: str, begin: int, out: memoryview) -> None:
        """Fill `out` with an object's bytes from `begin` on; DamagedState if it is not there, or too short."""
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
                pool.shutdown(cancel_futures=True)  # once one has failed, the others matter no longer

    def find(self, key: str) -> bytes | None:
        """A whole object, or None if there is none."""
        return self._patiently(f"{self.name(key)} could not be read", lambda: self._find_once(key))

    def get(self, key: str) -> bytes:
        """A whole object; StateError if there is none."""
        content = self.find(key)
        if content is None:
            raise StateError(f"{self.name(key)} is not there", hint="see that the url is the right one")
        return content

    def size(self, key: str) -> int:
        """How many bytes an object has; DamagedState if there is none."""
        import obstore

        return self._patiently(
            f"{self.name(key)} could not be read", lambda: int(obstore.head(_ready(self._once), key)["size"]), key
        )

    def list(self, prefix: str = "") -> list[StoredObject]:
        """All objects under a prefix of whole path segments, sorted by key."""
        import obstore

        def read() -> list[StoredObject]:
            batches = obstore.list(_ready(self._often), prefix or None, chunk_size=1000)
            return [
                StoredObject(meta["path"], meta["size"], meta["last_modified"]) for batch in batches for meta in batch
            ]

        return sorted(self._patiently(f"{self.name(prefix).rstrip('/')} could not be listed", read))

    def delete(self, keys: Sequence[str], *, patience_s: float | None = None) -> None:
        """Remove objects; those that are not there are no trouble."""
        import obstore

        def remove(some: Sequence[str]) -> None:
            try:
                obstore.delete(_ready(self._once), list(some))
            except FileNotFoundError:
                # Some stores stop at the first that is missing: so one by one.
                for key in some if len(some) > 1 else ():
                    remove([key])

        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            failed = f"{self.name(keys[0])}{more} could not be removed"
            self._patiently(failed, lambda: remove(keys), patience_s=patience_s)

    def _find_once(self, key: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(_ready(self._once), key).bytes())
        except FileNotFoundError as error:
            if _no_bucket(error):
                raise
            return None

    def _read(self, key: str, begin: int, out: memoryview) -> None:
        """One range; what comes back short is short in the store, since cut answers raise."""
        import obstore

        def fill() -> int:
            data = memoryview(obstore.get_range(_ready(self._once), key, start=begin, end=begin + len(out)))
            out[: len(data)] = data
            return len(data)

        count = self._patiently(f"{self.name(key)} could not be read", fill, key)
        if count != len(out):
            raise DamagedState(f"{self.name(key)} is damaged: it ends at byte {begin + count}")

    def _patiently(
        self,
        failed: str,
        call: Callable[[], _Result],
        promised: str | None = None,
        patience_s: float | None = None,
    ) -> _Result:
        """Try until it goes well, cannot, or patience is at its end; `promised` is an object that must be there."""
        from obstore.exceptions import BaseError

        patience_s = self.patience_s if patience_s is None else patience_s
        tries, deadline, pause_s = 0, None, _FIRST_PAUSE_S
        while True:
            tries += 1
            try:
                return call()
            except (BaseError, OSError, _Conflict) as error:
                trouble = _trouble(error)
            tries += trouble.retries
            if deadline is None:
                deadline = time.monotonic() + patience_s - trouble.spent_s
            if not trouble.passing or time.monotonic() + pause_s > deadline:
                self._give_up(failed, trouble, tries, promised)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _give_up(self, failed: str, trouble: _Trouble, tries: int, promised: str | None) -> NoReturn:
        # Raised outside of any handler: the client's own errors quote requests, and are not for logs.
        if promised is not None and trouble.status == 404:
            raise DamagedState(f"{self.name(promised)} is not there", hint="an older checkpoint may be whole")
        if promised is not None and trouble.status == 416:
            raise DamagedState(f"{self.name(promised)} is damaged: it is too short")
        often = f" ({tries} tries)" if tries > 1 else ""
        raise StateError(f"{failed}: {trouble.reason}{often}", hint=_hint(trouble))


class _Folder:
    """A folder as a store. The first write makes it; until then there is nothing to be read."""

    def __init__(self, path: Path) -> None:
        """OSError for one that could not be made."""
        self._path = path
        self._client: Any = None
        nearest = next(place for place in (path, *path.parents) if place.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(f"{nearest} is no folder")
        if nearest != path and not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(f"nothing may be made in {nearest}")

    def client(self, to_write: bool) -> Any:
        from obstore.store import LocalStore, MemoryStore

        if self._client is None and (to_write or self._path.is_dir()):
            self._client = LocalStore(self._path, mkdir=True, automatic_cleanup=True)
        return MemoryStore() if self._client is None else self._client


def _ready(client: Any, to_write: bool = False) -> Any:
    """The client that requests are sent with."""
    return client.client(to_write) if isinstance(client, _Folder) else client


def _check_url(url: str) -> None:
    """UsageError for what is no url of a store, or has a secret in it."""
    parts = urlsplit(url)
    hint = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder"
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        shown = f"{parts.scheme}://..." if parts.scheme else repr(url)
        raise UsageError(f"{shown} is no url of a store; known are {known}", hint=hint)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"the url of the {parts.scheme}:// store holds a user, a password or a query",
            hint="credentials belong into the environment, where no log shows them",
        )
    if bool(parts.netloc) == (parts.scheme in ("file", "memory")) or (parts.scheme == "file" and not parts.path):
        raise UsageError(f"{url} is no url of a store", hint=hint)
    for name in _ENDPOINTS if parts.scheme == "s3" else ():
        if not re.match(r"https?://[^/]", os.environ.get(name, "http://none")):
            raise UsageError(f"{name} does not begin with http:// or https://", hint="such as http://127.0.0.1:9000")


def _clients(url: str, patience_s: float, timeout_s: float) -> tuple[Any, Any]:
    """One that sends each request once, and one that retries those it knows to be harmless."""
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
    once = from_url(url, client_options=options, retry_config={"max_retries": 0})
    return once, from_url(url, client_options=options, retry_config=_retries(patience_s))


def _client_environment(prefix: str) -> dict[str, str]:
    """What the environment says of connections: the client forgets that when it is given options."""
    found = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in _FROM_ENVIRONMENT}
    return {name: value for name, value in found.items() if value is not None}


def _retries(patience_s: float) -> Any:
    """The client's own retries, by the clock alone."""
    pauses = {
        "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
        "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
        "base": 2,
    }
    return {"max_retries": 10_000, "retry_timeout": timedelta(seconds=patience_s), "backoff": pauses}


def _part_bytes(size: int) -> int:
    """How large the parts of an object are, so that there are not too many."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


def _no_bucket(error: FileNotFoundError) -> bool:
    return "NoSuchBucket" in str(error)


def _trouble(error: Exception) -> _Trouble:
    """What an error of the client means. It tells only by its text, so this is all that knows how it words things."""
    if isinstance(error, _Conflict):
        return _Trouble("another request was in the way", passing=True, status=409)
    text = str(error)
    spent_s, retries = 0.0, 0
    if match := _SPENT.search(text):
        spent_s, retries = float(match[1]) * _UNITS[match[2]], int(match[3] or 0)
    if match := _STATUS.search(text):
        status, code = int(match[1]), _CODE.search(text)
        reason = f"the store answered {status}{f' ({code[1]})' if code else ''}"
        passing = status in _PASSING or 500 <= status != 501 or bool(code and code[1] in _PASSING_CODES)
        return _Trouble(_NO_CREDENTIALS if _METADATA.search(text) else reason, passing, status, spent_s, retries)
    if isinstance(error, FileNotFoundError):
        return _Trouble("it is not there", passing=False, status=404)
    if "StartTooLarge" in text:
        return _Trouble("it is too short", passing=False, status=416)
    kind = _KIND.search(text)
    if kind is None or "builder error" in text:
        return _Trouble(text.partition("\n")[0].removeprefix("Generic "), passing=False)
    reason = _NO_CREDENTIALS if _METADATA.search(text) else _MEANINGS.get(kind[1], "the connection failed")
    return _Trouble(reason, passing=True, spent_s=spent_s, retries=retries)


def _hint(trouble: _Trouble) -> str:
    if trouble.status in (401, 403) or trouble.reason == _NO_CREDENTIALS:
        return "see that the environment has credentials that may read, write, list and delete there"
    if trouble.status == 404:
        return "see that the bucket is there, and that the url is the right one"
    if trouble.passing:
        return "see that the store can be reached from this machine, and that its endpoint is the right one"
    return _GUIDE
