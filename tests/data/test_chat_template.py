"""Chat templates as transformers applies them."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_zpp.data.text.chat_template import apply_chat_template, read_chat_template

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant"] %}{{ raise_exception("no such role") }}{% endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
<|{{ message['role'] }}|>
{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
  {% if add_generation_prompt %}
<|assistant|>
{% endif %}"""
MESSAGES = [{"role": "user", "content": " What's <this>?\n"}, {"role": "assistant", "content": "{{ nothing }}"}]


@pytest.fixture
def folder(tmp_path):
    """As transformers saves a tokenizer."""
    vocabulary = {token: i for i, token in enumerate(("a", "<s>", "</s>"))}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "a")), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_the_text_is_the_one_of_transformers(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert expected.endswith("{{ nothing }}</s>\n<|assistant|>\n")
    assert apply_chat_template(*read_chat_template(folder / "tokenizer.json"), MESSAGES) == expected


@pytest.mark.parametrize(
    "form", [TEMPLATE, [{"name": "tool", "template": "?"}, {"name": "default", "template": TEMPLATE}]]
)
def test_a_template_in_the_configuration(folder, form):
    expected = read_chat_template(folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": form, "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(folder) == expected


def test_a_folder_without_one(tmp_path):
    with pytest.raises(ValueError, match=r"--chat: .* has no chat template: neither chat_template\.jinja nor"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages + 1 }}", "can only concatenate"),
    ],
)
def test_templates_that_do_not_work(template, message):
    with pytest.raises(ValueError, match=f"--chat: the tokenizer's chat template does not work: .*{message}"):
        apply_chat_template(template, {}, MESSAGES)
