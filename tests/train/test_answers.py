"""Answers of several turns: the tokens that are trained on are those that were sampled, whenever a reply comes."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chat_models import CHATML, byte_tokenizer, chat_template
from headway.data.loader import MASKED
from headway.data.prompts import Prompt
from headway.errors import RequestError
from headway.inference import EngineOptions, LoadedModel, SamplingParams, TextEngine
from headway.inference.chat import render_after_turn
from headway.inference.outputs import Output, WholeOutput
from headway.inference.text_engine import TextOutput
from headway.models import empty_decoder, init_weights
from headway.recipe import Model
from headway.recipe.rl import Rl
from headway.rl.environment_pool import TurnResult
from headway.rl.environments import Reply
from headway.rl.packing import pack_answers
from headway.rl.rollout import AnswerScore, Rollout
from headway.rl.rollout_files import from_lines, to_lines
from headway.train.answers import AnswerRequest, AnswerSampler, answer_seed, reply_ids

TOKENIZER = byte_tokenizer("12")
END = TOKENIZER.raw.token_to_id("<|im_end|>")
VOCABULARY = TOKENIZER.vocab_size


@pytest.fixture(scope="module", autouse=True)
def own_environments() -> Iterator[None]:
    folder = str(Path(__file__).parent.parent / "rl")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def ids_of(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(text)]


def loaded(module: Any = None) -> LoadedModel:
    model = LoadedModel("tiny", module, torch.device("cpu"), VOCABULARY, 200, TOKENIZER, (END,))
    model.chat_template, model.special_tokens = CHATML, {"bos_token": "<bos>"}
    return model


class ScriptedEngine(TextEngine):
    """Writes what a function of the text so far says, byte by byte, and then the end of the turn."""

    def __init__(self, script: Callable[[str], str]) -> None:
        self.loaded, self._script = loaded(), script
        self.left, self.written = dict[str, list[int]](), dict[str, tuple[int, ...]]()
        self.prompts = list[tuple[str, list[int], SamplingParams]]()

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        adapter: str | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """See TextEngine."""
        self.prompts.append((request_id, prompt_ids, params))
        # Bytes one by one: not the tokens that the tokenizer would give the text.
        text = self._script(TOKENIZER.decode(prompt_ids))
        ids = [TOKENIZER.raw.token_to_id(letter) for letter in text.replace(" ", "Ġ")]
        self.left[request_id] = [*ids, END][: params.max_tokens]
        self.written[request_id] = tuple(self.left[request_id])

    @property
    def busy(self) -> bool:
        """See TextEngine."""
        return bool(self.left)

    def step(self) -> list[TextOutput]:
        """See TextEngine."""
        outputs = []
        for name, left in list(self.left.items()):
            left.pop()
            if not left:
                ids = self.written[name]
                whole = WholeOutput(ids, tuple(-1.0 - token / 1000 for token in ids))
                output = Output(name, 0, None, "stop" if ids[-1] == END else "length", whole=whole)
                outputs.append(TextOutput(output, self.decode([*ids], skip_special_tokens=True)))
                del self.left[name]
        return outputs


def calculates(text: str) -> str:
    """Add up three numbers in two sums, then say the last."""
    *_, after = text.rpartition("?")
    match after.replace("<|im_end|>", "").split(";"):
        case [""]:
            return "12+3="
        case [_, ""]:
            return "15+4="
        case _:
            return "19"


def section(name: str = "Calculator", **settings: Any) -> Rl:
    defaults = {"reward_timeout_s": 600.0, "reward_workers": 1, "max_tokens": 60}
    return Rl(environment=f"own_environments:{name}", **{**defaults, **settings})


def requests(count: int = 1, **fields: Any) -> list[AnswerRequest]:
    prompt = Prompt(7, tuple(ids_of("12+3+4?")), "12+3+4?", {"target": 19, **fields})
    return [AnswerRequest(prompt, 5, answer) for answer in range(count)]


def sampled(sampler: AnswerSampler, asked: list[AnswerRequest], **options: Any) -> list[Rollout]:
    done = list[Rollout]()
    sampler.sample(asked, done.append, lambda: None, **options)
    return sorted(done, key=lambda rollout: (rollout.sample, rollout.answer))


def scripted(rl: Rl, script: Callable[[str], str] = calculates, count: int = 1) -> tuple[list[Rollout], ScriptedEngine]:
    engine = ScriptedEngine(script)
    sampler = AnswerSampler(rl, 3, engine, lambda: None)
    try:
        return sampled(sampler, requests(count)), engine
    finally:
        sampler.close()


# -- tokens


def test_an_answer_is_its_turns_and_the_replies_between_them() -> None:
    (rollout,), engine = scripted(section())
    assert rollout.turns == ("12+3=", "15+4=", "19")
    assert rollout.text == "12+3=15;15+4=19;19"
    assert TOKENIZER.decode(rollout.token_ids) == "12+3=<|im_end|>15;15+4=<|im_end|>19;19<|im_end|>"
    assert rollout.finish == "stop"
    assert rollout.score == AnswerScore(0.875, {"environment": 0.875})
    assert from_lines(to_lines([rollout])) == [rollout]
    names, prompts, params = zip(*engine.prompts, strict=True)
    assert names == ("5/0",) * 3
    assert [one.max_tokens for one in params] == [60, 60 - 6 - 3, 60 - 2 * (6 + 3)]
    assert len({one.seed for one in params}) == 3
    for (start, _), prompt in zip(rollout.written, prompts, strict=True):
        assert tuple(prompt) == rollout.prompt_ids + rollout.token_ids[:start], "never encoded again"


def test_only_what_the_model_wrote_is_trained_on() -> None:
    (rollout,), _ = scripted(section())
    assert rollout.written == ((0, 6), (9, 15), (18, 21))
    texts = [TOKENIZER.decode(rollout.token_ids[start:end]) for start, end in rollout.written]
    assert texts == ["12+3=<|im_end|>", "15+4=<|im_end|>", "19<|im_end|>"]
    assert len(ids_of("12+3=")) == 4
    assert rollout.written[0][1] == 6, "the bytes that were sampled, not the text's own tokens"
    wrote = np.zeros(len(rollout.token_ids), dtype=bool)
    for start, end in rollout.written:
        wrote[start:end] = True
    assert all((value != 0) == mine for value, mine in zip(rollout.logprobs, wrote, strict=True))
    assert rollout.tokens == wrote.sum() == 15
    packed = pack_answers([rollout], 64, 1)
    labels = packed.batch.labels[0]
    first = len(rollout.prompt_ids) - 1
    assert packed.batch.inputs[0][: first + 21].tolist() == [*rollout.prompt_ids, *rollout.token_ids][:-1]
    assert np.array_equal(np.flatnonzero(labels != MASKED), first + np.flatnonzero(wrote))
    assert labels[labels != MASKED].tolist() == [t for t, mine in zip(rollout.token_ids, wrote, strict=True) if mine]
    behaviour = packed.batch.columns["behaviour"][0]
    assert np.array_equal(np.flatnonzero(behaviour), first + np.flatnonzero(wrote))


@pytest.mark.parametrize(
    ("settings", "finish", "turns", "reward"),
    [
        ({"turns": 2}, "turns", 2, -0.125),
        ({"turns": 3}, "stop", 3, 0.875),
        ({"max_tokens": 21}, "stop", 3, 0.875),
        ({"max_tokens": 20}, "length", 3, -0.125),  # cut within the last turn, which is not replied to
        ({"max_tokens": 18}, "length", 2, -0.125),  # the second reply leaves no room
        ({"max_tokens": 9}, "length", 1, 0.0),
        ({"max_tokens": 6}, "length", 1, 0.0),
        ({"max_tokens": 3}, "length", 1, 0.0),
    ],
)
def test_an_answer_ends_at_its_limits(settings: dict[str, int], finish: str, turns: int, reward: float) -> None:
    (rollout,), _ = scripted(section(**settings))
    assert (rollout.finish, len(rollout.turns)) == (finish, turns)
    assert len(rollout.token_ids) <= settings.get("max_tokens", 60)
    assert rollout.written[-1][1] == len(rollout.token_ids), "a reply that nothing follows is not appended"
    assert rollout.truncated == (finish != "stop")
    assert rollout.score == AnswerScore(reward, {"environment": reward})


def test_a_reply_of_messages_is_what_the_chat_template_writes() -> None:
    rl = section("Chat", turns=2, max_tokens=150)
    (rollout,), engine = scripted(rl, lambda _: "yes")
    conversation = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "turn 1"},
    ]
    whole = chat_template("chatml").render(conversation, add_generation_prompt=True)
    before = chat_template("chatml").render(conversation[:1], add_generation_prompt=True)
    _, prompt, _ = engine.prompts[1]
    assert TOKENIZER.decode(prompt[len(rollout.prompt_ids) :]) == whole[len(before) :]
    assert rollout.text == "yes\nuser\nturn 1\nassistant\nyes"
    assert rollout.token_ids[: rollout.written[0][1]].count(END) == 1
    other = reply_ids(engine, Reply(messages=conversation[2:]), last=ids_of("s")[0])
    assert other[0] == END, "a turn that another token ended gets the template's end"


def test_a_template_that_changes_turns_asks_for_text() -> None:
    model = loaded()
    model.chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(RequestError, match="does not write a turn of the model as it is"):
        render_after_turn(model, [{"role": "user", "content": "x"}])


# -- environments that fail


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", "ValueError: no good"),
        ("die", "environment: its process ended with exit status 3"),
        ("flood", "environment: the reply's text has 10,000,000 characters, more than 100,000"),
        ("half", "environment: the text holds half a surrogate pair, which is no character"),
        ("none", "environment: returned None (NoneType), which is no Reply"),
    ],
)
def test_an_environment_that_fails_ends_its_answer_and_no_other(text: str, error: str) -> None:
    def script(before: str) -> str:
        turn = before.count("<|im_end|>")
        return text if turn == 1 and len(asked) == 3 else (asked.append(turn) or "on")

    asked = list[int]()
    rollouts, _ = scripted(section("Acts", turns=3), script, count=2)
    failed = [rollout for rollout in rollouts if rollout.finish == "environment"]
    fine = [rollout for rollout in rollouts if rollout.finish == "turns"]
    assert (len(failed), len(fine)) == (1, 1)
    assert failed[0].turns == ("on", text)
    assert failed[0].score is not None
    assert failed[0].score.error is not None
    assert error in failed[0].score.error
    assert failed[0].score.reward == 0.5, "what was given before"
    assert fine[0].score == AnswerScore(1.5, {"environment": 1.5})


# -- exactness


@dataclass
class Delayed:
    """Replies to turns at once, or in any order after so many polls."""

    order: Callable[[list[int]], list[int]]
    """Which of the turns that wait are replied to at a poll."""

    def __post_init__(self) -> None:
        self.waiting = dict[int, Any]()
        self.count = 0

    def submit(self, turn: Any) -> int:
        """See EnvironmentPool."""
        self.waiting[self.count] = turn
        self.count += 1
        return self.count - 1

    def poll(self, timeout_s: float = 0.0) -> dict[int, TurnResult]:
        """See EnvironmentPool."""
        chosen = self.order(sorted(self.waiting)) or (sorted(self.waiting)[:1] if timeout_s else [])
        turns = {number: self.waiting.pop(number) for number in chosen}
        return {
            number: TurnResult(Reply(f"<|im_start|>{turn.number}{turn.text[:2]}", state=turn.state))
            for number, turn in turns.items()
        }

    def close(self) -> None:
        """See EnvironmentPool."""


@pytest.fixture(scope="module")
def decoder() -> torch.nn.Module:
    model = empty_decoder(Model(vocab_size=VOCABULARY, layers=2, dim=32, heads=2, kv_heads=1, init_std=0.3))
    init_weights(model, seed=0)
    return model.eval()


def sampler_of(decoder: torch.nn.Module, order: Callable[[list[int]], list[int]], **options: Any) -> AnswerSampler:
    """A sampler of a model with random weights; a turn ends at any of many tokens."""
    model = replace(loaded(decoder), end_ids=(END, *range(0, VOCABULARY, 7)))
    options = EngineOptions(cache_tokens=2000, block_size=4, exact=True, **options)
    sampler = AnswerSampler(section(turns=4, temperature=0.8), 3, TextEngine(model, options), lambda: None)
    sampler._environment = Delayed(order)  # type: ignore[assignment]
    return sampler


def test_tokens_depend_neither_on_when_replies_come_nor_on_the_batch(decoder: torch.nn.Module) -> None:
    asked = requests(3)
    at_once = sampled(sampler_of(decoder, lambda waiting: waiting), asked)
    last_first = sampled(sampler_of(decoder, lambda waiting: waiting[-1:]), asked)
    only_idle = sampled(sampler_of(decoder, lambda _: [], max_sequences=2, max_batch_tokens=8), asked)
    alone = [sampled(sampler_of(decoder, lambda waiting: waiting), [request])[0] for request in asked[::-1]]
    assert at_once == last_first == only_idle == alone[::-1], "bit for bit, log-probabilities too"
    assert max(len(rollout.turns) for rollout in at_once) == 4
    assert len({rollout.token_ids for rollout in at_once}) == 3


def test_answers_to_a_prompt_share_its_blocks_with_the_first(decoder: torch.nn.Module) -> None:
    """A pass has room for two prompts; answers one after another would compute two of the first prompt in it."""
    prompts = [Prompt(number, tuple(ids_of(text)), text, {}) for number, text in enumerate(("12+34+56?", "21+43+65?"))]
    asked = [AnswerRequest(prompt, prompt.number, answer) for prompt in prompts for answer in range(4)]
    most = sum(len(prompt.ids) for prompt in prompts)
    options = EngineOptions(cache_tokens=2000, block_size=4, max_batch_tokens=most, max_sequences=8)
    rl = Rl(rewards=["math"], max_tokens=20)
    sampler = AnswerSampler(rl, 3, TextEngine(loaded(decoder), options), lambda: None)
    assert len(sampled(sampler, asked)) == 8
    shared = sum(3 * ((len(prompt.ids) - 1) // 4 * 4) for prompt in prompts)
    assert sampler.engine.engine.counts.shared_tokens == shared


def test_log_probabilities_of_all_turns_are_those_of_one_pass(decoder: torch.nn.Module) -> None:
    """The ids of all turns and replies in one pass give each written token the bits that its sampling gave it."""
    for rollout in sampled(sampler_of(decoder, lambda waiting: waiting), requests(3)):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        with torch.no_grad():
            logits = decoder(ids[:, :-1])[0].double() / 0.8
        whole = torch.log_softmax(logits[:, :VOCABULARY], -1).gather(1, ids[0, 1:, None])[:, 0]
        whole = whole[len(rollout.prompt_ids) - 1 :]
        for start, end in rollout.written:
            torch.testing.assert_close(
                torch.tensor(rollout.logprobs[start:end], dtype=torch.float64), whole[start:end], rtol=0, atol=2e-5
            )


def test_greedy_answers_of_several_turns_are_repeated(decoder: torch.nn.Module) -> None:
    first, again = (sampled(sampler_of(decoder, lambda w: w), requests(2), greedy=True) for _ in range(2))
    assert first == again
    assert first[0].token_ids == first[1].token_ids


def test_the_first_turn_has_the_seed_of_an_answer_of_one_turn() -> None:
    assert answer_seed(1, 2, 3) == answer_seed(1, 2, 3, 0)
    seeds = {answer_seed(1, sample, answer, turn) for sample in range(4) for answer in range(4) for turn in range(4)}
    assert len(seeds) == 64
