"""On CPUs without instructions for 16-bit matrices, products and attention are rounded once; fp32 is as before."""

import subprocess
import sys

# In a process of its own, because an override lasts.
PROGRAM = """
import torch
from megatron_zpp.models.bf16_products import multiply_in_fp32

torch.manual_seed(0)
before = [torch.randn(4, 64, 48), torch.randn(4, 48, 32), torch.randn(32)]
heads = torch.randn(3, 2, 4, 24, 16)
attend = torch.nn.functional.scaled_dot_product_attention
product, attended = before[0] @ before[1], attend(*heads)
multiply_in_fp32()
assert torch.equal(before[0] @ before[1], product) and torch.equal(attend(*heads), attended)
for dtype in (torch.bfloat16, torch.float16):
    a, b, bias = (t.to(dtype).requires_grad_() for t in before)
    exact = [t.detach().double().requires_grad_() for t in (a, b, bias)]
    for compute in (
        lambda a, b, bias: a @ b,
        lambda a, b, bias: a[0] @ b[0],
        lambda a, b, bias: torch.nn.functional.linear(a[0].t().contiguous().t(), b[0].t(), bias),
        lambda a, b, bias: torch.baddbmm(bias, a, b, beta=2, alpha=0.5),
    ):
        ours, oracle = compute(a, b, bias), compute(*exact)
        assert ours.dtype == dtype
        # Half a unit in the last place, and what fp32 rounded before.
        assert ((ours - oracle).abs() <= oracle.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 1e-5).all()
        weights = torch.randn_like(ours)
        gradients = torch.autograd.grad((ours * weights).sum(), (a, b))
        expected = torch.autograd.grad((oracle * weights.double()).sum(), exact[:2])
        for gradient, right in zip(gradients, expected):
            assert gradient.dtype == dtype
            assert ((gradient - right).abs() <= right.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 1e-5).all()

for dtype in (torch.bfloat16, torch.float16):
    a, b = before[0][0].to(dtype), before[1][0].to(dtype)
    into = torch.empty(64, 32, dtype=dtype)
    assert torch.mm(a, b, out=into) is into and torch.equal(into, a @ b)
    for flags in ({"is_causal": True}, {"attn_mask": torch.ones(24, 24).tril().bool()}, {"scale": 0.3}):
        tensors = [t.to(dtype).requires_grad_() for t in heads]
        exact = [t.detach().double().requires_grad_() for t in tensors]
        ours, oracle = attend(*tensors, **flags), attend(*exact, **flags)
        weights = torch.randn_like(ours)
        pairs = [(ours, oracle)]
        pairs += zip(
            torch.autograd.grad((ours * weights).sum(), tensors),
            torch.autograd.grad((oracle * weights.double()).sum(), exact),
        )
        for result, right in pairs:  # gradients are computed from the rounded output
            assert result.dtype == dtype
            assert (result - right).abs().max() <= right.abs().max() * torch.finfo(dtype).eps * 2
"""


def test_products_are_rounded_once():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
