"""What saves activations: bytes that a token leaves in a layer after the forward pass, and seconds of CPU.

    python benchmarks/activations.py    # a row for each way; the compiled ones take minutes

Blocks of a Llama in bf16 on one thread. Bytes are those that torch's allocator has given out and not got back. Seconds
of CPU are the least of five turns. Offloading copies to other memory of the CPU here: its bytes count, its seconds say
nothing of a GPU.
"""

import gc
import time
from typing import Any

import torch
from common import RESULTS, append_row, markdown_table, new_parser, read_rows
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.families import LLAMA
from megatron_zpp.families.llama import DEFAULTS
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.activation_offload import ActivationOffload
from megatron_zpp.models.decoder_config import DecoderConfig
from megatron_zpp.models.init import init_weights

FILE = RESULTS / "activations.jsonl"
LAYERS, HIDDEN, TOKENS = 4, 512, 1024
MLP, FULL = "--recompute-granularity selective --recompute-modules mlp", "--recompute-granularity full"
OFFLOAD = f"--cpu-offloading-num-layers {LAYERS}"
BUDGET = "--compile --activation-memory-budget"
WAYS: dict[str, tuple[Any, ...]] = {  # arguments of ``apply_activation_checkpointing``, of offloading, of compiling
    "none": (None, 0, None),
    MLP: (("selective", None, None, ("mlp",)), 0, None),
    "--recompute-activations": (("selective",), 0, None),
    FULL: (("full",), 0, None),
    OFFLOAD: (None, LAYERS, None),
    f"{MLP} {OFFLOAD}": (("selective", None, None, ("mlp",)), LAYERS, None),
    f"{FULL} {OFFLOAD}": (("full",), LAYERS, None),
    "--compile": (None, 0, 1.0),
    f"{BUDGET} 0.5": (None, 0, 0.5),
    f"{BUDGET} 0": (None, 0, 0.0),
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", help="the ways that have this in their flags")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for flags, choice in WAYS.items():
        if args.only not in flags:
            continue
        row = {"flags": flags, **measure(*choice)}
        print(row, flush=True)
        append_row(FILE, row)


def measure(checkpointing: tuple[Any, ...] | None, num_offloaded: int, budget: float | None) -> dict[str, float]:
    model, offload = blocks(), ActivationOffload()
    if checkpointing is not None:
        apply_activation_checkpointing(model, *checkpointing)
    if budget is not None:
        torch._dynamo.reset()  # or it takes what it compiled for another budget
        torch._functorch.config.activation_memory_budget = budget
        for block in model.layers:
            block.forward = torch.compile(block.forward)
    offload.apply(model.layers, num_offloaded)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    tables = model.rotary(torch.zeros(1, TOKENS, dtype=torch.int64), None, x.dtype)

    def forward() -> torch.Tensor:
        y = x
        for block in model.layers:
            y = block(y, *tables)
        return y

    def both_passes() -> float:
        start = time.process_time()
        forward().sum().backward()
        return time.process_time() - start

    both_passes()  # compiles, and makes gradients
    seconds = min(both_passes() for _ in range(5))
    offload._near, offload._in_backward = [], None  # what the last backward pass left
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        output = forward()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    kept, in_host = sum(event.nbytes() for event in events) - output.nbytes, host_bytes(offload)
    per_layer = TOKENS * LAYERS
    return {"device_bytes": (kept - in_host) / per_layer, "host_bytes": in_host / per_layer, "seconds": seconds}


def blocks() -> Any:
    defaults: dict[str, Any] = dict(DEFAULTS)
    config = DecoderConfig(LAYERS, HIDDEN, 8, vocab_size=64, ffn_hidden_size=3 * HIDDEN, **defaults)
    model = LLAMA.build_empty(config).to_empty(device="cpu").bfloat16()
    init_weights(model, 1)
    return model


def host_bytes(offload: ActivationOffload) -> int:
    total, block_pass = 0, offload._near[0] if offload._near else None
    while block_pass is not None:
        total += sum(flat.nbytes for flat in block_pass.in_host)
        block_pass = block_pass.previous()
    return total


def table() -> str:
    """The kept rows as Markdown."""
    return markdown_table(["flags", "on the device", "in host memory", "seconds"], map(cells, read_rows(FILE)))


def cells(row: dict[str, Any]) -> list[str]:
    sizes = [f"{row[where]:,.0f}" for where in ("device_bytes", "host_bytes")]
    return [f"`{row['flags']}`" if row["flags"] != "none" else "none", *sizes, f"{row['seconds']:.3f}"]


if __name__ == "__main__":
    main()
