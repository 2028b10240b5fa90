import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DamagedState, StateError
from headway.state import (
    CheckpointFacts,
    CheckpointManifest,
    Piece,
    begin_checkpoint,
    commit,
    dump_manifest,
    find_checkpoint,
    list_checkpoints,
    open_checkpoint,
    read_box,
    shard_name,
    verify_checkpoint,
    write_shard,
)
from headway.state.manifest import chunk_checksums, parse_manifest
from headway.state.source import CheckpointSource
from thinned import examples

OLD = Path(__file__).parent / "format_1"
A = np.arange(12, dtype="<u4").reshape(3, 4)
B = np.arange(100, 106, dtype="<u2")
FILE = "rank-00000.safetensors"


def sealed(fields):
    """A manifest with a right checksum, by the rule and not by the code."""
    body = json.dumps(fields, separators=(",", ":")).encode()
    return body[:-1] + b',"checksum":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def digest(tensors):
    """The digest of a state, by the rule: a hash of one line a tensor."""
    lines = [
        f"{name} {t['dtype']} {'x'.join(map(str, t['shape']))} {t['digest']}\n" for name, t in sorted(tensors.items())
    ]
    return hashlib.sha256("".join(lines).encode(errors="surrogatepass")).hexdigest()[:32]


def fields_of(path):
    fields = json.loads((path / "manifest.json").read_bytes())
    del fields["checksum"]
    return fields


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint that no test may change: a (3 x 4, in rows 2 + 1) and b."""
    begun = begin_checkpoint(tmp_path_factory.mktemp("c"), 5)
    shards = [
        [Piece("a", "float32", (3, 4), (0, 0), (2, 4), A[:2]), Piece("b", "bfloat16", (6,), (0,), (6,), B)],
        [Piece("a", "float32", (3, 4), (2, 0), (1, 4), A[2:])],
    ]
    written = [write_shard(begun.partial, shard_name(rank), pieces) for rank, pieces in enumerate(shards)]
    return commit(begun, CheckpointFacts(cursor=1, chain="", data_version="v"), written, workers=2)


class Told(CheckpointSource):
    """A checkpoint whose manifest says something else than the one that was written."""

    def __init__(self, path, manifest):
        self.location = str(path)
        self._path, self._manifest = path, manifest

    def manifest(self):
        return self._manifest

    def size(self, file):
        try:
            return (self._path / file).stat().st_size
        except OSError as error:
            raise DamagedState(f"{file}: {error.strerror}") from error

    def read(self, file, begin, out):
        content = (self._path / file).read_bytes()[begin : begin + len(out)]
        if len(content) != len(out):
            raise DamagedState(f"{file} ends early")
        out[:] = content


# -- format 1


def test_a_checkpoint_of_format_1_is_read(tmp_path):
    (entry,) = list_checkpoints(OLD)
    assert (entry.step, find_checkpoint(OLD)) == (7, entry.path)
    checkpoint = open_checkpoint(entry.path)
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.cursor, manifest.data_version, manifest.workers) == (7, 70, "v1", 2)
    assert (manifest.rng, manifest.recipe, manifest.mesh) == ({"0": "AA=="}, {}, {})
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()} == {
        "model/a": ("float32", (3, 4)),
        "model/b": ("bfloat16", (6,)),
    }
    assert np.array_equal(read_box(checkpoint, "model/a", (0, 0), (3, 4)), A)
    assert np.array_equal(read_box(checkpoint, "model/b", (0,), (6,)), B)
    for row in range(3):
        for column in range(4):
            assert read_box(checkpoint, "model/a", (row, column), (1, 1)).item() == A[row, column]
    assert np.array_equal(read_box(checkpoint, "model/a", (1, 1), (2, 2)), A[1:, 1:3])
    assert np.array_equal(read_box(checkpoint, "model/b", (2,), (3,)), B[2:5])
    verified = verify_checkpoint(entry.path)
    assert (verified.step, verified.tensors, verified.files) == (7, 2, 2)
    assert verified.bytes == sum(file.stat().st_size for file in entry.path.glob("*.safetensors"))


def flips(content):
    for place in range(len(content)):
        bad = bytearray(content)
        bad[place] ^= 1 << (place % 8)
        yield bytes(bad)


def test_every_flipped_byte_of_format_1_is_refused(tmp_path):
    shutil.copytree(OLD, tmp_path / "c")
    folder = tmp_path / "c" / "step-00000007"
    verify_checkpoint(folder)
    for bad in flips((folder / "manifest.json").read_bytes()):
        with pytest.raises(DamagedState, match="over there is damaged"):
            parse_manifest(bad, "over there")
    for path in sorted(folder.glob("*.safetensors")):
        good = path.read_bytes()
        for bad in flips(good):
            path.write_bytes(bad)
            with pytest.raises(DamagedState, match=path.name.replace(".", r"\.")):
                verify_checkpoint(folder)
        path.write_bytes(good)
    verify_checkpoint(folder)


def test_a_manifest_of_format_1_that_belies_its_files_is_refused(tmp_path):
    shutil.copytree(OLD, tmp_path / "c")
    folder = tmp_path / "c" / "step-00000007"

    def swapped(fields):
        fields["tensors"]["model/z"] = fields["tensors"].pop("model/a")

    def reshaped(fields):
        a = fields["tensors"]["model/a"]
        a["shape"] = [4, 3]
        a["pieces"][0].update(shape=[2, 3])
        a["pieces"][1].update(shape=[2, 3])

    def other_dtype(fields):
        fields["tensors"]["model/b"]["dtype"] = "float16"

    for change in (swapped, reshaped, other_dtype):
        fields = fields_of(OLD / "step-00000007")
        change(fields)
        fields["digest"] = digest(fields["tensors"])
        (folder / "manifest.json").write_bytes(sealed(fields))
        with pytest.raises(DamagedState, match="step-00000007"):
            open_checkpoint(folder)


# -- what the file says


def test_dumped_and_parsed_again_it_is_the_same(whole):
    content = (whole / "manifest.json").read_bytes()
    manifest = parse_manifest(content, "here")
    assert dump_manifest(manifest) == content
    fields = fields_of(whole)
    assert sealed(fields) == content
    assert fields["digest"] == digest(fields["tensors"])
    assert list(fields)[:3] == ["format", "step", "digest"]
    assert manifest.bytes == sum(file.stat().st_size for file in whole.glob("*.safetensors"))
    assert isinstance(manifest, CheckpointManifest)


@pytest.mark.parametrize(("size", "chunk"), [(0, 4), (1, 4), (4, 4), (5, 4), (12, 4), (13, 5), (3, 100)])
def test_a_checksum_is_taken_of_every_chunk(size, chunk):
    content = np.random.default_rng(size).bytes(size)
    want = [xxhash.xxh3_64_hexdigest(content[first : first + chunk]) for first in range(0, size, chunk)]
    assert list(chunk_checksums(memoryview(content), chunk)) == want
    assert len(want) == math.ceil(size / chunk)


# -- what is refused


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_any_changed_byte_is_refused(whole, data):
    content = bytearray((whole / "manifest.json").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255).filter(lambda value: value != content[place]))
    with pytest.raises(DamagedState, match="over there is damaged: its checksum is wrong"):
        parse_manifest(bytes(content), "over there")


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_any_part_and_any_addition_is_refused(whole, data):
    content = (whole / "manifest.json").read_bytes()
    kept = data.draw(st.integers(0, len(content) - 1))
    for other in (content[:kept], content[kept + 1 :], content + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(DamagedState):
            parse_manifest(other, "over there")


def test_a_newer_format_is_not_reported_as_damage(whole):
    fields = fields_of(whole) | {"format": 3, "something": "new"}
    with pytest.raises(StateError, match="format 3; this version of Headway reads up to 2") as error:
        open_checkpoint(Told(whole, sealed(fields)))
    assert error.value.hint == "upgrade headway"
    assert not isinstance(error.value, DamagedState)


def first(fields, tensor="a"):
    return fields["tensors"][tensor]["pieces"][0]


def add(fields, **tensor):
    """One more tensor, without elements: it needs no bytes."""
    shape = tensor.get("shape", [0])
    piece = {"file": FILE, "offset": 0, "start": [0] * len(shape), "shape": shape, "xxh3": []}
    fields["tensors"]["more"] = {"dtype": "uint8", "shape": shape, "digest": "0" * 16, "pieces": [piece]} | tensor


MALFORMED = {
    # of tensors
    "a piece is missing": lambda f: f["tensors"]["a"]["pieces"].pop(),
    "a piece is there twice": lambda f: f["tensors"]["a"]["pieces"].append(first(f)),
    "no pieces": lambda f: f["tensors"]["a"].update(pieces=[]),
    "pieces overlap": lambda f: f["tensors"]["a"]["pieces"][1].update(start=[1, 0]),
    "a piece reaches out of the tensor": lambda f: first(f).update(start=[2, 0]),
    "a huge start": lambda f: first(f).update(start=[2**80, 0]),
    "a start of fewer dims than the shape": lambda f: first(f).update(start=[0]),
    "a start of more dims than the shape": lambda f: first(f).update(start=[0, 0, 0]),
    "a piece of fewer dims than the tensor": lambda f: first(f).update(start=[0], shape=[2]),
    "a piece of more dims than the tensor": lambda f: first(f).update(start=[0, 0, 0], shape=[2, 4, 1]),
    "a negative start": lambda f: first(f).update(start=[-1, 0]),
    "a negative size": lambda f: f["tensors"]["a"].update(shape=[-3, -4]),
    "a tensor that is larger than its pieces": lambda f: f["tensors"]["b"].update(shape=[7]),
    "a huge tensor": lambda f: (f["tensors"]["b"].update(shape=[2**62]), first(f, "b").update(shape=[2**62])),
    "an unknown dtype": lambda f: f["tensors"]["a"].update(dtype="object"),
    "a wider dtype": lambda f: f["tensors"]["b"].update(dtype="float64"),
    "a digest that is no number": lambda f: f["tensors"]["a"].update(digest="x" * 16),
    "another digest": lambda f: f["tensors"]["a"].update(digest="0" * 16),
    "a name that is no text": lambda f: f["tensors"].update({"\ud800": f["tensors"].pop("b")}),
    # of places
    "an offset behind the file's end": lambda f: first(f).update(offset=10**6),
    "a piece that ends a byte behind the file's end": lambda f: f["tensors"]["a"]["pieces"][1].update(
        offset=f["tensors"]["a"]["pieces"][1]["offset"] + 1
    ),
    "a negative offset": lambda f: first(f).update(offset=-1),
    "a huge offset": lambda f: first(f).update(offset=2**70),
    "an offset that is no number": lambda f: first(f).update(offset="far"),
    "a file that is not listed": lambda f: f["files"].pop(FILE),
    "a file that is not there": lambda f: f["files"].update({"rank-00009.safetensors": f["files"][FILE]}),
    # of checksums
    "too few checksums": lambda f: first(f).update(xxh3=[]),
    "too many checksums": lambda f: first(f).update(xxh3=first(f)["xxh3"] * 2),
    "smaller chunks": lambda f: f.update(chunk_bytes=1),
    "no chunks": lambda f: f.update(chunk_bytes=0),
    "negative chunks": lambda f: f.update(chunk_bytes=-1),
    "a checksum that is no number": lambda f: first(f).update(xxh3=["z" * 16]),
    "a short checksum": lambda f: first(f).update(xxh3=["0"]),
    "another checksum": lambda f: first(f).update(xxh3=["0" * 16]),
    # of files
    "a file's size": lambda f: f["files"][FILE].update(bytes=f["files"][FILE]["bytes"] + 1),
    "a header that is longer than its file": lambda f: f["files"][FILE].update(header_bytes=2**43),
    "a header that no memory holds": lambda f: f["files"][FILE].update(header_bytes=2**62),
    "a header of no length at all": lambda f: f["files"][FILE].update(header_bytes=2**70),
    "a header's checksum": lambda f: f["files"][FILE].update(header_xxh3="0" * 16),
    # of names
    "a file elsewhere": lambda f: first(f).update(file="../../secret"),
    "a file with a folder": lambda f: first(f).update(file="x/rank-00000.safetensors"),
    "a listed file elsewhere": lambda f: f["files"].update({"../rank-00000.safetensors": f["files"][FILE]}),
    "a listed file of another kind": lambda f: f["files"].update({"manifest.json": f["files"][FILE]}),
    "a file name with a line behind it": lambda f: f["files"].update({FILE + "\n": f["files"][FILE]}),
    "an absurdly long file name": lambda f: f["files"].update({f"rank-{'0' * 500}.safetensors": f["files"][FILE]}),
    "a key that climbs": lambda f: f["files"][FILE].update(key="../other/run"),
    "a key that climbs in the middle": lambda f: f["files"][FILE].update(key="data/../../other"),
    "a key from the root": lambda f: f["files"][FILE].update(key="/etc/passwd"),
    "a key of nothing": lambda f: f["files"][FILE].update(key=""),
    "a long key": lambda f: f["files"][FILE].update(key="a" * 600),
    # of everything
    "a step before the first": lambda f: f.update(step=-1),
    "no cursor": lambda f: f.pop("cursor"),
    "no workers": lambda f: f.update(workers=0),
    "something more": lambda f: f.update(surprise=1),
    "something more in a piece": lambda f: first(f).update(surprise=1),
    "a tensor less": lambda f: f["tensors"].pop("a"),
    "tensors in a list": lambda f: f.update(tensors=[]),
    "tensors that are none": lambda f: f.update(tensors={"a": 3}),
    "a format of the past": lambda f: f.update(format=0),
    "a format that is no number": lambda f: f.update(format="2"),
    "a format that is nothing": lambda f: f.update(format=None),
    "format 1, and what it never had": lambda f: f.update(format=1),
    "another whole digest": lambda f: f.update(digest="0" * 32),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_manifests_raise_only_damaged_state(whole, what):
    """All have a right checksum."""
    fields = fields_of(whole)
    MALFORMED[what](fields)
    with pytest.raises(DamagedState):
        verify_checkpoint(Told(whole, sealed(fields)))


HARMLESS = {"another digest", "a digest that is no number", "another whole digest", "a tensor less"}
NO_TENSORS = {"tensors in a list", "tensors that are none"}


@pytest.mark.parametrize("what", [what for what in MALFORMED if what not in HARMLESS | NO_TENSORS])
def test_even_if_the_digest_agrees(whole, what):
    """The digest of the tensors' entries shields what comes after it; these have a right one."""
    fields = fields_of(whole)
    MALFORMED[what](fields)
    fields["digest"] = digest(fields["tensors"])
    with pytest.raises(DamagedState):
        verify_checkpoint(Told(whole, sealed(fields)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"{nope}",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"format":' + b"9" * 9999 + b"}",
    ],
    ids=lambda body: str(body[:12]),
)
def test_a_manifest_that_is_no_json_object_is_refused(body):
    """However it is sealed."""
    seal = b',"checksum":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'
    for content in (body, body + seal, body[:-1] + seal):
        with pytest.raises(DamagedState, match="here"):
            parse_manifest(content, "here")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("shape", [[0], [0, 3], [2**70, 0], [0, 2**70], [3, 0, 2**33]])
def test_a_tensor_without_elements_costs_nothing(whole, shape):
    """A shape may be absurd as long as it is empty: refused or passed, and at once."""
    fields = fields_of(whole)
    add(fields, shape=shape)
    fields["digest"] = digest(fields["tensors"])
    try:
        count = verify_checkpoint(Told(whole, sealed(fields))).tensors
    except DamagedState:
        count = 0
        assert math.inf > max(shape) > 2**31
    assert count in (0, 3)
