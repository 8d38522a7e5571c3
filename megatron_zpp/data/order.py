"""Checks that a resumed run continues the order of its training data."""

from typing import Any

Order = dict[str, Any]  # GPTDataset.order or BlendedDataset.order, possibly read from JSON


def check_order(saved: Order, order: Order, other_data: bool = False) -> None:
    """Raise ValueError if continuing in ``order`` would repeat samples or leave some out.

    other_data: the order may be another one.
    """
    if saved == order or other_data:
        return
    before, now = saved.get("datasets", [saved]), order.get("datasets", [order])
    if saved.get("weights") != order.get("weights") or len(before) != len(now):
        raise ValueError("the weights of the blend differ from the checkpoint's: give the same, or --override-data")
    for number, (old, new) in enumerate(zip(before, now, strict=True), start=1):
        name = f"dataset {number} of the blend" if len(now) > 1 else "the training data"
        if differing := _differing(old, new):
            raise ValueError(
                f"{name} is not the checkpoint's: its files, --split, --seq-length or --seed differ "
                f"({differing}). Give the same, or --override-data"
            )
        if _shuffles(old) != _shuffles(new):
            length = f"{new['epochs']} epochs of {name}, not {old.get('epochs')}, or another part of the last"
            why = "Megatron shuffles across epochs, so the order would change and repeat data that was read"
            shorter = "To end earlier, keep the length and give --exit-interval"
            longer = "to go on in a new order, which repeats some data, give --override-data"
            raise ValueError(f"the run's new length takes {length}. {why}. {shorter}; {longer}")


def _differing(old: Order, new: Order) -> str:
    """List what differs of the data themselves. Older checkpoints know no digest of the ``.bin``."""
    free = {"epochs", "separate_last_epoch"} | ({"bin_sampled_sha256"} - old.keys())
    names = [name for name in {**old, **new} if name not in free and old.get(name) != new.get(name)]
    return "; ".join(f"{name} {old.get(name)} there, {new.get(name)} here" for name in names)


def _shuffles(order: Order) -> tuple[Any, Any]:
    """Return what is shuffled together. "any": saved when each epoch could be shuffled alone."""
    return 1 if order.get("epochs") == "any" else order.get("epochs"), order.get("separate_last_epoch")
