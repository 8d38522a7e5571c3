"""What a chat model reads: messages as the text that it was trained on, which its tokenizer's template writes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from megatron_zpp.files import read_json_object, read_text

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # that a template may name


def read_chat_template(tokenizer: Path) -> tuple[str, dict[str, str]]:
    """The template beside a tokenizer.json, or in a model's folder, and the special tokens that it may name.

    As transformers keeps them: in ``chat_template.jinja``, or else in ``tokenizer_config.json``. Raises ValueError
    where there is none.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    file, config_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config = read_json_object(config_file) if config_file.is_file() else {}
    template = read_text(file) if file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(f"--chat: {folder} has no chat template: neither {file.name} nor one in {config_file.name}")
    tokens = {name: config[name] for name in _TOKENS if config.get(name)}
    return template, {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def apply_chat_template(template: str, tokens: dict[str, str], messages: list[dict[str, str]]) -> str:
    """The text up to where the model's answer begins. Raises ValueError for a template that does not work.

    A template is a program of the model's publisher, so it runs in jinja's sandbox.
    """
    import jinja2  # torch needs it, too
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    # What transformers gives to templates.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    values: dict[str, Any] = {"messages": messages, "add_generation_prompt": True, **tokens}
    try:
        return environment.from_string(template).render(values)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"--chat: the tokenizer's chat template does not work: {error}") from error
