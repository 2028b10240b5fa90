"""Text as it comes from tokens: pieces add up, characters are whole, stop texts never show."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.tokenizer import TextTokenizer, train_tokenizer
from headway.inference.text import TextStream, text_after
from thinned import examples


def text_pieces(ids: Iterable[int], decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> Iterator[str]:
    """Yield the texts of a stream of ids; `before` are the preceding ones."""
    stream = TextStream(decode, before)
    for token in ids:
        if text := stream.add(token):
            yield text
    if text := stream.end():
        yield text


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    text = "def headway(steps):\n    return steps + 1  # Zeit läuft 時間 🎉\n"
    return train_tokenizer([text] * 3, vocab_size=300)


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


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=60), cut=st.integers(0, 20), end=st.integers(0, 200))
def test_a_whole_text_is_that_of_its_pieces(tokenizer: TextTokenizer, text: str, cut: int, end: int) -> None:
    ids = [int(i) for i in tokenizer.encode(text)][:end]  # which may end, or begin, within a character
    pieces = text_pieces(ids[cut:], tokenizer.decode, before=ids[:cut])
    assert text_after(ids[:cut], ids[cut:], tokenizer.decode) == "".join(pieces)


def test_half_characters_wait_for_the_rest(tokenizer: TextTokenizer) -> None:
    ids = [int(i) for i in tokenizer.encode("🦩é")]
    assert len(ids) > 2
    assert list(text_pieces(ids, tokenizer.decode)) == ["🦩", "é"]
    assert "".join(text_pieces(ids[:2], tokenizer.decode)) == "\N{REPLACEMENT CHARACTER}"


@settings(max_examples=examples(100), deadline=None)
@given(
    text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)  # fmt: skip
def test_nothing_of_a_stop_text_is_ever_shown(text: str, stop: list[str], include: bool) -> None:
    """Against the definition: the text up to the first place where any stop text begins."""
    stream = TextStream(lambda ids: "".join(map(chr, ids)), (), stop, include)
    shown = ""
    for token in map(ord, text):
        shown += stream.add(token)
        if stream.stopped:
            break
    shown += stream.end()
    complete = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not complete:
        assert (shown, stream.stopped) == (text, False)
    else:
        first_end = min(end for end, _, _ in complete)  # known as soon as one is complete
        begin, which = min((text[:first_end].find(s), s) for _, _, s in complete if s in text[:first_end])
        assert stream.stopped
        assert shown == (text[: begin + len(which)] if include else text[:begin])
