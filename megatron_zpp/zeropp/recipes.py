"""Recipes: the few ways to send weights and gradients that docs/evidence/experiments.md leaves, ordered by rounding.

Trainer, library, planner, study, pages and tests iterate over this table: a row is all that a recipe needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import LoCoConfig, ZeroPPConfig

DEFAULT = "int8"  # the recipe that pages and notes suggest
AUTO = "auto"  # the trainer measures, and chooses one of RECIPES
WARMUP_STEPS = 500  # optimizer steps in ``warmup_bits``, where nothing says how long the learning rate warms up
LOSS_BUDGET = 0.4  # percent of loss; eight seeds resolve 0.12 to 0.37 (docs/evidence/experiments.md)


@dataclass(frozen=True)
class Recipe:
    """A way to send weights and gradients.

    fields: of ``ZeroPPConfig``, but for the ranks of a node. warmup_bits: of gradients while the learning rate warms
    up. loss: percent over ZeRO-3 in bf16, and its 95 % interval, on a GPT of 1.3 million parameters (E19); None where
    weights arrive to the bit, and gradients as FSDP2 sends them. evidence: experiments that trained it or its parts.
    """

    name: str
    summary: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    warmup_bits: int | None = None
    loss: tuple[float, float] | None = None
    evidence: str = ""

    @property
    def risk(self) -> float:
        """The upper end of the loss's interval, in percent; not below what rounds less, or 0."""
        up_to_this = list(RECIPES.values())[: list(RECIPES).index(self.name) + 1]
        return max(sum(recipe.loss) if recipe.loss is not None else 0.0 for recipe in up_to_this)

    def config(self, ranks_per_node: int, warmup_steps: int | None = None, copies: str = "node") -> ZeroPPConfig:
        """Return the settings for nodes of ``ranks_per_node`` data-parallel ranks.

        One rank a node has no hpZ, unless ``copies`` is "card". warmup_steps: steps in ``warmup_bits``, if any.
        """
        fields = dict(self.fields)
        if fields.pop("weight_moves", False) and (ranks_per_node > 1 or copies == "card"):
            fields |= {"weight_moves": True, "hpz_partition_size": ranks_per_node, "weight_copies": copies}
        if self.warmup_bits is not None and warmup_steps is not None:
            fields["gradient_bits_warmup"] = f"{warmup_steps}:{self.warmup_bits}"
        return ZeroPPConfig(**fields)


_QUANTIZED = dict(quantized_weights=True, weight_moves=True, quantized_gradients=True, loco=LoCoConfig())
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("zero3", "FSDP2's own collectives", evidence="E19"),
        Recipe(
            "lossless",
            "the moved bits of 16-bit weights, and unquantized gradients, between nodes once per step",
            dict(weight_moves=True, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None),
            evidence="E19",
        ),
        Recipe(
            "int8",
            "moved int8 codes of weights; 4-bit gradients between nodes with LoCo",
            _QUANTIZED,
            loss=(0.05, 0.33),
            evidence="E12 (weights), E5 (gradients), E15, E19",
        ),
        Recipe(
            "int6",
            "moved int6 codes of weights; 2-bit gradients between nodes with LoCo and scales of elements",
            _QUANTIZED | dict(weight_bits=6, gradient_bits=2, gradient_element_scales=True),
            warmup_bits=4,
            loss=(0.32, 0.37),
            evidence="E12, E15, E19",
        ),
        Recipe(
            "ternary",
            "moved int6 codes of weights; 1-bit gradients between nodes with LoCo of beta 0.95 and scales of elements",
            _QUANTIZED
            | dict(weight_bits=6, gradient_bits=1, gradient_element_scales=True, scale_dtype="bf16")
            | dict(loco=LoCoConfig(beta=0.95)),
            warmup_bits=4,
            loss=(-0.33, 0.26),
            evidence="E12, E15, E19",
        ),
    )
}


def find_config(name: str, ranks_per_node: int) -> ZeroPPConfig:
    """Return the settings of the recipe ``name`` under a loop of one's own. Raises ValueError for other names."""
    if name == AUTO:
        raise ValueError(
            f'"{AUTO}" predicts steps from the model\'s shape, which the trainer alone knows: name one of '
            f"{', '.join(RECIPES)}; `megatron-zpp plan` ranks them for a cluster"
        )
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}: name one of {', '.join(RECIPES)}, or give a ZeroPPConfig")
    return RECIPES[name].config(ranks_per_node, WARMUP_STEPS)
