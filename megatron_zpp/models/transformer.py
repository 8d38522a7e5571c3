"""The interface of a model: its layers, its shape, and what its forward pass returns."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from .cross_entropy import linear_cross_entropy


class TransformerConfig(Protocol):
    """The shape of a model: a frozen dataclass of plain values, which a checkpoint keeps field by field."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Padded."""
        ...

    @property
    def init_method_std(self) -> float: ...


class TokenLoss(Protocol):
    """A loss that models call inside their forward pass, where FSDP2 has gathered the output layer's weight."""

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
        """Compute each token's loss, fp32 [B, S], of ``hidden`` [B, S, H], ``weight`` [V, H] and ``labels`` [B, S].

        Logits are ``layers.output_logits(hidden, weight, softcap)``: hidden times weight, and with ``softcap`` c each
        logit l as c * tanh(l / c). Under tensor parallelism ``hidden`` and ``weight`` are DTensors; ``output_logits``
        gathers the logits whole.
        """
        ...


class Transformer(nn.Module):
    """The base of every model.

    ``forward(tokens, labels, position_ids, cu_seqlens)`` returns ``loss`` of each token, fp32 [B, S], or a
    ``ModelOutput``; without ``labels`` logits [B, S, V].
    """

    config: TransformerConfig
    layers: nn.ModuleList  # the blocks [B, S, H] -> [B, S, H]: units of sharding, recomputation and compilation
    with_vocabulary: ClassVar = ("word_embeddings.weight", "output_layer.weight")  # parameters with a row per token
    ends: tuple[str, ...] = ()  # modules before and after them that are units of sharding too, not the root's
    loss: TokenLoss = staticmethod(linear_cross_entropy)  # the trainer sets it on each instance
    document_attention: Callable[..., Tensor | None]  # see ``attention.replace_attention``

    def finish_step(self, has_stepped: bool, add_up: Callable[[Tensor], None]) -> None:
        """Update what the optimizer does not: biases of experts. Not ``has_stepped``: the step was skipped.

        ``add_up`` sums a tensor over all data-parallel ranks, in place; every rank must sum the same ones.
        """


class ModelOutput(NamedTuple):
    """The result of a forward pass with labels that returns more than the tokens' losses."""

    losses: Tensor  # per token, fp32 [B, S]; before a pipeline's last stage: hidden states [B, S, H]
    # Scalars of this micro-batch by name, coefficients included: added to the loss. The same names in the same order in
    # every micro-batch on every rank; stages of a pipeline have some of them, and sums are over all stages.
    auxiliary: Mapping[str, Tensor]
    observed: Mapping[str, Tensor] = {}  # the same of what is logged and not trained on


def as_model_output(output: Tensor | ModelOutput) -> ModelOutput:
    """Return a model's result as a ``ModelOutput``, without auxiliary losses if it is the tokens' losses alone."""
    return output if isinstance(output, ModelOutput) else ModelOutput(output, {})
