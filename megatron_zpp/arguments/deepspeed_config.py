"""Read a DeepSpeed JSON file into settings. DeepSpeed's own defaults for absent keys do not apply."""

import difflib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.arguments.deepspeed_keys import KINDS, TOP, Row, keys_of
from megatron_zpp.errors import describe_error
from megatron_zpp.files import read_text, without_duplicates
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

    def section(self, content: Any, section: Row, prefix: str) -> None:
        """Read one object; ``prefix`` is its path with a trailing dot, "" for the whole file."""
        if not isinstance(content, dict):
            raise self.error(prefix[:-1], "must be an object, {...}")
        keys, required, switch = keys_of(section), section.get("@required", ()), section.get("@switch")
        missing = [self.error(f"{prefix}{name}", "is missing") for name in required if name not in content]
        unknown = [
            self.error(f"{prefix}{name}", f"is unknown; {_nearest(name, keys, prefix)}")
            for name in content
            if name not in keys
        ]
        self.mistakes.messages += map(str, missing + unknown)
        if switch is not None and content.get(switch) is False:
            content = {switch: False}
        else:
            stated = {name: value for name, value in content.items() if value is not None and value != "auto"}
            content = {**section.get("@defaults", {}), **stated}
            if "@turns_on" in section:
                self.set(section["@turns_on"], True, prefix[:-1], content)
        for name, value in content.items():
            if name in keys:
                with self.mistakes.collected():
                    self.key(f"{prefix}{name}", value, keys[name])

    def key(self, name: str, value: Any, key: Row) -> None:
        match key:
            case {"sets": names, "as": kind}:
                settings, converted = names.split(), self.converted(name, value, KINDS[kind])
                each = converted if isinstance(converted, tuple) else (converted,) * len(settings)
                for setting, one in zip(settings, each, strict=True):
                    self.set(setting, one, name, value)
            case {"only": values, "otherwise": otherwise}:
                if (type(value) is bool, value) not in [(type(allowed) is bool, allowed) for allowed in values]:
                    raise self.error(name, f"cannot be {json.dumps(value)}: {otherwise}")
            case {"off": otherwise}:
                if not isinstance(value, dict) or _is_on(value, key.get("anywhere", False)):
                    raise self.error(name, f"cannot be honoured: {otherwise}")
            case {"not_needed": because}:
                self.not_needed.setdefault(because, []).append(name)
            case {"@by_type": setting, **types}:
                self.by_type(value, setting, types, f"{name}.")
            case _:
                self.section(value, key, f"{name}.")

    def by_type(self, content: Any, setting: str, types: dict[str, Row], prefix: str) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        if not isinstance(kind, str) or kind not in types:
            raise self.error(f"{prefix}type", f"must be one of {', '.join(types)}, not {json.dumps(kind)}")
        params = types[kind]
        section: Row = {"type": {"only": [kind], "otherwise": ""}, "params": params, "@required": ["params"]}
        self.section(content, section, prefix)
        self.set(setting, params["@value"], f"{prefix}type", kind)

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
        content = json.loads(read_text(path), object_pairs_hook=without_duplicates)
    except OSError as error:
        raise SettingsError(f"--deepspeed_config: {describe_error(error)}; give the path of a JSON file") from error
    except (ValueError, RecursionError) as error:  # invalid JSON, or bytes that are not text
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


def _nearest(name: str, keys: dict[str, Row], prefix: str) -> str:
    """Suggest a key in place of an unknown one: one of its section's ``keys``, or its own section."""
    nearest = difflib.get_close_matches(name, keys, n=1)
    elsewhere = [path for path in _key_paths(TOP) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"it belongs to {elsewhere[0]}"
    if nearest:
        return f"did you mean {prefix}{nearest[0]}?"
    return f"known here: {', '.join(keys)}"


def _key_paths(section: Row, prefix: str = "") -> Iterator[str]:
    """Yield all keys, as dotted paths, in order."""
    for name, key in keys_of(section).items():
        yield f"{prefix}{name}"
        if "@by_type" not in key:
            yield from _key_paths(key, f"{prefix}{name}.")
