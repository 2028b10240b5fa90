"""Samples of conversations: what is before a trained turn is the server's prompt, id for id."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from chat_models import TEMPLATES, byte_tokenizer, chat_template
from headway.data.chat_rows import Conversation
from headway.data.chat_samples import ASSISTANT, render_with, split_samples
from headway.data.chat_template import ChatTemplate
from headway.data.chat_tokens import SampleEncoder, end_pattern
from headway.data.template_layout import LayoutMismatch, Refused, SampleMaker, make_samples

TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "merges line ends": byte_tokenizer("\n\n", " a", "\na", "ab"),
    "no added tokens": byte_tokenizer("\n\n", " a", special=()),
    "replaces spaces": byte_tokenizer("aa"),
}
TOKENIZERS["replaces spaces"].raw.normalizer = normalizers.Replace(" ", "\u2581")
TEXTS = st.text(alphabet="ab \n<", min_size=1, max_size=6) | st.sampled_from(
    ["<think>\nb</think>\na", "\n", "  a", "é", "<|im_end|>", "<|im_", "start|>"]
)


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        messages.append({"role": "assistant", "content": draw(TEXTS)})
    return messages


def server_ids(template, tokenizer, messages, **more):
    """What the server feeds: it renders the messages with the generation prompt, and encodes the text."""
    return tokenizer.raw.encode(template.render(messages, **more), add_special_tokens=False).ids


def encoded(template, tokenizer, messages, **more):
    maker = SampleMaker(template, end_pattern(tokenizer))
    (result,) = make_samples(maker, [Conversation(messages, **more)])
    if isinstance(result, Refused):
        return result
    return [part for parts in SampleEncoder(tokenizer, tokenizer.encode_batch).encode_all(result) for part in parts]


def flat(sample):
    return np.concatenate(sample.ids).tolist()


def check_samples(template, tokenizer, messages, samples):
    """Compare samples with what the server would see at each turn; return the number of trained turns."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [(sample, span) for sample in samples for span in sample.spans if span[3]]
    assert len(trained) == len(turns)
    for index, (sample, (start, end, role, _)) in zip(turns, trained, strict=True):
        prompt = server_ids(template, tokenizer, messages[:index])
        whole = template.render(messages[: index + 1], add_generation_prompt=False)
        answer = whole[len(template.render(messages[:index])) :]
        ids = flat(sample)
        assert ids[:start] == prompt
        assert role == ASSISTANT
        written = tokenizer.decode(ids[start:end]).replace("\u2581", " ")  # some special tokens hold that character
        assert written.rstrip() == answer.replace("\u2581", " ").rstrip()
    for sample in samples:
        assert [span[1] for span in sample.spans[:-1]] == [span[0] for span in sample.spans[1:]]
        assert (sample.spans[0][0], sample.spans[-1][1]) == (0, sample.length) == (0, len(flat(sample)))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
@settings(max_examples=8, deadline=None)
def test_ids_before_each_trained_turn_are_those_of_the_server(name, tokenizer, messages):
    template = chat_template(name)
    samples = encoded(template, TOKENIZERS[tokenizer], messages)
    if isinstance(samples, Refused):
        assert name == "trims"
        assert messages[0]["role"] == "system"
        assert samples.reason == "the chat template refuses the conversation: no system role"
        return
    check_samples(template, TOKENIZERS[tokenizer], messages, samples)


@pytest.mark.parametrize("name", ["chatml", "default-system", "trims"])
def test_a_template_that_extends_its_renderings_gives_one_sample_with_the_ids_of_transformers(name):
    from transformers import PreTrainedTokenizerFast

    messages = [
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "ab\n"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "a"},
    ]
    template, tokenizer = chat_template(name), TOKENIZERS["merges line ends"]
    (sample,) = encoded(template, tokenizer, messages)
    hugging = PreTrainedTokenizerFast(tokenizer_object=tokenizer.raw, **template.special_tokens)
    theirs = hugging.apply_chat_template(messages, chat_template=template.text, return_dict=False)
    assert flat(sample) == theirs
    assert [span[3] for span in sample.spans] == [False, True, False, False, True, False]


def test_a_template_that_drops_earlier_reasoning_gives_one_sample_per_turn():
    template, tokenizer = chat_template("drops-reasoning"), TOKENIZERS["bytes"]
    said = "<think>\nhm\n</think>\nyes"
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", said), ("user", "b"))]
    messages.append({"role": "assistant", "content": "no"})
    samples = encoded(template, tokenizer, messages)
    assert len(samples) == 2
    check_samples(template, tokenizer, messages, samples)
    without = [dict(message, content=message["content"].replace(said, "yes")) for message in messages]
    assert len(encoded(template, tokenizer, without)) == 1


def test_turns_are_separated_where_the_tokenizer_merges_across_their_beginning():
    """After "assistant\\n" an answer that begins with line ends would be one token with it."""
    tokenizer, template = TOKENIZERS["merges line ends"], chat_template("chatml")
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "\n\nb"), ("user", "a"))]
    messages.append({"role": "assistant", "content": "b"})
    samples = encoded(template, tokenizer, messages)
    assert len(samples) == 2
    check_samples(template, tokenizer, messages, samples)


def test_tools_and_tool_results_are_rendered_and_only_the_assistant_is_trained():
    template, tokenizer = chat_template("drops-reasoning"), TOKENIZERS["bytes"]
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    (sample,) = encoded(template, tokenizer, messages, tools=tools)
    for index, (start, end, _, _) in zip((1, 3), [span for span in sample.spans if span[3]], strict=True):
        assert flat(sample)[:start] == server_ids(template, tokenizer, messages[:index], tools=tools)
        assert tokenizer.decode(flat(sample)[start:end]).startswith(("\n<call>", "two")[index // 3])


def test_messages_before_the_completion_and_with_weight_0_are_not_trained():
    template, tokenizer = chat_template("chatml"), TOKENIZERS["bytes"]
    messages = [{"role": r, "content": r[0] + str(i)} for i, r in enumerate(["user", "assistant"] * 3)]
    (sample,) = encoded(template, tokenizer, messages, context=3)
    assert [tokenizer.decode(flat(sample)[s:e]) for s, e, _, t in sample.spans if t] == ["a3<|im_end|>", "a5<|im_end|>"]
    messages[3]["weight"] = 0
    (sample,) = encoded(template, tokenizer, messages, context=3)
    assert [tokenizer.decode(flat(sample)[s:e]) for s, e, _, t in sample.spans if t] == ["a5<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("chatml", ["user"], "no assistant turn to train on"),
        ("chatml", ["assistant"], "no assistant turn to train on"),
        ("plain-text", ["user", "tool"], "no assistant turn to train on"),
    ],
)
def test_conversations_without_a_turn_to_train_are_refused(name, messages, reason):
    result = encoded(chat_template(name), TOKENIZERS["bytes"], [{"role": role, "content": "a"} for role in messages])
    assert result == Refused(reason)


def test_an_answer_that_does_not_continue_the_prompt_is_refused():
    from headway.data.chat_template import ChatTemplate

    text = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<x>{% endif %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    result = encoded(ChatTemplate(text), TOKENIZERS["bytes"], messages)
    assert "differently from how its generation prompt begins" in result.reason


class TestLayouts:
    """A layout gives the text of the template, or the template has none."""

    @pytest.mark.parametrize("name", TEMPLATES)
    @given(rows=st.lists(conversations(), min_size=3, max_size=6))
    @settings(max_examples=8, deadline=None)
    def test_texts_are_those_of_the_template(self, name, rows):
        template = chat_template(name)
        ends = re.compile(r"(?:<\|im_end\|>|<eos>)\Z")
        maker = SampleMaker(template, ends)
        for messages in rows * 2:
            conversation = Conversation(messages)
            (result,) = make_samples(maker, [conversation])
            if not isinstance(result, Refused):
                assert result == split_samples(conversation, render_with(template, conversation), ends)

    @pytest.mark.parametrize(
        ("body", "traced"),
        [
            ("{{ m.content }}", True),
            ("{{ 'a' ~ m.content | trim ~ 1 }}", True),
            ("{% if 'x' in m.content %}{{ m.content }}{% else %}{{ m.content + '!' }}{% endif %}", True),
            ("{{ m.content.lstrip('a') if m.content.startswith('a') else m.content }}", True),
            ("{% if m.content is string and m.content %}{{ m.content }}{% endif %}", True),
            ("{{ m.content | upper }}", False),
            ("{{ m.content[1:] }}", False),
            ("{{ m.content | length }}", False),
            ("{{ m.content.split('a') | last }}", False),
            ("{{ m | tojson }}", False),
            ("{{ m }}", False),
            ("{% set t %}{{ m.content }}{% endset %}{{ t }}", False),
            ("{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content) }}", False),
            ("{{ [m.content, 'b'] | join }}", False),
            ("{{ m.content > 'b' }}{{ m.content }}", False),
            ("{{ ('x' ~ m.content).startswith('xa') }}{{ m.content }}", False),
        ],
    )
    def test_what_a_template_may_do_with_a_content(self, body, traced):
        from headway.data.chat_template import ChatTemplate

        text = "{% for m in messages %}<{{ m.role }}>" + body + "</s>{% endfor %}"
        template = ChatTemplate(text + "{% if add_generation_prompt %}<assistant>{% endif %}")
        maker = SampleMaker(template, None)
        for content in ("abc", "xbc", "a", "bx", "  b ", "abc"):
            conversation = Conversation([{"role": "user", "content": content}, {"role": "assistant", "content": "x"}])
            (result,) = make_samples(maker, [conversation])
            assert result == split_samples(conversation, render_with(template, conversation), None)
        assert (maker.rows > 0) == traced

    def test_a_layout_that_is_wrong_is_noticed(self, monkeypatch):
        import headway.data.template_layout as module

        monkeypatch.setattr(module, "CHECK_EVERY", 2)
        maker = SampleMaker(chat_template("chatml"), None)
        rows = [Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])] * 3
        make_samples(maker, rows[:1])
        ((layout,),) = maker.layouts.values()
        first = layout.samples[0]
        broken = layout._replace(samples=((first[0]._replace(parts=("other",)), *first[1:]),))
        maker.layouts[next(iter(maker.layouts))] = [broken]
        with pytest.raises(LayoutMismatch):
            make_samples(maker, rows)

    def test_rows_that_do_not_end_are_refused_alone(self, monkeypatch):
        from headway.data import chat_template as module
        from headway.data.chat_template import ChatTemplate

        monkeypatch.setattr(module, "MOST_SECONDS", 0.3)
        loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
        endless = "{% if messages[0].content == 'e' %}" + loops + "{% endif %}" + TEMPLATES["chatml"]
        maker = SampleMaker(ChatTemplate(endless), None)
        rows = [Conversation([{"role": "user", "content": c}, {"role": "assistant", "content": "b"}]) for c in "aea"]
        first, second, third = make_samples(maker, rows)
        assert second == Refused("the chat template does not end")
        assert first == third != second


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize("name", ["chatml", "plain-text", "drops-reasoning"])
def test_parts_and_null_content_are_trained_on_as_the_text_that_the_server_sees(name):
    """The reference is transformers, which is given plain strings."""
    from transformers.utils.chat_template_utils import render_jinja_template

    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    messages = [{"role": "user", "content": parts}, {**CALL, "content": None}, {"role": "tool", "content": "1"}]
    plain = [{"role": "user", "content": "hi\nthere"}, {**CALL, "content": ""}, {"role": "tool", "content": "1"}]
    template, tokenizer = chat_template(name), TOKENIZERS["bytes"]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "one"}]}
    (theirs,), _ = render_jinja_template(
        conversations=[plain], chat_template=template.text, add_generation_prompt=True, bos_token="<bos>"
    )
    assert template.render(messages) == theirs
    samples = encoded(template, tokenizer, [*messages, answer])
    same = encoded(template, tokenizer, [*plain, {"role": "assistant", "content": "one"}])
    ids = np.concatenate(samples[0].ids)
    assert ids.tolist() == np.concatenate(same[0].ids).tolist()
    prompt = tokenizer.encode(theirs).tolist()
    assert ids[: len(prompt)].tolist() == prompt


def test_a_template_that_goes_through_parts_gets_them():
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}, {"role": "user", "content": "c"}]) == "[a][b]c"
