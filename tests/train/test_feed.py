import numpy as np
import pytest
import torch

from headway.data import Loader, ShardWriter, WindowReader, finish_dataset, open_dataset, split_dataset
from headway.train.feed import TURNS, DeviceFeed

SEQ, BATCH = 16, 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder, dtype="uint16", end_of_text=0, shard_tokens=1000)
    for _ in range(300):
        writer.add(rng.integers(1, 300, int(rng.integers(0, 25))))
        writer.end_document()
    finish_dataset(folder, writer, vocab_size=300, tokenizer=b"{}")
    return open_dataset(folder)


def loader(dataset, **options):
    return Loader(WindowReader(dataset, SEQ, **options), split_dataset(dataset, SEQ, 0.1), 3, BATCH, rows=(1, 4))


@pytest.mark.parametrize("masks", [False, True])
def test_device_batches_equal_loader_batches(dataset, masks):
    feed = DeviceFeed(loader(dataset, mask_boundaries=masks, documents=True), torch.device("cpu"))
    plain = loader(dataset, mask_boundaries=masks, documents=True)
    for cursor in range(0, 3 * TURNS * BATCH, BATCH):
        (fed, trained, counts), want = feed.read(cursor), plain.read(cursor)
        assert fed.inputs.tolist() == want.inputs.tolist()
        assert fed.labels.tolist() == want.labels.tolist()
        assert fed.documents.tolist() == want.documents.tolist()
        assert fed.documents.dtype == torch.int32
        assert (trained, counts) == (want.trained, (want.trained,))


def test_document_buffers_are_valid_until_reused(dataset):
    feed = DeviceFeed(loader(dataset, documents=True), torch.device("cpu"))
    read = [feed.read(step * BATCH).batch for step in range(TURNS)]
    kept = [(fed.inputs.clone(), fed.documents.clone()) for fed in read]
    feed_again = loader(dataset, documents=True)
    for step, (fed, (inputs, documents)) in enumerate(zip(read, kept, strict=True)):
        assert torch.equal(fed.inputs, inputs)
        assert torch.equal(fed.documents, documents)
        assert documents.tolist() == feed_again.read(step * BATCH).documents.tolist()


def test_documents_are_none_unless_requested(dataset):
    assert DeviceFeed(loader(dataset), torch.device("cpu")).read(0).batch.documents is None


@pytest.mark.gpu
def test_documents_are_copied_to_a_gpu_without_a_host_sync(dataset):
    feed = DeviceFeed(loader(dataset, documents=True), torch.device("cuda"))
    want = loader(dataset, documents=True)
    feed.read(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = [feed.read(step * BATCH).batch for step in range(TURNS)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, fed in enumerate(read):
        assert fed.documents.device.type == "cuda"
        assert fed.documents.tolist() == want.read(step * BATCH).documents.tolist()


def test_smaller_batch_uses_first_rows_of_a_buffer(dataset):
    reader = WindowReader(dataset, SEQ, documents=True)
    split = split_dataset(dataset, SEQ, 0.1)
    feed = DeviceFeed(Loader(reader, split, 3, 8, rows=(4, 8)), torch.device("cpu"))
    small = Loader(reader, split, 3, 4, rows=(2, 4))
    for cursor, batch in ((0, 4), (4, 4), (8, 8), (16, 8), (4, 4)):
        fed = feed.read(cursor, batch).batch
        want = small.read(cursor) if batch == 4 else Loader(reader, split, 3, 8, rows=(4, 8)).read(cursor)
        assert fed.inputs.tolist() == want.inputs.tolist()
        assert fed.labels.tolist() == want.labels.tolist()
        assert fed.documents.tolist() == want.documents.tolist()
