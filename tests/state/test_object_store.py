import os
import random
import re
import sys
import threading
import time

import pytest
import s3

from headway.errors import DamagedState, StateError, UsageError
from headway.state import object_store as store_module
from headway.state.object_store import open_store

pytest_plugins = ["s3"]

BAD_ROADS = [s3.UNAVAILABLE, s3.RESET, s3.LATE, s3.CUT, s3.DROPPED]
PART = 5 << 20
"""The smallest that S3 takes."""
LARGE = 2 * PART + 12345


def opened(url, patience_s=120.0, timeout_s=60.0):
    return open_store(url, patience_s=patience_s, timeout_s=timeout_s)


def noise(size):
    """Bytes that look alike nowhere."""
    return random.Random(size).randbytes(size)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def small_parts(monkeypatch):
    """So that three parts are quickly made."""
    monkeypatch.setattr(store_module, "PART_BYTES", PART)


@pytest.fixture(params=["s3", "file", "memory"])
def store(request, tmp_path):
    if request.param == "s3":
        return opened(request.getfixturevalue("bucket"))
    return opened("memory://" if request.param == "memory" else (tmp_path / "a store").as_uri())


def read(store, key, begin, size):
    out = bytearray(size)
    store.read(key, begin, memoryview(out))
    return bytes(out)


def test_put_objects_can_be_read_and_listed(store):
    contents = {"a": b"", "b/c": b"x", "b/d/e": noise(5000), "b2": b"not under b"}
    for key, content in contents.items():
        store.put(key, memoryview(content))
    assert [(item.key, item.bytes) for item in store.list()] == [(k, len(contents[k])) for k in sorted(contents)]
    assert [item.key for item in store.list("b")] == ["b/c", "b/d/e"]
    assert all(abs(time.time() - item.modified.timestamp()) < 60 for item in store.list())
    assert {key: store.get(key) for key in contents} == contents
    assert {key: store.size(key) for key in contents} == {key: len(content) for key, content in contents.items()}
    store.put("b/c", memoryview(b"another"))
    assert store.get("b/c") == b"another"
    store.delete(["b/c", "never there", "b2"])
    store.delete([])
    assert [item.key for item in store.list()] == ["a", "b/d/e"]
    assert store.find("b/c") is None


def test_ranges_are_exact(store, monkeypatch):
    content = noise(250_000)
    store.put("k", memoryview(content))
    monkeypatch.setattr(store_module, "PART_BYTES", 1000)
    for begin, size in [(0, 0), (0, 1), (0, 999), (1, 1000), (7, 1001), (123, 12_345), (249_999, 1), (240_000, 10_000)]:
        assert read(store, "k", begin, size) == content[begin : begin + size]
    for begin, size in [(249_999, 2), (250_000, 1), (300_000, 5), (248_000, 5000)]:
        with pytest.raises(DamagedState, match=r"/k is damaged: it (ends at byte 250000|is too short)"):
            read(store, "k", begin, size)


def test_missing_objects_are_named(store):
    for attempt in (lambda: read(store, "no/such", 0, 5), lambda: store.size("no/such")):
        with pytest.raises(DamagedState, match=re.escape(f"{store.url}/no/such does not exist")):
            attempt()
    with pytest.raises(StateError, match=re.escape(f"{store.url}/no/such does not exist")):
        store.get("no/such")


def test_one_creates_and_the_others_do_not(store):
    for key in ("a", "b/c", "d"):
        barrier, answers = threading.Barrier(6), {}

        def compete(number, key=key, barrier=barrier, answers=answers):
            barrier.wait()
            answers[number] = store.create(key, b"by %d" % number)

        threads = [threading.Thread(target=compete, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [number for number, won in answers.items() if won]
        assert len(answers) == 6
        assert len(winners) == 1
        assert store.get(key) == b"by %d" % winners[0]
        assert not store.create(key, b"by %d" % winners[0])  # the same bytes again are not a win


def test_large_objects_go_in_parts(bucket, proxy, small_parts):
    store, content = opened(bucket), bytearray(noise(LARGE))
    store.put("k", memoryview(content))
    parts = [request.query for request in proxy.seen if request.method == "PUT"]
    assert sorted(re.findall(r"partNumber=(\d+)", " ".join(parts))) == ["1", "2", "3"]
    content.append(1)  # nobody holds on to the caller's memory
    proxy.calm()
    assert read(store, "k", 0, LARGE) == content[:LARGE]
    assert proxy.count("GET", "/k") == 3


def test_no_object_has_too_many_parts():
    for size in (1, 1 << 30, 10_000 * (16 << 20), 10_000 * (16 << 20) + 1, 5 << 40):
        part = store_module._part_bytes(size)
        assert part >= 16 << 20
        assert -(-size // part) <= 10_000


@pytest.mark.parametrize("harm", BAD_ROADS)
def test_every_request_succeeds_after_transient_faults(bucket, proxy, harm):
    store = opened(bucket, timeout_s=0.25 if harm == s3.LATE else 10)
    content = noise(5000)
    proxy.every_second(harm)
    store.put("a", memoryview(content))
    assert store.create("b", b"created")
    assert store.get("a") == content
    assert read(store, "a", 11, 4000) == content[11:4011]
    assert store.size("a") == 5000
    assert [item.key for item in store.list()] == ["a", "b"]
    store.delete(["a", "never there"])
    assert len(proxy.harmed) >= 5
    proxy.calm()
    assert [item.key for item in store.list()] == ["b"]
    assert store.get("b") == b"created"


@pytest.mark.parametrize("harm", [s3.UNAVAILABLE, s3.RESET, s3.DROPPED])
def test_only_failed_parts_of_an_upload_are_retried(bucket, proxy, small_parts, harm):
    store, content = opened(bucket), noise(LARGE)
    proxy.every_second(harm)
    store.put("k", memoryview(content))
    assert len(proxy.seen) - len(proxy.harmed) == 5  # begun, three parts, completed
    proxy.calm()
    assert store.get("k") == content


@pytest.mark.parametrize("harm", [s3.CUT, s3.DROPPED])
@pytest.mark.parametrize("moment", ["uploads", "uploadId"])
def test_answers_lost_when_parts_begin_or_end(bucket, proxy, small_parts, harm, moment):
    store, content = opened(bucket), noise(LARGE)
    proxy.first(harm, "POST", moment)
    store.put("k", memoryview(content))
    assert len(proxy.harmed) == 1
    proxy.calm()
    assert store.get("k") == content


@pytest.mark.parametrize("harm", [s3.RESET, s3.LATE, s3.CUT, s3.DROPPED, s3.CONFLICT, s3.UNAVAILABLE])
def test_a_creation_whose_answer_was_lost_is_settled(bucket, proxy, harm):
    store = opened(bucket, timeout_s=0.25 if harm == s3.LATE else 10)
    proxy.first(harm, "PUT")
    assert store.create("k", b"ours")
    assert proxy.harmed[0].conditional
    proxy.first(harm, "PUT")
    assert not store.create("k", b"theirs")
    proxy.calm()
    assert store.get("k") == b"ours"


def test_a_creation_that_another_overtook_is_lost(bucket, proxy):
    store, other = opened(bucket), opened(bucket)

    def overtake(request):
        if request.conditional and not proxy.harmed:
            proxy.harm = lambda _: None
            assert other.create("k", b"theirs")
            return s3.RESET
        return None

    proxy.harm = overtake
    assert not store.create("k", b"ours")
    assert store.get("k") == b"theirs"


def patient_error(attempt, proxy):
    """How an attempt ends, and after how many requests; on a machine that stood still, one may take all the time."""
    for _ in range(5):
        before = len(proxy.seen)
        with pytest.raises(StateError) as error:
            attempt()
        if "tries" in error.value.message:
            break
    return error.value, len(proxy.seen) - before


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (s3.UNAVAILABLE, r"the store answered 503( \(SlowDown\))?"),
        (s3.RESET, "the connection was interrupted"),
        (s3.LATE, "the request timed out"),
    ],
)
def test_retries_end_with_a_clear_error(bucket, proxy, small_parts, harm, why):
    store = opened(bucket, 0.5, 0.2) if harm == s3.LATE else opened(bucket, 0.25)
    proxy.harm = lambda _: harm
    large = memoryview(bytes(PART + 1))
    attempts = {
        "k could not be written": lambda: store.put("k", memoryview(b"123")),
        "large could not be written": lambda: store.put("large", large),
        "c could not be created": lambda: store.create("c", b"123"),
        "r could not be read": lambda: read(store, "r", 0, 5),
        "s could not be read": lambda: store.size("s"),
        "g could not be read": lambda: store.get("g"),
        "d and 1 more could not be removed": lambda: store.delete(["d", "e"]),
        " could not be listed": lambda: store.list(),
    }
    if harm != s3.UNAVAILABLE:
        attempts = dict(list(attempts.items())[:4])
    for what, attempt in attempts.items():
        error, seen = patient_error(attempt, proxy)
        match = re.fullmatch(rf"{re.escape(bucket)}/?{what}: {why} \((?P<tries>\d+) tries\)", error.message)
        assert match, error.message
        assert not isinstance(error, DamagedState)
        assert int(match["tries"]) > 1
        if harm != s3.LATE:  # the proxy may not have begun to look when the client hangs up
            assert int(match["tries"]) == seen
        assert "can be reached" in error.hint
        assert error.__cause__ is None
        assert error.__context__ is None
    with pytest.raises(StateError, match=why):
        store.delete(["d"], patience_s=0)


def test_permanent_errors_are_not_retried(bucket, proxy, monkeypatch):
    store = opened(bucket)
    proxy.harm = lambda _: s3.FORBIDDEN
    for attempt in (lambda: store.put("k", memoryview(b"1")), lambda: store.create("k", b"1"), lambda: store.list()):
        with pytest.raises(StateError, match=r"the store answered 403( \(AccessDenied\))?$") as error:
            attempt()
        assert "credentials" in error.value.hint
        assert not error.value.usage
        assert not any(secret in error.value.message for secret in s3.SECRETS)
    assert len(proxy.seen) == 3
    proxy.calm()
    nowhere = opened("s3://no-such-bucket/a")
    for attempt in (lambda: nowhere.put("k", memoryview(b"1")), lambda: nowhere.get("k"), lambda: nowhere.list()):
        with pytest.raises(StateError, match=r"the store answered 404 \(NoSuchBucket\)") as error:
            attempt()
        assert "bucket" in error.value.hint
        assert error.value.usage, "the url must change"
    assert len(proxy.seen) == 3
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StateError, match="k could not be written"):
        opened(bucket).put("k", memoryview(b"1"))


def test_an_unreachable_store(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StateError, match=r"could not be listed: cannot connect \(\d+ tries\)"):
        opened(bucket, patience_s=0.2).list()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://host/x", "supported are s3://, gs://, az://, file://, memory://"),
        ("/a/folder", "'/a/folder' is not an object store url"),
        ("https://user:word@host/x", r"https://\.\.\. is not an object store url"),
        ("s3://user:word@bucket/x", "contains a user, a password"),
        ("s3://word@bucket/x", "contains a user, a password"),
        ("az://container/x?sig=word", "or a query"),
        ("s3:///x", "is not an object store url"),
        ("file://host/x", "is not an object store url"),
        ("file://", "is not an object store url"),
    ],
)
def test_urls_that_are_refused(url, why):
    with pytest.raises(UsageError, match=why) as error:
        open_store(url)
    assert "word" not in error.value.message.replace("password", "")
    assert error.value.hint


def test_an_endpoint_without_a_scheme_is_refused(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL does not begin with http"):
        open_store("s3://bucket")


def test_a_machine_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StateError, match="obstore is not installed") as error:
        open_store("s3://bucket/a")
    assert error.value.hint == "pip install obstore"


def test_other_clouds_open_by_their_environment(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "somebody")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c29tZXRoaW5n")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert repr(open_store("az://container/a/b/")) == "ObjectStore('az://container/a/b')"
    assert open_store("gs://bucket/a").name("k") == "gs://bucket/a/k"
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(StateError, match=r"az://container/a cannot be opened: .*Account must be specified"):
        open_store("az://container/a")


def test_reading_makes_no_folder(tmp_path):
    folder = tmp_path / "not" / "there"
    store = opened(folder.as_uri())
    assert (store.list(), store.list("a"), store.find("a")) == ([], [], None)
    store.delete(["a"])
    for ask in (lambda: store.size("a"), lambda: read(store, "a", 0, 1)):
        with pytest.raises(DamagedState, match="a does not exist"):
            ask()
    assert list(tmp_path.iterdir()) == []
    another = opened(folder.as_uri())
    assert another.create("a", b"1")
    assert (folder / "a").read_bytes() == b"1"
    assert store.find("a") == b"1"  # also by the one that was opened before


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "in the way").write_text("")
    with pytest.raises(StateError, match="cannot be opened"):
        opened((tmp_path / "in the way" / "store").as_uri())
    if os.geteuid() == 0:
        store = opened((tmp_path / "store").as_uri())
        (tmp_path / "store" / "k").mkdir(parents=True)
        (tmp_path / "store" / "k" / "x").touch()
        with pytest.raises(StateError, match="k could not be written"):
            store.put("k", memoryview(b"1"))
