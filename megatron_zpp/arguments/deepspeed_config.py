"""Read a DeepSpeed JSON file into settings. DeepSpeed's own defaults for absent keys do not apply."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.arguments.deepspeed_keys import TOP, ByType, Key, MustEqual, NotNeeded, Off, Section, Sets
from megatron_zpp.files import read_bounded, without_duplicates
from megatron_zpp.settings.checks import Mistakes, SettingsError
from megatron_zpp.settings.groups import all_flags


@dataclass
class DeepSpeedConfig:
    """Settings that a DeepSpeed file states.

    values: {setting: value}. origins: for each, the file's key and value, such as "zero_optimization.stage 3".
    accumulation_steps: micro-batches per optimizer step. not_needed: {reason: keys that change nothing}.
    """

    path: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    accumulation_steps: int | None = None
    not_needed: dict[str, list[str]] = field(default_factory=dict)
    mistakes: Mistakes = field(default_factory=Mistakes)

    def notes(self) -> list[str]:
        """Return one line per reason why keys were not needed."""
        return [f"{', '.join(keys)} of {self.path} not needed: {why}" for why, keys in self.not_needed.items()]

    def read(self, content: dict[str, Any]) -> None:
        """Read the file's object. Raises SettingsError with all mistakes."""
        with self.mistakes.collected():
            self.section(content, TOP, "")
        with self.mistakes.collected():
            self.scale_cosine_ratios()
        self.add_up_cycle()
        with self.mistakes.collected():
            self.join_tensorboard_dir()
        self.mistakes.report()
        self.accumulation_steps = self.values.pop("accumulation_steps", None)

    def section(self, content: Any, section: Section, prefix: str) -> None:
        """Read one object; ``prefix`` is its path with a trailing dot, "" for the whole file."""
        if not isinstance(content, dict):
            raise self.error(prefix[:-1], "must be an object, {...}")
        missing = [self.error(f"{prefix}{name}", "is missing") for name in section.required if name not in content]
        unknown = [
            self.error(f"{prefix}{name}", f"is unknown; {_nearest(name, section, prefix)}")
            for name in content
            if name not in section.keys
        ]
        self.mistakes.messages += map(str, missing + unknown)
        if section.switch is not None and content.get(section.switch) is False:
            content = {section.switch: False}
        else:
            stated = {name: value for name, value in content.items() if value is not None and value != "auto"}
            content = {**section.defaults, **stated}
            if section.turns_on is not None:
                self.set(section.turns_on, True, prefix[:-1], content)
        for name, value in content.items():
            if name in section.keys:
                with self.mistakes.collected():
                    self.key(f"{prefix}{name}", value, section.keys[name])

    def key(self, name: str, value: Any, key: Key) -> None:
        match key:
            case Section():
                self.section(value, key, f"{name}.")
            case ByType():
                self.by_type(value, key, f"{name}.")
            case Sets(settings, convert):
                converted = self.converted(name, value, convert)
                each = converted if isinstance(converted, tuple) else (converted,) * len(settings)
                for setting, one in zip(settings, each, strict=True):
                    self.set(setting, one, name, value)
            case MustEqual(values, otherwise):
                if (type(value) is bool, value) not in [(type(allowed) is bool, allowed) for allowed in values]:
                    raise self.error(name, f"cannot be {json.dumps(value)}: {otherwise}")
            case Off(otherwise, anywhere):
                if not isinstance(value, dict) or _is_on(value, anywhere):
                    raise self.error(name, f"cannot be honoured: {otherwise}")
            case NotNeeded(because):
                self.not_needed.setdefault(because, []).append(name)

    def by_type(self, content: Any, key: ByType, prefix: str) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        if not isinstance(kind, str) or kind not in key.types:
            raise self.error(f"{prefix}type", f"must be one of {', '.join(key.types)}, not {json.dumps(kind)}")
        value, params = key.types[kind]
        keys: dict[str, Key] = {"type": MustEqual((kind,), ""), "params": params}
        self.section(content, Section(keys, required=("params",)), prefix)
        self.set(key.setting, value, f"{prefix}type", kind)

    def scale_cosine_ratios(self) -> None:
        """Multiply WarmupCosineLR's smallest learning rates, which are fractions of the optimizer's."""
        for ratio, setting in (("warmup_min_ratio", "lr_warmup_init"), ("cos_min_ratio", "min_lr")):
            if ratio in self.values:
                if "lr" not in self.values:
                    raise self.error(self.origins[ratio], "is a part of optimizer.params.lr, which is missing")
                self.values[setting] = self.values.pop(ratio) * self.values["lr"]
                self.origins[setting] = self.origins.pop(ratio)

    def add_up_cycle(self) -> None:
        """Add OneCycle's two parts: our decay includes the warm-up; the second part is as long by default."""
        if self.values.get("lr_decay_style") == "linear" and "cycle_max_lr" in self.origins.get("lr", ""):
            first, origin = self.values.get("lr_warmup_iters", 0), self.origins.get("lr_warmup_iters", "")
            self.values["lr_decay_iters"] = first + self.values.pop("cycle_second_step_size", first)
            self.origins["lr_decay_iters"] = self.origins.pop("cycle_second_step_size", origin)

    def join_tensorboard_dir(self) -> None:
        if "output_path" in self.values:
            folder = os.path.join(self.values.pop("output_path"), self.values.pop("job_name"))
            self.values["tensorboard_dir"], self.origins["tensorboard_dir"] = folder, self.origins.pop("output_path")
            del self.origins["job_name"]
            self.converted("tensorboard.output_path", folder, all_flags()["tensorboard_dir"].check)

    def converted(self, name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
        try:
            return convert(value)
        except (ValueError, OverflowError) as error:
            raise self.error(name, f"{error}, not {json.dumps(value)}") from error

    def set(self, setting: str, value: Any, name: str, written: Any) -> None:
        """Set a setting; two keys may state the same one (a learning rate), but not differently."""
        flag = all_flags().get(setting)  # some keys set no flag
        if flag is not None and value is not None:
            self.converted(name, written, lambda _: flag.check(value))
        if setting in self.values and self.values[setting] != value:
            raise self.error(name, f"{json.dumps(written)} contradicts {self.origins[setting]}; make them equal")
        self.values[setting], self.origins[setting] = value, f"{name} {json.dumps(written)}"

    def error(self, name: str, message: str) -> SettingsError:
        return SettingsError(f"{name} in {self.path} {message}")


def read_deepspeed_config(path: str) -> DeepSpeedConfig:
    """Read the settings that a DeepSpeed JSON file states. "auto" and null leave a setting to the flags.

    Raises SettingsError that names each key that is unknown, of a wrong kind or value, or cannot be honoured.
    """
    try:
        content = json.loads(read_bounded(path), object_pairs_hook=without_duplicates)
    except OSError as error:
        raise SettingsError(f"--deepspeed_config {path}: {error.strerror}; give the path of a JSON file") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingsError(f"--deepspeed_config {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"--deepspeed_config {path} must hold one JSON object, {{...}}")
    config = DeepSpeedConfig(path)
    config.read(content)
    return config


def _is_on(content: dict[str, Any], anywhere: bool) -> bool:
    """Return whether a section is enabled; with ``anywhere``, whether it or one within is."""
    inner = [value for value in content.values() if anywhere and isinstance(value, dict)]
    return content.get("enabled") not in (None, False, "none") or any(_is_on(section, anywhere) for section in inner)


def _nearest(name: str, section: Section, prefix: str) -> str:
    """Suggest a key in place of an unknown one: one of its section, or its own section."""
    nearest = difflib.get_close_matches(name, section.keys, n=1)
    elsewhere = [path for path in _key_paths(TOP) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"it belongs to {elsewhere[0]}"
    if nearest:
        return f"did you mean {prefix}{nearest[0]}?"
    return f"known here: {', '.join(section.keys)}"


def _key_paths(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield all keys, as dotted paths, in order."""
    for name, key in section.keys.items():
        yield f"{prefix}{name}"
        if isinstance(key, Section):
            yield from _key_paths(key, f"{prefix}{name}.")
