"""Products of 16-bit matrices on processors that have no instructions for them."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # each also with an output buffer
SHORT = (torch.bfloat16, torch.float16)


def prepare_products(device: torch.device) -> None:
    """Have 16-bit matrices multiplied in fp32 if the device is a CPU without AVX-512, until the process ends.

    torch multiplies them in a plain loop there, which takes up to 50 times as long.
    """
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        multiply_in_fp32()


@functools.cache
def multiply_in_fp32() -> torch.library.Library:
    """Multiply 16-bit matrices and compute attention on CPUs in fp32, and round each result once.

    This lasts until the returned library is deleted.
    """
    library = torch.library.Library("aten", "IMPL")
    ours = dict.fromkeys((*PRODUCTS, ATTENTION, f"{ATTENTION}_backward"), _multiply)
    ours |= dict.fromkeys((f"{name}.out" for name in PRODUCTS), _multiply_into)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that this overrides torch's own
        for name, multiply in ours.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, functools.partial(multiply, kernel, name), "CPU", with_keyset=True)
    return library


def _multiply(kernel: Any, name: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = args[0].dtype
    if dtype not in SHORT:
        return kernel.call_boxed(keys, *args, **kwargs)
    results = kernel.call_boxed(keys, *map(_in_fp32, args), **{key: _in_fp32(value) for key, value in kwargs.items()})
    if isinstance(results, Tensor):
        return results.to(dtype)
    if name == ATTENTION:  # the result, and the logarithms of its softmax's sums, which torch keeps in fp32
        return results[0].to(dtype), results[1]
    return tuple(gradient.to(dtype) for gradient in results)


def _multiply_into(kernel: Any, name: str, keys: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    if out.dtype not in SHORT:
        result: Tensor = kernel.call_boxed(keys, *args, out=out, **kwargs)
        return result
    product = getattr(torch.ops.aten, name.removesuffix(".out"))
    return out.copy_(product(*map(_in_fp32, args), **kwargs))


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value
