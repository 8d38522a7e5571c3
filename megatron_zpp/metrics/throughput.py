"""Speed of training: peak FLOP/s of known devices and model FLOPs utilization."""

import torch

# Peak dense (no structured sparsity) tensor-core TFLOP/s in bf16, or fp16 where the device has no bf16, with fp32
# accumulation, from the makers' data sheets; the plain name is the SXM version. An entry matches a device whose name
# contains all its words. The first match counts.
PEAK_TFLOPS = {
    "V100 PCIE": 112.0,
    "V100S": 130.0,
    "V100": 125.0,
    "T4": 65.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX A6000": 154.8,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "H100 PCIE": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIE": 756.0,
    "H800": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "MI300X": 1307.0,
}


def peak_tflops(device_name: str) -> float | None:
    """Return the dense 16-bit peak TFLOP/s of a device by its name; None for others, and lesser versions of these."""
    words = device_name.upper().replace("-", " ").split()
    if not {"MIG", "LAPTOP", "D"}.isdisjoint(words):
        return None
    return next((tflops for name, tflops in PEAK_TFLOPS.items() if {*name.split()} <= {*words}), None)


def model_tflops(tokens_per_second: float, flops_per_token: float) -> float:
    """Return the TFLOP/s of the model's arithmetic, without recomputation."""
    return tokens_per_second * flops_per_token / 1e12


def mfu(tokens_per_second_per_device: float, flops_per_token: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilization of one device, 0 to 1; None without its peak in TFLOP/s."""
    return None if peak is None else model_tflops(tokens_per_second_per_device, flops_per_token) / peak


def describe_mfu(device_name: str, peak: float | None, *, given: bool = False) -> str:
    """Format the convention of MFU, for the log's first lines. given: ``peak`` is from ``--peak-tflops``."""
    if peak is None:
        return f"MFU: not shown, the peak of {device_name} is not known; give --peak-tflops"
    source = "--peak-tflops" if given else f"{device_name}, dense 16-bit"
    return (
        f"MFU: model FLOPs (forward + backward, causal attention counted half, recomputation not counted) "
        f"over a peak of {peak:g} TFLOP/s per device ({source})"
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
