"""Attention, rotary embedding and the blockwise loss against direct formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils._python_dispatch import _disable_current_modes

from megatron_zpp.models import cross_entropy
from megatron_zpp.models.cross_entropy import VOCABULARY_BLOCK, linear_cross_entropy
from megatron_zpp.models.rotary import apply_rotary, frequencies, rotary_table
from tests.collectives import Calls


def test_interleaved_rotary_embeddings_are_megatrons():
    theirs = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    frequency = frequencies(16, 10000, torch.device("cpu"))
    x, (cos, sin) = torch.randn(2, 9, 3, 20), rotary_table(frequency, 9)
    angles = (torch.arange(9).unsqueeze(-1) * frequency).repeat_interleave(2, dim=-1)[:, None, None]  # [S, 1, 1, 16]
    expected = theirs._apply_rotary_pos_emb_bshd(x.transpose(0, 1), angles, rotary_interleaved=True)
    torch.testing.assert_close(apply_rotary(x, cos, sin, interleaved=True), expected.transpose(0, 1))


def loss_inputs(dtype: torch.dtype, tokens: int = 40, vocabulary: int = 2 * VOCABULARY_BLOCK + 123):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 32, generator=generator).to(dtype).requires_grad_()
    weight = (0.06 * torch.randn(vocabulary, 32, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    # Labels at the edges of blocks.
    labels[:5] = torch.tensor([0, VOCABULARY_BLOCK - 1, VOCABULARY_BLOCK, 2 * VOCABULARY_BLOCK, vocabulary - 1])
    grad = torch.randn(tokens, generator=generator)  # not uniform, one token without gradient
    grad[7] = 0
    return hidden, weight, labels, grad


def exact_loss(hidden, weight, labels, grad):
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    loss.backward(grad.double())
    return loss.detach(), hidden.grad, weight.grad


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


# In bf16 the matrix products' rounding of 2^-9 shows; a loss rounded to bf16, or gradients summed in it, would exceed
# these.
@pytest.mark.parametrize("dtype, loss_error, grad_error", [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 5e-4, 3.5e-3)])
def test_loss_and_gradients_equal_plain_cross_entropy(dtype, loss_error, grad_error):
    hidden, weight, labels, grad = loss_inputs(dtype)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(grad)
    exact, exact_hidden_grad, exact_weight_grad = exact_loss(hidden, weight, labels, grad)
    assert loss.dtype == torch.float32 and loss.shape == (40,)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert relative_error(loss, exact) < loss_error
    assert relative_error(hidden.grad, exact_hidden_grad) < grad_error
    assert relative_error(weight.grad, exact_weight_grad) < grad_error
    assert hidden.grad[7].count_nonzero() == 0


def test_the_hidden_gradient_is_added_up_in_fp32(monkeypatch):
    """Over many blocks a sum kept in 16 bit would lose what each one adds; one in fp32 rounds once, at its end."""
    monkeypatch.setattr(cross_entropy, "VOCABULARY_BLOCK", 8)
    hidden, weight, labels, grad = loss_inputs(torch.bfloat16)  # 528 blocks
    linear_cross_entropy(hidden, weight, labels).backward(grad)
    _, exact, _ = exact_loss(hidden, weight, labels, grad)
    assert relative_error(hidden.grad, exact) < 3.5e-3  # as with few blocks, above; in bf16 it would be 2.7e-2


def test_loss_without_gradients_and_of_huge_logits():
    hidden, weight, labels, _ = loss_inputs(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden * 1e4, weight, labels)
        expected = F.cross_entropy(F.linear(hidden * 1e4, weight), labels, reduction="none")
    assert not loss.requires_grad and loss.isfinite().all()
    torch.testing.assert_close(loss, expected)


def test_logits_never_exist_whole():
    hidden, weight, labels, grad = loss_inputs(torch.float32, tokens=100, vocabulary=4 * VOCABULARY_BLOCK)
    with Calls() as operators:
        linear_cross_entropy(hidden, weight, labels).backward(grad)
    largest = max(numel for _, numels in operators.calls for numel in numels)
    assert largest == 100 * VOCABULARY_BLOCK * 15 // 8  # 7.5 bytes per token; not 100 * 4 * VOCABULARY_BLOCK


@pytest.mark.parametrize("compiled, most", [(False, 850), (True, 150)])
def test_launches_of_the_loss(monkeypatch, compiled, most):
    """At 64 * VOCABULARY_BLOCK, as 131,072 is. Before, both passes were 1,798 operators."""
    monkeypatch.setattr(cross_entropy, "VOCABULARY_BLOCK", 512)
    hidden, weight, labels, grad = loss_inputs(torch.bfloat16, vocabulary=64 * 512)
    kernels = []

    def as_one_kernel(body):  # as ``test_a_compiled_loss`` finds it to be
        def run(*arguments):
            kernels.append(body)
            with _disable_current_modes():
                return body(*arguments)

        return run

    monkeypatch.setattr(cross_entropy, "_compiled", as_one_kernel)
    with Calls() as operators:
        linear_cross_entropy(hidden, weight, labels, compiled=compiled).backward(grad)
    computing = [function for function, _ in operators.calls if not function.is_view]  # views launch nothing
    assert len(kernels) + len(computing) <= most


@pytest.mark.long
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_a_compiled_loss(softcap):
    """Each block's body is one kernel, and computes the same."""

    def gradients(compiled: bool):
        hidden, weight, labels, grad = loss_inputs(torch.bfloat16, vocabulary=3 * VOCABULARY_BLOCK)  # one block
        linear_cross_entropy(hidden, weight, labels, softcap, compiled).backward(grad)
        return hidden.grad, weight.grad

    torch.compiler.reset()
    with fresh_cache():
        result, code = run_and_get_code(gradients, True)
    assert sum(source.count("async_compile.cpp_pybinding(") for source in code) == 2
    for eager, same in zip(gradients(False), result, strict=True):
        assert relative_error(same, eager.double()) < 3e-3


@pytest.mark.parametrize("trains_weight", [True, False])
def test_a_softcap_and_frozen_weights(trains_weight):
    hidden, weight, labels, grad = loss_inputs(torch.float32)
    weight.requires_grad_(trains_weight)
    loss = linear_cross_entropy(hidden.view(4, 10, 32), weight, labels.view(4, 10), softcap=0.5)
    loss.backward(grad.view(4, 10))
    exact_hidden, exact_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = 0.5 * (exact_hidden @ exact_weight.T / 0.5).tanh()
    exact = F.cross_entropy(logits, labels, reduction="none")
    exact.backward(grad.double())
    assert relative_error(loss.flatten(), exact.detach()) < 1e-6
    assert relative_error(hidden.grad, exact_hidden.grad) < 1e-5
    assert weight.grad is None if not trains_weight else relative_error(weight.grad, exact_weight.grad) < 1e-5
