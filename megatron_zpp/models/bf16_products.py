"""Products of 16-bit matrices on processors that have no instructions for them."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@functools.cache
def multiply_in_fp32() -> torch.library.Library:
    """Multiply 16-bit matrices on CPUs in fp32, and round each product once, until the returned library is deleted.

    Without AVX-512 torch multiplies them in a plain loop, which takes up to 50 times as long.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that this overrides torch's own
        for name in PRODUCTS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, functools.partial(_multiply, kernel), "CPU", with_keyset=True)
    return library


def _multiply(kernel: Any, keys: Any, *matrices: Tensor, **factors: Any) -> Tensor:
    dtype = matrices[0].dtype
    if dtype in (torch.bfloat16, torch.float16):
        return kernel.call_boxed(keys, *(matrix.float() for matrix in matrices), **factors).to(dtype)
    return kernel.call_boxed(keys, *matrices, **factors)
