"""How metrics are arranged, everywhere alike: TensorBoard's "Custom Scalars", wandb reports, tools/report.py."""

from __future__ import annotations

import re

DASHBOARD = {  # group: chart: key
    "Loss": {
        "training loss": "lm loss",
        "validation loss": "lm loss validation",
    },
    "Throughput": {
        "tokens per second": "tokens-per-second",
        "model FLOPs utilization": "mfu",
        "TFLOP/s per GPU": "throughput",
    },
    "Communication": {
        "bytes between nodes per step": "comm/bytes-between-nodes",
        "bytes within nodes per step": "comm/bytes-within-nodes",
        "seconds waited for links between nodes, per step": "comm/seconds-waited-between-nodes",
        "seconds waited for links within nodes, per step": "comm/seconds-waited-within-nodes",
    },
    "Quantization error": {
        "relative error of weights": "comm/error/weights",
        "relative error of gradients within nodes": "comm/error/gradients/intra",
        "relative error of gradients between nodes": "comm/error/gradients/inter",
        "LoCo's error over gradients, between nodes": "comm/error-state/gradients/inter",
        "share of largest codes, gradients between nodes": "comm/largest-codes/gradients/inter",
        "blocks with NaN or Inf, gradients between nodes": "comm/nonfinite-blocks/gradients/inter",
    },
}


def tensorboard_layout() -> dict[str, dict[str, list[object]]]:
    """What SummaryWriter.add_custom_scalars takes; TensorBoard matches tags from their start, hence the ``$``."""
    return {
        group: {chart: ["Multiline", [f"{re.escape(key)}$"]] for chart, key in charts.items()}
        for group, charts in DASHBOARD.items()
    }
