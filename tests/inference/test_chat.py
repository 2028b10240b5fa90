"""Chat templates: those of `transformers` give the same text, and hostile ones are contained."""

from dataclasses import replace

import pytest
import torch
from served_model import TEMPLATE, load
from test_adapters import ADAPTERS, adapted, merged

from headway.data import chat_template
from headway.errors import ModelError, RequestError
from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams
from headway.inference.chat import render_chat

MESSAGES = [{"role": "user", "content": "hi"}]
CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message['role'] == 'system' %}{% continue %}{% endif %}
{{ bos_token }}{{ '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def loaded(template: str | None, **special: str) -> LoadedModel:
    model = LoadedModel("m", torch.nn.Linear(1, 1), torch.device("cpu"), 10, 10, chat_template=template)
    model.special_tokens = special
    return model


def test_text_is_that_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "system", "content": "be ü"}, *MESSAGES, {"role": "assistant", "content": " a \n"}, *MESSAGES]
    tools = [{"name": "f", "text": "<ü>"}]
    theirs, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=CHATML, add_generation_prompt=True, bos_token="<s>"
    )
    assert render_chat(loaded(CHATML, bos_token="<s>"), messages, tools=tools) == theirs[0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{{ messages.append(1) }}", "refuses the conversation"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the conversation"),
        ("{{ messages[0].nothing.more }}", "refuses the conversation"),
        ("{{ 'a' * 10 ** 9 }}", "refuses the conversation"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{% for i in range(999999999) %}{% endfor %}", "fails|refuses"),
    ],
)
def test_templates_that_fail_are_one_sentence(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render_chat(loaded(template), MESSAGES)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    ],
)
def test_templates_that_do_not_end_are_interrupted(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 10_000)
    with pytest.raises(RequestError, match="does not end"):
        render_chat(loaded(template), MESSAGES)


def test_a_template_that_is_wrong_or_absent_is_said() -> None:
    with pytest.raises(ModelError, match="the chat template is wrong in line 1: "):
        render_chat(loaded("{% if %}"), MESSAGES)
    with pytest.raises(RequestError, match="m has no chat template"):
        render_chat(loaded(None), MESSAGES)


def test_conversations_that_python_cannot_answer_are_refused() -> None:
    """By `LLM.chat`: an empty list, a model without tokenizer."""
    options = EngineOptions(cache_tokens=500)
    with pytest.raises(RequestError, match="messages is empty"):
        LLM(load(), options=options).chat([])
    with pytest.raises(RequestError, match="tiny has no tokenizer"):
        LLM(replace(load(), tokenizer=None), options=options).chat(MESSAGES)


def test_an_adapter_answers_a_conversation() -> None:
    params, options = SamplingParams(max_tokens=6, temperature=0), EngineOptions(cache_tokens=500)
    name = next(iter(ADAPTERS))
    with_template = replace(adapted(), chat_template=TEMPLATE)
    (answer,) = LLM(with_template, options=options).chat(MESSAGES, params, adapter=name)
    (expected,) = LLM(replace(merged(name), chat_template=TEMPLATE), options=options).chat(MESSAGES, params)
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
