"""Layers of the models: norms, and the output layer."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def head_size(hidden_size: int, num_heads: int, num_query_groups: int, kv_channels: int | None) -> int:
    """Width of one attention head. Raises ValueError for heads that do not divide."""
    if num_heads % num_query_groups:
        raise ValueError(f"num_attention_heads {num_heads} is not divisible by num_query_groups {num_query_groups}")
    if kv_channels is None and hidden_size % num_heads:
        uneven = f"hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads}"
        raise ValueError(f"{uneven}: set kv_channels")
    return kv_channels or hidden_size // num_heads


class LayerNorm1p(nn.LayerNorm):
    """A norm whose weight is kept less 1, so that weight decay would pull it to 1, and 16 bits hold it more exactly."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RMSNorm1p(nn.RMSNorm):
    """RMSNorm whose weight is kept less 1, as in ``LayerNorm1p``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


NORMS = {
    ("LayerNorm", False): nn.LayerNorm,
    ("LayerNorm", True): LayerNorm1p,
    ("RMSNorm", False): nn.RMSNorm,
    ("RMSNorm", True): RMSNorm1p,
}


def output_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Compute logits [..., V] of ``hidden`` [..., H], whole on every rank. Other arguments: see ``TokenLoss``."""
    if isinstance(weight, DTensor):
        mine = F.linear(gather_tokens(hidden), weight.to_local())
        logits = DTensor.from_local(mine, weight.device_mesh, [Shard(mine.dim() - 1)], run_check=False).full_tensor()
    else:
        logits = F.linear(hidden, weight)
    return capped(logits, softcap)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Bound logits l by ``softcap`` c: c * tanh(l / c)."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


class OutputLayer(nn.Linear):
    """The linear layer [V, H] to the vocabulary. FSDP2 gathers its weight for this module's forward pass alone."""

    def forward(self, hidden: Tensor, compute: Callable[[Tensor, Tensor], Tensor] = output_logits) -> Tensor:
        """Return ``compute(hidden, weight)`` of hidden states [..., H]: logits [..., V], or a loss of them."""
        return compute(hidden, self.weight)


def gather_tokens(hidden: Tensor) -> Tensor:
    """Gather all tokens of a DTensor [..., H]; the ranks' gradients of it are summed."""
    assert isinstance(hidden, DTensor)
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
