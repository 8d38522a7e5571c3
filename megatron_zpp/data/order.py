"""Checks that a resumed run continues the order of its training data."""

from __future__ import annotations

from typing import Any

Order = dict[str, Any]  # GPTDataset.order or BlendedDataset.order, possibly read from JSON


def check_order(saved: Order, order: Order, other_data: bool = False) -> None:
    """Raise ValueError if continuing in ``order`` would repeat samples or leave some out.

    other_data: data, weights or seed may differ, but not the number of epochs, unless the new order is stable.
    """
    if saved == order:
        return
    before, now = saved.get("datasets", [saved]), order.get("datasets", [order])
    if saved.get("weights") != order.get("weights") or len(before) != len(now):
        if other_data:
            return
        raise ValueError(
            "the weights of the training data's blend differ from the checkpoint's: give the same weights, or "
            "--override-data to continue with these"
        )
    for number, (old, new) in enumerate(zip(before, now, strict=True), start=1):
        name = f"dataset {number} of the blend" if len(now) > 1 else "the training data"
        if _data(old) != _data(new):
            if other_data:
                continue
            raise ValueError(
                f"{name} is not the checkpoint's: its .idx file, --split, --seq-length or --seed differ ({old} there, "
                f"{new} here). Give the same, or --override-data to continue with this"
            )
        if _shuffles(old) != _shuffles(new) and not (other_data and new["epochs"] == "any"):
            raise ValueError(
                f"the run's new length takes {new['epochs']} epochs of {name}, not {old.get('epochs')}, or another "
                "part of the last. Megatron shuffles across epochs, so the order would change and repeat data that was "
                "read. Keep the length of the run, or give --data-order-stable: it continues where the first epoch "
                "ends, or, with --override-data too, in a new order from here on"
            )


def _data(order: Order) -> Order:
    return {name: value for name, value in order.items() if name not in ("epochs", "separate_last_epoch")}


def _shuffles(order: Order) -> tuple[Any, Any]:
    """Return what is shuffled together. A stable order begins like an order of one epoch."""
    return 1 if order.get("epochs") == "any" else order.get("epochs"), order.get("separate_last_epoch")
