"""Sharding, training, evaluating and resuming a small model on real ranks: what most tests of ZeRO++ share.

``fsdp_model.py`` has a model whose gradients are chosen, for comparisons with the oracle.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from megatron_zpp.zeropp import LoCoConfig, Traffic, ZeroPPConfig, apply_zeropp
from tests.zeropp.fsdp_model import HAS_UNUSED_SWITCH

# Two hops, and nothing quantized: training equals plain FSDP2's but for the order of sums.
HIERARCHY_ONLY = ZeroPPConfig(
    hpz_partition_size=2, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None
)
ALL_FLAGS = ZeroPPConfig(
    quantized_weights=True,
    hpz_partition_size=2,
    quantized_gradients=True,
    loco=LoCoConfig(),
    weight_block_size=32,
    gradient_block_size=32,
)


class Net(nn.Module):
    """Residual blocks that are to be units, and a head that belongs to the root."""

    def __init__(self, width: int = 24, hidden: int = 36, outputs: int = 24, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """Run the blocks with these indices; default: each once."""
        for i in range(len(self.blocks)) if order is None else order:
            x = x + self.blocks[i](x)
        return self.head(x)


class TiedNet(nn.Module):
    """Tied embeddings, odd widths, a bias of less than one element a rank, frozen layers, one that is seldom used."""

    def __init__(self, has_frozen: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 33)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(33, 70), nn.GELU(), nn.Linear(70, 33)) for _ in range(3))
        self.head = nn.Linear(33, 50)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(dropout)
        self.extra = nn.Linear(33, 33)
        if has_frozen:
            self.layers[1].requires_grad_(False)
            self.layers[2][0].weight.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.scale * self.dropout(layer(x))
        if tokens[0, 0] % 2 == 0 or not HAS_UNUSED_SWITCH:
            x = x + self.extra(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten(), reduction="none")


def token_batch(step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [2, 9] for ``TiedNet``, or any model with 50 tokens."""
    generator = torch.Generator().manual_seed(10000 * step + 100 * micro_batch + rank)
    tokens = torch.randint(50, (2, 10), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def shard(model: nn.Module, config: ZeroPPConfig | None, units: Iterable[nn.Module] = (), **options: Any) -> Any:
    """Shard units, then the model, over all ranks; return the ZeroPP, or None for plain FSDP2 (without a config)."""
    for module in (*units, model):
        fully_shard(module, **options)
    return apply_zeropp(model, config) if config is not None else None


def reshard(model: nn.Module) -> None:
    """Free what passes without gradients have left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def evaluate(model: nn.Module, *args: Any) -> Tensor:
    """The outputs; leaves nothing gathered."""
    outputs = model(*args).clone()
    reshard(model)
    return outputs


def micro_batches(zeropp: Any, number: int) -> Iterator[int]:
    """Count from 0, and tell ZeRO++ (if there is any) before each whether it is its step's last."""
    for i in range(number):
        if zeropp is not None:
            zeropp.set_is_last_micro_batch(i == number - 1)
        yield i


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> Tensor:
    """Train one step on the mean square of the outputs; return the loss."""
    loss = model(*args).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


LossOf = Callable[[int, int, int], Tensor]  # takes a step, a micro-batch and a rank


def backward(zeropp: Any, loss_of: LossOf, step: int, num_micro_batches: int = 1) -> list[float]:
    """Run the backward passes of a step; return the losses of its micro-batches."""
    losses = []
    for i in micro_batches(zeropp, num_micro_batches):
        loss = loss_of(step, i, dist.get_rank())
        loss.backward()
        losses.append(loss.item())
    return losses


class Trained(NamedTuple):
    losses: list[float]  # one per micro-batch
    traffic: list[Traffic]  # what this rank sent in each step
    weights: list[Tensor]  # whole, at the end

    @property
    def between_nodes(self) -> list[int]:
        return [of_step.inter_node for of_step in self.traffic]


def train(
    model: nn.Module,
    zeropp: Any,
    loss_of: LossOf,
    num_steps: int,
    num_micro_batches: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> Trained:
    """Train under ZeRO++, or under plain FSDP2 (``zeropp`` is None); default: AdamW."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    losses, traffic = [], []
    for step in range(num_steps):
        losses += backward(zeropp, loss_of, step, num_micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)
        traffic.append(zeropp.traffic.take() if zeropp is not None else Traffic())
    reshard(model)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return Trained(losses, traffic, [weight.detach().clone() for weight in weights])


def local(tensor: Tensor) -> Tensor:
    """This rank's shard: shares memory with the tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def shards(model: nn.Module) -> list[Tensor]:
    """Copies of this rank's shards of all parameters."""
    return [local(parameter).clone() for parameter in model.parameters()]


def equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are the same to the bit."""
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def resumes_exactly(
    build: Callable[[], tuple[nn.Module, Any, torch.optim.Optimizer]],
    train_part: Callable[[nn.Module, Any, torch.optim.Optimizer, int], None],
    before_saving: Callable[[nn.Module, Any], None] = lambda model, zeropp: None,
) -> bool:
    """Whether a saved state, loaded into new objects, trains on to the same bits, and stays as it was saved.

    ``build``: returns a model, its ZeroPP and its optimizer. ``train_part``: trains the steps before the state is
    saved (part 0) and those after it (part 1).
    """
    model, zeropp, optimizer = build()
    train_part(model, zeropp, optimizer, 0)
    before_saving(model, zeropp)
    weights, state, moments = shards(model), copy.deepcopy(zeropp.state_dict()), copy.deepcopy(optimizer.state_dict())
    train_part(model, zeropp, optimizer, 1)
    again, zeropp, optimizer = build()
    for parameter, weight in zip(again.parameters(), weights, strict=True):
        local(parameter).copy_(weight)
    optimizer.load_state_dict(moments)
    loaded = copy.deepcopy(state)
    zeropp.load_state_dict(loaded)
    train_part(again, zeropp, optimizer, 1)
    is_untouched = all(value.equal(state[key]) for key, value in loaded.items())
    return is_untouched and equal(shards(model), shards(again)) and not equal(shards(model), weights)
