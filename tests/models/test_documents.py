"""Attention within documents: a packed batch gives what each document gives alone."""

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.models import attention
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.attention import document_attention
from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.init import init_weights
from tests.models.configs import gpt_config, llama_config

LENGTHS = [[5, 1, 10], [16], [1, 8, 7]]  # documents of each row
CU_SEQLENS = torch.tensor([0, 5, 6, 16, 32, 33, 41, 48], dtype=torch.int32)
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
SHAPE = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=50)


def build(architecture, dtype=torch.float32, device="cpu", **options):
    torch.manual_seed(0)
    if architecture == "gpt":
        options = dict(attention_dropout=0.0, hidden_dropout=0.0) | options
        model = Decoder(gpt_config(**SHAPE, max_position_embeddings=16, **options))
    else:
        model = Decoder(llama_config(**SHAPE, num_query_groups=2, **options))
    init_weights(model, seed=1)
    for parameter in model.parameters():  # far from the initial weights, which hardly attend
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(device, dtype)


def varlen_by_formula(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
    """What PyTorch's kernel for variable lengths computes, which needs a GPU: see its docstring."""
    left, right = window_size
    attended = []
    for document in range(len(cu_q) - 1):
        queries, keys, values = (
            x[cu[document] : cu[document + 1]].transpose(0, 1) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
        )
        mask = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - queries.shape[1])
        if left >= 0:
            mask = mask.triu(keys.shape[1] - queries.shape[1] - left)
        assert right == 0
        attended.append(F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=enable_gqa))
    return torch.cat(attended, dim=1).transpose(0, 1)


def batch(device="cpu"):
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(50, (3, 16), generator=generator).to(device) for _ in range(2))
    return tokens, labels


def gradients(model, loss):
    model.zero_grad()
    loss.sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_packed_documents_equal_documents_alone(architecture, recompute):
    model = build(architecture)
    tokens, labels = batch()
    alone = [
        model(document.unsqueeze(0), label.unsqueeze(0)).squeeze(0)
        for row, row_labels, lengths in zip(tokens, labels, LENGTHS, strict=True)
        for document, label in zip(row.split(lengths), row_labels.split(lengths), strict=True)
    ]
    expected = torch.cat(alone).view(3, 16)
    expected_gradients = gradients(model, expected)
    if recompute is not None:
        apply_activation_checkpointing(model, recompute)
    packed = model(tokens, labels, POSITIONS, CU_SEQLENS)
    torch.testing.assert_close(packed, expected)
    for actual, wanted in zip(gradients(model, packed), expected_gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert (model(tokens, labels) - expected).abs().max() > 1e-2  # or the test would show nothing


def test_positions_and_attention_are_reset_apart():
    model = build("gpt")
    tokens, labels = batch()
    losses = [model(tokens, labels, p, c) for p in (None, POSITIONS) for c in (None, CU_SEQLENS)]
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(losses[i], losses[j], atol=1e-3)
    whole_rows = torch.arange(4, dtype=torch.int32) * 16
    torch.testing.assert_close(model(tokens, labels, torch.arange(16).expand(3, 16), whole_rows), losses[0])


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
@pytest.mark.parametrize("has_gqa", [False, True], ids=["torch 2.11", "newer"])
@pytest.mark.parametrize("cu_seqlens", [None, CU_SEQLENS], ids=["rows", "documents"])
def test_the_kernel_is_asked_for_what_the_mask_hides(monkeypatch, architecture, cu_seqlens, has_gqa):
    tokens, labels = batch()
    model = build(architecture, window_size=3)
    masked = model(tokens, labels, POSITIONS, cu_seqlens)
    monkeypatch.setattr(attention, "takes_variable_lengths", lambda *of: True)
    kernel = varlen_by_formula if has_gqa else lambda *q, window_size: varlen_by_formula(*q, window_size=window_size)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "VARLEN_HAS_GQA", has_gqa)
    torch.testing.assert_close(model(tokens, labels, POSITIONS, cu_seqlens), masked)
    assert (build(architecture)(tokens, labels, POSITIONS, cu_seqlens) - masked).abs().max() > 1e-2  # it does hide


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch's kernel for variable lengths needs a GPU")
@pytest.mark.parametrize("architecture", ["gpt", "llama"])
@pytest.mark.parametrize("window", [None, 3])
def test_kernel_for_variable_lengths_equals_the_mask(architecture, window):
    tokens, labels = batch("cuda")
    positions, cu_seqlens = POSITIONS.cuda(), CU_SEQLENS.cuda()
    exact = build(architecture, device="cuda", window_size=window)(tokens, labels, positions, cu_seqlens)
    model = build(architecture, torch.bfloat16, "cuda", window_size=window)
    assert document_attention(cu_seqlens, tokens, torch.bfloat16, False).dim() == 1
    packed = model(tokens, labels, positions, cu_seqlens)
    torch.testing.assert_close(packed, exact, rtol=0.05, atol=0.05)
    assert all(gradient.isfinite().all() for gradient in gradients(model, packed))
