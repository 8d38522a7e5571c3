"""Every known key of a DeepSpeed JSON file, and what becomes of it; others are errors.

Keys that are one flag of the same kind stand beside it (``Flag.deepspeed``), the others in ``deepspeed_keys.toml``.
"""

import functools
import operator
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.settings.groups import all_flags

Row = dict[str, Any]  # one key, or a section with its keys, as deepspeed_keys.toml describes them


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not abs(value) <= sys.float_info.max:  # Python reads 1e999, Infinity, NaN and 400 digits, too
        raise ValueError("must be a finite number")
    return float(value)


def whole_number(value: Any) -> int:
    """Read a whole number, written as 5 or 1e6."""
    if number(value) != int(number(value)):
        raise ValueError("must be a whole number")
    return int(value)


def _power_of_two(value: Any) -> float:
    if not 0 <= whole_number(value) <= 127:  # beyond it fp32 overflows
        raise ValueError("must be a whole number from 0 to 127")
    return 2.0 ** int(value)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return number(value[0]), number(value[1])


def _one_of(values: dict[str, Any], ignore_case: bool = False) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        for name, converted in values.items():
            if value == name or (ignore_case and str(value).lower() == name.lower()):
                return converted
        raise ValueError(f"must be one of {', '.join(values)}")

    return convert


KINDS: dict[str, Callable[[Any], Any]] = {
    "bool": boolean,
    "hpz": lambda value: whole_number(value) or 1,  # DeepSpeed's 0 is off, like 1
    "int": whole_number,
    "loss_scale": lambda value: number(value) or None,  # DeepSpeed's 0 means dynamic
    "number": number,
    # FSDP2 offloads parameters and optimizer state together: two sections must agree.
    "offload_device": _one_of({"none": False, "cpu": True}),
    "optimizer": _one_of(
        {name: optimizer for optimizer, kind in OPTIMIZERS.items() for name in kind.deepspeed_names}, ignore_case=True
    ),
    "pair": _pair,
    "power_of_two": _power_of_two,
    "reduce_in": _one_of({"fp32": (True, False), "bf16": (False, True), "bfp16": (False, True)}),
    "text": str,
}
_KIND_OF_TYPE = {bool: "bool", int: "int", float: "number", str: "text"}
_TABLE = tomllib.loads(Path(__file__).with_name("deepspeed_keys.toml").read_text(encoding="utf-8"))
for _flag in all_flags().values():
    for _path in _flag.deepspeed.split():
        *_sections, _key = _path.split(".")
        _section = functools.reduce(operator.getitem, _sections, _TABLE["top"])
        _section[_key] = {"sets": _flag.setting, "as": _KIND_OF_TYPE[_flag.value_type]}


def keys_of(section: Row) -> dict[str, Row]:
    """Return the keys of a section; none of any other row."""
    return {name: key for name, key in section.items() if isinstance(key, dict) and not name.startswith("@")}


def _resolved(row: Row) -> Row:
    """Write out what the table abbreviates: the sections of same_as, the keys of @off and @not_needed, reasons."""
    match row:
        case {"same_as": path}:
            found = _TABLE["top"]
            for name in path.split("."):
                found = found[name]
            return _resolved(found)
        case {"only": _, "otherwise": reason}:
            return row | {"otherwise": _reason(reason)}
        case {"off": reason}:
            return row | {"off": _reason(reason)}
    resolved = row | {name: _resolved(key) for name, key in keys_of(row).items()}
    for kind in ("off", "not_needed"):
        for reason, names in resolved.pop(f"@{kind}", {}).items():
            resolved |= {name: {kind: _reason(reason)} for name in names}
    return resolved


def _reason(text: str) -> str:
    return str(_TABLE["reasons"].get(text, text))


TOP = _resolved(_TABLE["top"])
