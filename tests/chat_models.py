"""Templates of our own with the behaviours of published ones, and a byte tokenizer with their special tokens."""

import json

from headway.data.chat_template import ChatTemplate
from headway.data.tokenizer import TextTokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<eos>", "<bos>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
)
TRIMS_AND_REFUSES_SYSTEM = """\
{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- set name = 'model' if message.role == 'assistant' else message.role %}
{{- '<|im_start|>' ~ name ~ '\n' ~ (message.content | trim) ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""
DROPS_REASONING = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < last.user %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + content }}
{%- for call in message.tool_calls or [] %}{{ '\n<call>' + call.function | tojson + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
OTHER_LAST_END = """\
{%- macro turn(message) %}{{ '<|im_start|>' + message.role + '\n' + message.content }}{% endmacro %}
{%- for message in messages %}
{{- turn(message) }}{{ '<eos>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PLAIN_TEXT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "default-system": DEFAULT_SYSTEM,
    "trims": TRIMS_AND_REFUSES_SYSTEM,
    "drops-reasoning": DROPS_REASONING,
    "other-last-end": OTHER_LAST_END,
    "plain-text": PLAIN_TEXT,
}


def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<bos>", "eos_token": "<eos>"})


def byte_tokenizer(*merged: str, special: tuple[str, ...] = SPECIAL) -> TextTokenizer:
    """Return a tokenizer of bytes that merges the given pairs, with special tokens that are parsed in text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # In byte-level BPE a line end is the letter of its byte.
    pairs = [tuple(letter.replace("\n", "Ċ").replace(" ", "Ġ") for letter in pair) for pair in merged]
    vocabulary = {text: number for number, text in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    raw.encode_special_tokens = False
    return TextTokenizer(raw, raw.token_to_id(special[1]) if special else 0)


def write_model_folder(folder, tokenizer: TextTokenizer, template: str) -> str:
    """Write what `headway data build --chat` reads of a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    (folder / "chat_template.jinja").write_text(template)
    names = {"bos_token": "<bos>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return str(folder)
