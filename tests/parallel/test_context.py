"""Context parallelism: attention over ranks is plain attention, ZeRO++ sends the same bytes."""

import itertools
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.models import attention as layers
from megatron_zpp.models.attention import document_attention
from megatron_zpp.parallel import context as context_module
from megatron_zpp.parallel.context import ContextParallel, shard
from tests.models.test_documents import varlen_by_formula
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import flags, start

CU_SEQLENS = torch.tensor([0, 5, 6, 16, 32, 33, 41, 48], dtype=torch.int32)  # 3 rows of 16 tokens


def _attend(groups: int, dtype: torch.dtype):
    """Largest errors of this rank's outputs and gradients, for cp 2 and 4, with and without documents and a window."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 16, 4, 8, generator=generator, dtype=dtype)
    k, v = (torch.randn(3, 16, groups, 8, generator=generator, dtype=dtype) for _ in range(2))
    weight = torch.randn(q.shape, generator=generator, dtype=dtype)
    errors = []
    for size in (2, 4):
        mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "cp"))["cp"]
        context = ContextParallel(mesh, mesh.get_local_rank(), size)

        def mine(tensor, context=context):
            return shard(tensor.movedim(1, -1), context.rank, context.size).movedim(-1, 1)

        for cu_seqlens, window, kernel in itertools.product((None, CU_SEQLENS), (None, 3), (False, True)):
            whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            documents = document_attention(cu_seqlens, q[:, :, 0, 0], dtype, False, window)
            expected = F.scaled_dot_product_attention(
                *(tensor.transpose(1, 2) for tensor in whole), documents, is_causal=documents is None, enable_gqa=True
            ).transpose(1, 2)
            (expected * weight).sum().backward()

            parts = [mine(tensor).clone().requires_grad_() for tensor in (q, k, v)]
            with (
                patch.object(context_module, "takes_variable_lengths", lambda *of, kernel=kernel: kernel),
                patch.object(layers, "varlen_attn", varlen_by_formula),
            ):
                documents = context.document_attention(cu_seqlens, mine(q)[:, :, 0, 0], dtype, False, window)
                actual = context.attention(*parts, documents, 0.0, window)
            assert documents.dim() == (1 if kernel else 4)
            (actual * mine(weight)).sum().backward()
            pairs = [(actual, mine(expected)), *((a.grad, mine(b.grad)) for a, b in zip(parts, whole, strict=True))]
            errors.append([(a - b).abs().max().item() for a, b in pairs])
    return errors


def test_attention_and_gradients_equal_plain_attention():
    found = run_in_turn(4, {f"{groups} groups": partial(_attend, groups, torch.float64) for groups in (1, 4)})
    for name, of_ranks in found.items():
        for errors in of_ranks:
            assert torch.tensor(errors).max() < 1e-14, name
            assert len(errors) == 2 * 8


def _seed(argv: list[str]) -> int:
    start(argv)
    return torch.initial_seed()


def test_every_rank_draws_its_own_dropout(data):
    assert len(set(run_ranks(4, _seed, flags(data, "--context-parallel-size 2")))) == 4
