import numpy as np
import pytest

from headway.errors import StateError, UsageError
from headway.recipe import Store
from headway.state import CheckpointFacts, Piece, begin_checkpoint, commit, read_box, shard_name, write_shard
from headway.state.address import address_in_store, is_in_store, open_address, split_address, store_url

BITS = np.arange(6, dtype="<u4").reshape(2, 3)


@pytest.mark.parametrize(
    ("address", "want"),
    [
        ("/runs/a/checkpoints/step-00000012", False),
        ("step-00000012", False),
        ("c:/runs", False),
        ("s3://bucket/runs/a/step-00000012", True),
        ("file:///somewhere/step-12", True),
    ],
)
def test_store_addresses_are_distinguished_from_folders(address, want):
    assert is_in_store(address) == want


def test_the_address_of_a_step_is_that_of_its_folder():
    assert address_in_store("s3://bucket/runs/a", 12) == "s3://bucket/runs/a/step-00000012"
    assert address_in_store("gs://b/r", 123456789) == "gs://b/r/step-123456789"


def test_store_url_appends_the_run_name():
    for url in ("s3://bucket/runs", "s3://bucket/runs/"):
        assert store_url(Store(url=url), "run-1") == "s3://bucket/runs/run-1"


@pytest.mark.parametrize(
    ("address", "want"),
    [
        ("s3://bucket/runs/a", ("s3://bucket/runs/a", None)),
        ("s3://bucket/runs/a/", ("s3://bucket/runs/a", None)),
        ("s3://bucket/runs/a/step-00000012", ("s3://bucket/runs/a", 12)),
        ("s3://bucket/runs/a/step-12/", ("s3://bucket/runs/a", 12)),
        ("s3://bucket/runs/a@12", ("s3://bucket/runs/a", 12)),
        ("file:///folder/a@12", ("file:///folder/a", 12)),
        ("file:///me@home/a/step-12", ("file:///me@home/a", 12)),
        ("s3://me:secret@12", ("s3://me:secret@12", None)),
    ],
)
def test_addresses_are_split_into_run_and_step(address, want):
    assert split_address(address) == want


def test_a_folder_is_opened(tmp_path):
    begun = begin_checkpoint(tmp_path, 12)
    shard = write_shard(begun.partial, shard_name(0), [Piece("w", "float32", (2, 3), (0, 0), (2, 3), BITS)])
    path = commit(begun, CheckpointFacts(cursor=0, chain="", data_version="v"), [shard], workers=1)
    checkpoint = open_address(str(path))
    assert checkpoint.location == str(path)
    assert np.array_equal(read_box(checkpoint, "w", (0, 0), (2, 3)), BITS)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(StateError, match=r"step-00000012/manifest\.json cannot be read"):
        open_address(str(tmp_path / "step-00000012"))


@pytest.mark.parametrize("address", ["s3://bucket/runs/a", "s3://bucket/step-", "S3://b/r/step-1"])
def test_malformed_checkpoint_address_is_refused(address):
    with pytest.raises(UsageError, match="is not a checkpoint address") as refused:
        open_address(address)
    assert "step-" in refused.value.hint


@pytest.mark.parametrize("address", ["s3:///step-x", "ftp://me:secret@host/x", "s3://me:secret@bucket/r/step-7"])
def test_invalid_store_is_refused_without_repeating_a_password(address):
    with pytest.raises(UsageError) as refused:
        open_address(address)
    assert "secret" not in refused.value.message + (refused.value.hint or "")
