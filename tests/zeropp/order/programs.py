"""What real training loops do with FSDP2 and ZeRO++, each short enough to be recorded."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from megatron_zpp.zeropp import LoCoConfig, ZeroPP, ZeroPPConfig, apply_zeropp

ZEROPP = ZeroPPConfig(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, weight_block_size=64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 50), nn.Linear(50, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """A unit for each of three blocks; embedding and head are the root's. What it does can be chosen between passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order, self.checkpoints = [0, 1, 2], False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i in self.order:
            x = checkpoint(self.blocks[i], x, use_reentrant=False) if self.checkpoints else self.blocks[i](x)
        return self.head(x) * 2


class Loop:
    """A model under FSDP2 and ZeRO++, its optimizer, and what a training loop does with them."""

    def __init__(self, reshard: bool, config: ZeroPPConfig) -> None:
        self.model = Net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.units: list[FSDPModule] = [*self.model.blocks, self.model]
        for unit in self.units:
            fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy)
        self.zeropp: ZeroPP = apply_zeropp(self.model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def tokens(self) -> Tensor:
        return torch.randint(40, (2, 5), generator=self.generator)

    def backward(self, num_micro_batches: int = 2) -> None:
        for i in range(num_micro_batches):
            self.zeropp.set_is_last_micro_batch(i == num_micro_batches - 1)
            self.model(self.tokens()).float().square().mean().backward()

    def step(self, num_micro_batches: int = 2) -> None:
        self.backward(num_micro_batches)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.tokens())


def accumulation(loop: Loop) -> None:
    for _ in range(2):
        loop.step()


def evaluation(loop: Loop) -> None:
    loop.evaluate()
    for _ in range(2):
        loop.step(1)
        loop.evaluate()
        with torch.inference_mode():
            loop.model(loop.tokens())


def prefetch(loop: Loop) -> None:
    blocks = list(loop.model.blocks)
    loop.model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    for _ in range(2):
        loop.step()
    loop.evaluate()


def asynchronous_unshard(loop: Loop) -> None:
    for unit in loop.units:
        unit._set_unshard_async_op(True)
    prefetch(loop)


def used_twice(loop: Loop) -> None:
    loop.model.order = [0, 1, 0, 2, 2]
    for _ in range(2):
        loop.step()


def recomputation(loop: Loop) -> None:
    loop.model.checkpoints = True
    for _ in range(2):
        loop.step()


def unshard_by_hand(loop: Loop) -> None:
    """On the current stream, between passes whose gathers are on FSDP2's; forgotten copies in between."""
    for _ in range(2):
        loop.step()
        for unit in loop.units:
            unit.unshard()
        for unit in loop.units:
            unit.reshard()
        loop.zeropp.invalidate()
        handles = [unit.unshard(async_op=True) for unit in loop.units]
        for handle in handles:
            handle.wait()
        for unit in loop.units:
            unit.reshard()
    loop.evaluate()


def skipped_steps(loop: Loop) -> None:
    """As a loss scaler does: gradients thrown away, the scale halved, and once again."""
    loop.step()
    for _ in range(2):
        loop.backward()
        loop.zeropp.undo_step()
        loop.zeropp.rescale_errors(0.5)
        loop.optimizer.zero_grad()
        loop.step()
        loop.zeropp.rescale_errors(2.0)
        loop.step()


def changed_weights(loop: Loop) -> None:
    """Some tell of themselves, some not; as an average of the weights is swapped in for an evaluation."""
    loop.step()
    kept = [parameter.to_local().clone() for parameter in loop.model.parameters()]
    for change in (1.5, 0.5):
        for parameter in loop.model.parameters():
            parameter.to_local().data.mul_(change)
        loop.evaluate()
        for unit in loop.units:
            unit.reshard()
        with torch.no_grad():
            for parameter, value in zip(loop.model.parameters(), kept, strict=True):
                parameter.to_local().copy_(value)
        loop.step()


def resumption(loop: Loop) -> None:
    loop.zeropp.monitor_errors(1)
    loop.step()
    loop.zeropp.quantization_errors()
    state = {name: value.clone() for name, value in loop.zeropp.state_dict().items()}
    loop.step()
    loop.zeropp.load_state_dict({name: value.clone() for name, value in state.items()})  # freed right after
    loop.step()
    loop.zeropp.quantization_errors()


PROGRAMS: dict[str, Callable[[Loop], None]] = {
    program.__name__: program
    for program in (
        *(accumulation, evaluation, prefetch, asynchronous_unshard, used_twice, recomputation, unshard_by_hand),
        *(skipped_steps, changed_weights, resumption),
    )
}
# Whether FSDP2 frees parameters after the forward pass, and what ZeRO++ does.
CONFIGS: dict[str, tuple[bool, ZeroPPConfig]] = {
    "hpZ, parameters stay gathered": (False, ZeroPPConfig(hpz_partition_size=2)),
    "qwZ, qgZ": (True, ZeroPPConfig(quantized_weights=True, quantized_gradients=True, gradient_intra_bits=None)),
    "all": (True, replace(ZEROPP, loco=LoCoConfig(hops="both"))),
    "all, in host memory, moved codes, element scales": (
        True,
        replace(
            ZEROPP,
            loco=LoCoConfig(reset="decay"),
            weight_moves=True,
            offload="all",
            gradient_element_scales=True,
        ),
    ),
    "all, every option": (
        True,
        replace(
            ZEROPP,
            loco=LoCoConfig(hops="both", reset_interval=2),
            weight_intra_bits=8,
            weight_rounding="stochastic",
            gradient_rounding="stochastic",
            hadamard=True,
        ),
    ),
}
