"""Flags of Megatron-LM, Megatron-DeepSpeed and launchers that are no settings here, from ``foreign_flags.toml``."""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.settings.checks import SettingsError


@dataclass(frozen=True)
class NotNeeded:
    """Why a flag needs no setting, and for which values that is true."""

    because: str
    accepted: tuple[str, ...] | None = None  # None: the flag is a switch; ANY: all values
    only_if: Mapping[str, Any] = field(default_factory=dict)  # {setting: values for which it is true, or "above 0"}


ANY: tuple[str, ...] = ()
_TABLE = tomllib.loads(Path(__file__).with_name("foreign_flags.toml").read_text(encoding="utf-8"))
TRANSLATED: dict[str, str | dict[str, str]] = _TABLE["translated"]
REFUSED: dict[str, str] = {flag: instead for instead, flags in _TABLE["refused"].items() for flag in flags}
NOT_NEEDED: dict[str, NotNeeded] = {}
for _because, _flags in _TABLE["not_needed"].items():
    for _flag, _, _values in (flag.partition(" ") for flag in _flags):
        _accepted = {"": None, "*": ANY}.get(_values, tuple(_values.split("|")))
        NOT_NEEDED[_flag] = NotNeeded(_because, _accepted, _TABLE["only_if"].get(_flag, {}))


def translate(name: str, words: list[str]) -> str:
    """Return what to write here for a flag of ``TRANSLATED`` and the words after it. Raises SettingsError."""
    meaning = TRANSLATED[name]
    takes_value = isinstance(meaning, dict) or "{" in meaning
    if len(words) != takes_value:
        expected = "takes one value" if takes_value else "takes no value"
        raise SettingsError(f"{name} {expected}, got {' '.join(words) or 'none'}")
    if isinstance(meaning, str):
        return meaning.format(*words)
    if words[0] not in meaning and "*" not in meaning:
        raise SettingsError(f"{name} must be one of {', '.join(meaning)}, got {words[0]}")
    return meaning.get(words[0], meaning.get("*", "")).format(*words)


# Megatron-DeepSpeed's scripts describe a dense model by all of these and one expert.
EXPERTS = "--num-experts"
EXPERT_FLAGS = (
    *("--create-moe-param-group", "--topk", "--expert-interval", "--mlp-type"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
)
WITHOUT_EXPERTS = NotNeeded("there is one MLP, and so no experts", ANY)
NO_SUCH_EXPERTS = "experts do not have this here; leave it out"
# Expert flags that only Megatron-DeepSpeed has, and its defaults for scripts with one of them.
_DEEPSPEED_EXPERT_FLAGS = {
    *("--moe-expert-parallel-size", "--moe-loss-coeff", "--moe-train-capacity-factor", "--expert-interval", "--topk"),
}
_DEEPSPEED_DEFAULTS = {
    "moe_router_topk": "--moe-router-topk 1",
    "moe_layer_freq": translate("--expert-interval", ["2"]),
    "moe_aux_loss_coeff": "--moe-aux-loss-coeff 0.1",
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor 1.0",
    "moe_eval_capacity_factor": "--moe-eval-capacity-factor 1.0",
    "moe_min_capacity": "--moe-min-capacity 4",
}


def describes_experts(flag: str) -> bool:
    return flag in (EXPERTS, *EXPERT_FLAGS) or flag.startswith("--moe-")


def deepspeed_expert_defaults(typed: Collection[str], given: Mapping[str, Any]) -> str:
    """Return flags for the defaults of Megatron-DeepSpeed's scripts that are not ``given``. typed: the flags there."""
    if _DEEPSPEED_EXPERT_FLAGS.isdisjoint(typed):
        return ""
    unsaid = [words for setting, words in _DEEPSPEED_DEFAULTS.items() if setting not in given]
    if given.get("moe_router_topk", 1) == 1:  # the weight of a single expert is its score among all
        unsaid += ["--moe-router-pre-softmax"]
    return " ".join(unsaid)
