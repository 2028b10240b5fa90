"""The process with the model: log-likelihoods against a plain forward pass, windows, lengths, sampling."""

from typing import Any

import pytest
import torch

from headway.data.tokenizer import train_tokenizer
from headway.errors import DataError, ModelError, RequestError
from headway.inference import LLM, EngineOptions, LoadedModel
from headway.inference.evaluate import AskedTask, EvaluateRequest, encode_pair, evaluate, rolling_windows
from headway.models import empty_decoder, init_weights
from headway.recipe import Model

MODEL = Model(vocab_size=300, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)
TEXT = "def headway(steps):\n    return steps + 1  # Zeit läuft 時間 🎉\n"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if m['content'] is defined else raise_exception('empty') }}{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    decoder = empty_decoder(MODEL)
    init_weights(decoder, seed=0)
    tokenizer = train_tokenizer([TEXT] * 3, vocab_size=300)
    end = tokenizer.end_of_text
    return LoadedModel("tiny", decoder.eval(), torch.device("cpu"), 300, 64, tokenizer, (end,), chat_template=TEMPLATE)


@pytest.fixture
def ask(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(EvaluateRequest, "load", lambda _: tiny)

    def run(kind: str, *questions: dict[str, Any], samples: int = 1, seed: int = 0, **task: Any) -> dict[int, Any]:
        asked = [{"number": n, "where": f"f line {n + 1}"} | question for n, question in enumerate(questions)]
        request = EvaluateRequest(
            tasks=[AskedTask(name="t", kind=kind, questions=asked, **task)],
            samples=samples, seed=seed, options={"cache_tokens": 2000},
        )  # fmt: skip
        messages: list[dict[str, Any]] = []
        evaluate(request, messages.append)
        assert messages[0] == {"ready": {"device": "cpu", "dtype": "float32", "chat_template": True}}
        return {message["question"]: message for message in messages[1:]}

    return run


@torch.no_grad()
def logprob(tiny: LoadedModel, ids: list[int], first: int) -> float:
    """The sum over tokens from `first` on, by one pass without a cache."""
    logprobs = tiny.module(torch.tensor([ids]))[0].double().log_softmax(-1)
    return float(sum(logprobs[place - 1, ids[place]] for place in range(first, len(ids))))


def ids_of(tiny: LoadedModel, text: str) -> list[int]:
    assert tiny.tokenizer is not None
    return [int(token) for token in tiny.tokenizer.encode(text)]


def test_choices_have_the_likelihood_of_a_plain_forward_pass(tiny: LoadedModel, ask: Any) -> None:
    questions = [
        {"prompt": "def headway", "choices": ["(steps)", "return", "1"]},
        {"prompt": "return ", "choices": ["steps", " x"]},  # white space goes to the choice
        {"prompt": "", "choices": ["def", "x"]},
    ]
    answers = ask("choice", *questions)
    for number, question in enumerate(questions):
        prompt = question["prompt"]
        for choice, found in zip(question["choices"], answers[number]["logprobs"], strict=True):
            whole = ids_of(tiny, f"{prompt} {choice}")
            ids = whole if prompt else [tiny.end_ids[0], *whole]
            first = len(ids_of(tiny, prompt.rstrip())) if prompt else 1
            assert found == pytest.approx(logprob(tiny, ids, first), abs=1e-4)


def test_a_chat_s_choices_follow_the_template(tiny: LoadedModel, ask: Any) -> None:
    question = {"messages": [{"role": "user", "content": "def"}], "choices": ["x", "return"]}
    answer = ask("choice", question)[0]
    assert answer["prompt"] == "<user>def<assistant>"
    for choice, found in zip(question["choices"], answer["logprobs"], strict=True):
        before = ids_of(tiny, "<user>def<assistant>")
        assert found == pytest.approx(
            logprob(tiny, ids_of(tiny, f"<user>def<assistant>{choice}"), len(before)), abs=1e-4
        )


def test_texts_longer_than_the_model_are_scored_window_by_window(tiny: LoadedModel, ask: Any) -> None:
    texts = [TEXT, TEXT * 9]
    answers = ask("perplexity", *({"prompt": text} for text in texts))
    most = 64 - 2  # a window's first token is context, and the engine samples one more
    for number, text in enumerate(texts):
        ids = ids_of(tiny, text)
        assert answers[number]["tokens"] == len(ids)
        total, done = 0.0, 0
        while done < len(ids):
            count = min(most, len(ids) - done)
            before = [tiny.end_ids[0]] if done == 0 else ids[done + count - most - 1 : done]
            total += logprob(tiny, before + ids[done : done + count], len(before))
            done += count
        assert answers[number]["logprob"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 10, 11, 23])
def test_windows_predict_each_token_once_with_context(length: int) -> None:
    ids, most = list(range(100, 100 + length)), 5
    windows = list(rolling_windows(ids, 7, most))
    assert [token for window, first in windows for token in window[first:]] == ids
    assert all(len(window) <= most + 1 and first >= 1 for window, first in windows)
    assert all(window == ([7] if at == 0 else []) + window[at == 0 :] for at, (window, _) in enumerate(windows))
    assert all(len(window) == most + 1 for window, _ in windows[1:])  # the last one reaches back


def test_greedy_answers_are_the_likeliest_tokens(tiny: LoadedModel, ask: Any) -> None:
    (answer,) = ask("generate", {"prompt": "def"}, max_tokens=5, temperature=0.0)[0]["outputs"]
    ids = ids_of(tiny, "def")
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(tiny.module(torch.tensor([ids]))[0, -1].argmax()))
    assert tiny.tokenizer is not None
    assert answer["text"] == tiny.tokenizer.decode(ids[len(ids_of(tiny, "def")) :])
    assert (answer["finish"], answer["tokens"]) == ("length", 5)


def test_samples_depend_on_the_seed_and_the_question_alone(ask: Any) -> None:
    questions = [{"prompt": "def"}, {"prompt": "def"}, {"prompt": "return"}]
    options = {"max_tokens": 6, "temperature": 1.0, "samples": 4}
    answers = ask("generate", *questions, **options)
    texts = [[output["text"] for output in answers[number]["outputs"]] for number in range(3)]
    assert texts[0] != texts[1]
    assert len(set(texts[0] + texts[1])) > 4
    alone = ask("generate", questions[2] | {"number": 2}, **options)[2]["outputs"]
    assert [output["text"] for output in alone] == texts[2]
    other = ask("generate", questions[2] | {"number": 2}, seed=1, **options)[2]["outputs"]
    assert [output["text"] for output in other] != texts[2]


@pytest.mark.parametrize(
    ("kind", "question", "message"),
    [
        ("generate", {"prompt": "x" * 200}, r"f line 1: the prompt has \d+ tokens, but the model takes 63"),
        ("choice", {"prompt": "q", "choices": ["a", "x" * 200]}, "f line 1: the prompt with choice 2 has .* takes 63"),
        (
            "choice",
            {"messages": [{"role": "user"}], "choices": ["a", "b"]},
            "f line 1: message 1 has no content",
        ),
    ],
)
def test_what_a_model_cannot_take_is_named(ask: Any, kind: str, question: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ask(kind, question)


def test_chat_needs_a_template(tiny: LoadedModel, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "chat_template", None)
    with pytest.raises(DataError, match="f line 1: tiny has no chat template") as refused:
        ask("generate", {"messages": [{"role": "user", "content": "x"}]})
    assert refused.value.hint == "use --no-chat, or chat = false in the task"


def test_damaged_weights_are_named(tiny: LoadedModel, ask: Any) -> None:
    weight = next(tiny.module.parameters())
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(ModelError, match="f line 1: the model's log-likelihood is not a number"):
            ask("perplexity", {"prompt": "def"})
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_a_model_without_tokenizer_is_refused(tiny: LoadedModel, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "tokenizer", None)
    with pytest.raises(RequestError, match="tiny has no tokenizer"):
        ask("generate", {"prompt": "x"})


def test_a_choice_without_tokens_of_its_own_is_refused(tiny: LoadedModel, ask: Any) -> None:
    llm = LLM(tiny, options=EngineOptions(cache_tokens=2000))
    ids, first = encode_pair(llm, "def ", "x")
    assert first < len(ids)
    with pytest.raises(DataError, match="f line 1: choice 1 has no token of its own"):
        ask("choice", {"prompt": "de", "choices": ["f", "x"]}, delimiter="")
