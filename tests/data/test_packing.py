"""Packing against brute force: every sample once, none across rows, no more rows than first fit needs."""

import numpy as np
import pytest
from chat_datasets import chat_dataset, data_of, expected_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data import packing as packing_module
from headway.data.loader import MASKED
from headway.data.packed_reader import PackedReader
from headway.data.packing import compute_packing, fill_bins, pack_dataset
from headway.errors import DataError


def one_at_a_time(lengths, capacity):
    """Best-fit decreasing as it is defined; the rooms that are left."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            best = min(fitting, key=lambda index: rooms[index])
            rooms[best] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.lists(st.integers(1, 12), max_size=60), st.integers(12, 30))
@settings(max_examples=60, deadline=None)
def test_bins_are_those_of_best_fit_decreasing_one_at_a_time(lengths, capacity):
    bins = fill_bins(np.array(lengths, dtype=np.int64), capacity)
    loads = np.bincount(bins, weights=np.array(lengths)) if lengths else np.zeros(0)
    assert sorted(capacity - loads) == one_at_a_time(lengths, capacity)


def test_many_short_samples_waste_little():
    lengths = np.random.default_rng(0).integers(20, 400, 50_000)
    bins = fill_bins(lengths, 4096)
    assert np.bincount(bins, weights=lengths).max() <= 4096
    assert bins.max() + 1 <= 1.0005 * lengths.sum() / 4096 + 1


@pytest.mark.parametrize("kind", ["chat", "pairs", "labelled"])
@pytest.mark.parametrize("over_length", ["drop", "truncate", "split"])
@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_rows_hold_every_sample_once_with_its_labels(tmp_path, kind, over_length, loss_on):
    dataset, samples = chat_dataset(tmp_path / "chats", kind, seed=3)
    seq = 40
    data = data_of(dataset, seq=seq, holdout=0.25, over_length=over_length, loss_on=loss_on)
    if kind != "chat" and over_length == "split":
        with pytest.raises(DataError, match="cannot be split"):
            compute_packing(dataset, data)
        return
    packing = compute_packing(dataset, data)
    reader = PackedReader([dataset], [packing], loss_on)
    assert reader.windows == packing.rows
    batch = reader.read(np.arange(packing.rows))
    assert batch.trained == (batch.labels != MASKED).sum() == packing.counts.trained_tokens
    expected = expected_rows(samples, kind, seq, over_length, loss_on)
    kept_out = held_out_conversations(dataset, data)
    seen = []
    for row in range(packing.rows):
        numbers = batch.documents[row]
        assert (np.diff(numbers) >= 0).all()
        assert (np.diff(numbers) <= 1).all()
        padding = set(numbers[batch.inputs[row] == 0]) if (batch.inputs[row] == 0).any() else set()
        in_row = []
        for number in sorted(set(numbers.tolist()) - padding):
            where = numbers == number
            sample = int(batch.columns["sample"][row, number])
            in_row.append((sample, batch.inputs[row][where].tolist(), batch.labels[row][where].tolist()))
            assert batch.columns["weight"][row, number] == np.float32(samples[sample].weight)
            if kind == "labelled":
                assert batch.columns["desirable"][row, number] == samples[sample].desirable
        assert (batch.labels[row][batch.inputs[row] == 0] == MASKED).all()
        assert batch.columns["weight"].shape[1] % 2 == 0
        if kind != "chat":  # chosen and rejected are neighbours
            assert all(a[0] + 1 == b[0] and a[0] % 2 == 0 for a, b in zip(in_row[::2], in_row[1::2], strict=True))
        held = {samples[sample].conversation in kept_out for sample, _, _ in in_row}
        assert held == {row < packing.held_out}
        seen += in_row
    assert sorted(seen) == sorted(expected)
    assert packing.counts.tokens == sum(len(ids) for _, ids, _ in expected)


def held_out_conversations(dataset, data):
    """As many as the fraction says, whichever they are: read off the first rows, and counted."""
    packing = compute_packing(dataset, data)
    conversations = np.concatenate([shard["conversation"] for shard in dataset.samples])
    parts = packing.parts[: packing.ends[packing.held_out - 1]] if packing.held_out else packing.parts[:0]
    chosen = set(conversations[parts[:, 0]].tolist())
    assert len(chosen) <= max(1, int(dataset.manifest.chat.conversations * data.holdout))
    return chosen


def test_a_packing_is_stored_and_computed_again_only_if_it_is_damaged_or_for_other_settings(tmp_path, monkeypatch):
    dataset, _ = chat_dataset(tmp_path / "chats", "chat", seed=1)
    computed = []
    compute = packing_module.compute_packing
    monkeypatch.setattr(packing_module, "compute_packing", lambda *a: computed.append(1) or compute(*a))
    data = data_of(dataset, seq=64)
    first = pack_dataset(dataset, data)
    again = pack_dataset(dataset, data)
    assert len(computed) == 1
    assert np.array_equal(first.parts, again.parts)
    assert np.array_equal(first.ends, again.ends)
    assert (first.counts, first.held_out) == (again.counts, again.held_out)
    pack_dataset(dataset, data_of(dataset, seq=65))
    pack_dataset(dataset, data_of(dataset, seq=64, loss_on="last"))
    assert len(computed) == 3
    for file in (dataset.path / packing_module.FOLDER).iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    pack_dataset(dataset, data)
    assert len(computed) == 4


def test_nothing_left_to_train_on_is_an_error_with_the_longest_length(tmp_path):
    dataset, samples = chat_dataset(tmp_path / "chats", "chat", seed=1)
    longest = max(len(sample.ids) for sample in samples)
    with pytest.raises(DataError, match=r"data.seq = 3") as caught:
        compute_packing(dataset, data_of(dataset, seq=3))
    assert str(longest) in caught.value.hint
