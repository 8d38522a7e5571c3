"""The loss of a run, an object that models, training, evaluations and pipelines call and know nothing of.

To train on another one, override parts of ``LanguageModelLoss`` and give the class to ``commands.pretrain.main``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.data.loader import Batch
from megatron_zpp.models.cross_entropy import linear_cross_entropy
from megatron_zpp.models.transformer import ModelOutput
from megatron_zpp.parallel.context import shard_batch
from megatron_zpp.parallel.mesh import Mesh


class Target(NamedTuple):
    """Inputs of the loss beside the model's output, for one micro-batch."""

    mask: Tensor  # 1 for each of this rank's tokens that count [B, S / cp]
    num_tokens: Tensor  # divisor and weight of the micro-batch's sum; equal on ranks that share its sequences

    def sum(self, losses: Tensor) -> Tensor:
        """Add up the tokens' losses, fp32 [B, S / cp], to a scalar."""
        return (losses * self.mask).sum()


class LanguageModelLoss:
    """Cross-entropy of the next token, in nats, over all tokens that the data does not mask. A ``TokenLoss``."""

    name = "lm loss"  # in logs and on dashboards

    def __init__(self, mesh: Mesh, device: torch.device, compiled: bool = False) -> None:
        """compiled: see ``linear_cross_entropy``."""
        self._mesh, self._device, self._compiled = mesh, device, compiled

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, softcap, self._compiled)

    def split(self, batch: Batch) -> tuple[Batch, Target]:
        """Split a micro-batch of the loader into what this rank's model takes, on its device, and the target."""
        inputs = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        num_tokens = inputs["loss_mask"].sum()
        if self._mesh.cp_size > 1:
            inputs = shard_batch(inputs, self._mesh.cp_rank, self._mesh.cp_size)
        return inputs, Target(inputs.pop("loss_mask"), num_tokens)


class LossTotals:
    """This rank's part of the loss over the micro-batches of one optimizer step.

    Gradients average as in Megatron: over a micro-batch's tokens, then over micro-batches, then (FSDP2's) over
    ranks; with ``per_token`` they belong to the sum, which the step divides by the count of all tokens.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device, num_micro_batches: int, scale: float, *, per_token: bool
    ) -> None:
        self._mesh, self._per_token, self._num_micro_batches, self._scale = mesh, per_token, num_micro_batches, scale
        self._sum_and_count = torch.zeros(2, dtype=torch.float64, device=device)
        self.auxiliary: dict[str, Tensor] = {}  # losses and observations so far, by name

    def add(self, losses: Tensor, target: Target) -> Tensor:
        """Add a micro-batch's losses [B, S / cp]; return its part of the step's loss, times the loss scale."""
        total, count = target.sum(losses), target.num_tokens
        self._sum_and_count += torch.stack([total.detach(), count])
        # FSDP2 averages over a context-parallel group too, whose parts of the loss are to be added.
        mean = total * self._mesh.cp_size / count.clamp(min=1)
        return (total if self._per_token else mean / self._num_micro_batches) * self._scale

    def add_auxiliary(self, output: ModelOutput, target: Target) -> Tensor | float:
        """Add a micro-batch's auxiliary losses and observations; return their part of the step's loss, scaled too."""
        # Averaged over micro-batches and (FSDP2) over ranks; per token, over the tokens that are in them. Ranks of a
        # context-parallel group count the same tokens.
        weight = target.num_tokens / self._mesh.cp_size if self._per_token else 1 / self._num_micro_batches
        for name, value in (*output.auxiliary.items(), *output.observed.items()):
            so_far = self.auxiliary.setdefault(name, self._sum_and_count.new_zeros(()))
            so_far += value.detach() * weight
        return sum(output.auxiliary.values()) * weight * self._scale

    def local_totals(self, names: Sequence[str]) -> Tensor:
        """Return sum, count and the auxiliary values of these names, fp64 [2 + A], to be added up over all ranks."""
        zero = self._sum_and_count.new_zeros(())
        totals = torch.stack([*self._sum_and_count, *(self.auxiliary.get(name, zero) for name in names)])
        return count_once(self._mesh, totals)


def count_once(mesh: Mesh, totals: Tensor) -> Tensor:
    """Zero what other ranks count too in ``totals`` [sum, count, ...], for a sum over all ranks."""
    if mesh.tp_rank > 0:
        totals.zero_()  # all ranks of a tensor-parallel group have the same loss
    if mesh.cp_rank > 0:
        totals[1] = 0  # each rank of a context-parallel group has a part of the loss, but the tokens of all
    return totals


def no_loss(where: str) -> str:
    """Warn of tokens none of which counts, so that their mean loss is 0."""
    return f"no token of {where} has a loss, which is shown as 0: look at what the data mask (--sft, --eod-mask-loss)"
