"""Generation against `transformers`, recomputation without a cache, and counted frequencies."""

import math
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.tokenizer import TextTokenizer, train_tokenizer
from headway.inference import generate_ids, sample_token, text_pieces
from headway.models import Decoder, empty_decoder, init_weights, write_folder
from headway.recipe import Model
from thinned import examples

MODEL = Model(vocab_size=320, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = empty_decoder(MODEL)
    init_weights(model, seed=0)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    text = "def headway(steps):\n    return steps + 1  # Zeit läuft 時間 🎉\n"
    return train_tokenizer([text] * 3, vocab_size=300)


def test_greedy_equals_transformers(decoder: Decoder, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    write_folder(tmp_path / "model", decoder.model, dict(decoder.named_parameters()), seq=128)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = [5, 17, 300, 2]
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    expected = hf_model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 4), **settings)
    assert list(generate_ids(decoder, prompt, max_tokens=60, temperature=0)) == expected[0, 4:].tolist()


def test_the_cache_changes_nothing(decoder: Decoder) -> None:
    ids = [3, 1, 4]
    sampled = list(generate_ids(decoder, ids, max_tokens=30, temperature=0.9, top_k=20, seed=7))
    draw = torch.Generator().manual_seed(7)
    for got in sampled:
        with torch.no_grad():
            logits = decoder(torch.tensor([ids]))[0, -1]
        assert got == sample_token(logits, temperature=0.9, top_k=20, generator=draw)
        ids.append(got)


def test_the_same_seed_gives_the_same_ids(decoder: Decoder) -> None:
    runs = [tuple(generate_ids(decoder, [1], max_tokens=20, seed=seed)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_stops_before_the_stop_id(decoder: Decoder) -> None:
    free = list(generate_ids(decoder, [9], max_tokens=50, temperature=0))
    stop = free[10]
    first = free.index(stop)
    assert list(generate_ids(decoder, [9], max_tokens=50, temperature=0, stop_id=stop)) == free[:first]


def test_ids_the_tokenizer_lacks_are_never_chosen(decoder: Decoder) -> None:
    assert max(generate_ids(decoder, [1], max_tokens=200, temperature=5.0, vocab_size=7)) < 7


def test_sampling_follows_probabilities() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    draw = torch.Generator().manual_seed(0)
    counts = Counter(sample_token(logits, temperature=0.7, top_k=3, generator=draw) for _ in range(4000))
    weights = {i: math.exp(logits[i].item() / 0.7) for i in (0, 1, 2)}
    for i, weight in weights.items():
        share = weight / sum(weights.values())
        assert counts[i] / 4000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))
    assert counts[3] == 0


@pytest.mark.parametrize("temperature", [0, 1e-30])
def test_zero_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([-5.0, 1e4, 1e4 - 1, 0.0])
    draw = torch.Generator().manual_seed(0)
    assert {sample_token(logits, temperature=temperature, top_k=0, generator=draw) for _ in range(20)} == {1}


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=60), cut=st.integers(0, 20))
def test_pieces_add_up_to_the_text(tokenizer: TextTokenizer, text: str, cut: int) -> None:
    ids = [int(i) for i in tokenizer.encode(text)]
    before, after = ids[:cut], ids[cut:]
    whole, start = tokenizer.decode(ids), tokenizer.decode(before)
    pieces = list(text_pieces(after, tokenizer.decode, before=before))
    assert all(pieces)
    if whole.startswith(start):  # else the cut went through a character
        assert "".join(pieces) == whole[len(start) :]


def test_half_characters_wait_for_the_rest(tokenizer: TextTokenizer) -> None:
    ids = [int(i) for i in tokenizer.encode("🦩é")]
    assert len(ids) > 2
    assert list(text_pieces(ids, tokenizer.decode)) == ["🦩", "é"]
    assert "".join(text_pieces(ids[:2], tokenizer.decode)) == "\N{REPLACEMENT CHARACTER}"
