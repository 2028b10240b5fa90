"""The templates of published models that TRL ships: ids before each trained turn are those that a server would feed."""

import re
import subprocess
from pathlib import Path

import pytest
from test_chat_samples import check_samples, encoded

from chat_models import byte_tokenizer
from headway.data.chat_template import ChatTemplate
from headway.data.template_layout import Refused
from own_environment import python_with

SPECIAL_TOKEN = re.compile(r"<[|｜][^<>\s'\"{}]+?[|｜]>|<(?:start|end)_of_turn>|<\|?turn\|?>|</?think>|<(?:bos|eos)>")
REASONED = "<think>\nhm\n</think>\n\nyes"
CONVERSATIONS = {
    "one turn": [("user", "hi"), ("assistant", "yo ")],
    "two turns": [("user", " hi\n"), ("assistant", "yo"), ("user", "more"), ("assistant", "\n\nno")],
    "system": [("system", "be brief"), ("user", "hi"), ("assistant", "yo"), ("user", "b"), ("assistant", "c")],
    "reasoning": [("user", "hi"), ("assistant", REASONED), ("user", "more"), ("assistant", REASONED)],
}


@pytest.fixture(scope="module")
def templates():
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    python = python_with("trl==1.16.0")
    done = subprocess.run([str(python), "-c", find], check=True, capture_output=True, text=True)
    files = sorted((Path(done.stdout.strip()) / "chat_templates").glob("*.jinja"))
    assert len(files) > 50
    return {file.stem: ChatTemplate(file.read_text(), {"bos_token": "<bos>", "eos_token": "<eos>"}) for file in files}


def messages_of(name):
    return [{"role": role, "content": content} for role, content in CONVERSATIONS[name]]


@pytest.mark.slow
def test_ids_before_each_trained_turn_are_those_of_the_server(templates):
    samples = {}
    for name, template in templates.items():
        special = tuple(dict.fromkeys(["<bos>", "<eos>", *SPECIAL_TOKEN.findall(template.text)]))
        merging, plain = byte_tokenizer("\n\n", " b", special=special), byte_tokenizer(special=special)
        for tokenizer, conversation in ((t, c) for t in (merging, plain) for c in CONVERSATIONS):
            messages = messages_of(conversation)
            result = encoded(template, tokenizer, messages)
            if isinstance(result, Refused):
                samples[name, conversation] = result.reason
                continue
            check_samples(template, tokenizer, messages, result)
            samples[name, conversation] = len(result)
    used = [key for key, result in samples.items() if isinstance(result, int)]
    assert len(used) > 0.7 * len(samples), samples
    for name in ("llama3", "llama3_2", "qwen2_5", "gemma", "gemma3"):
        assert samples[name, "two turns"] == 1, name
        assert samples[name, "reasoning"] == 1, name
    for name in ("qwen3", "gptoss"):
        assert samples[name, "reasoning"] == 2, name
    assert samples["gemma", "system"] == "the chat template refuses the conversation: System role not supported"
    assert "differently from how its generation prompt begins" in samples["deepseek_r1_distill", "one turn"]


@pytest.mark.slow
def test_texts_are_those_of_transformers(templates):
    from transformers.utils.chat_template_utils import render_jinja_template

    for name, template in templates.items():
        for conversation in ("one turn", "two turns"):
            messages = messages_of(conversation)
            for prompt in (False, True):
                try:
                    expected, _ = render_jinja_template(
                        conversations=[messages],
                        chat_template=template.text,
                        add_generation_prompt=prompt,
                        **template.special_tokens,
                    )
                except Exception:  # a template for images, for example
                    continue
                assert template.render(messages, add_generation_prompt=prompt) == expected[0], name
