"""One rank's part in the two hops of a gradient reduction."""

import math
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..fsdp.formats import Formats
from ..fsdp.shared import Shared, below
from ..fsdp.topology import RankLayout
from ..fsdp.unit import Unit, UnitPart
from ..wire.format import WireFormat
from ..wire.quantization import mix_seed
from ..wire.scales import ElementScales
from .gradient_sum import GradientSum, NodeSum
from .loco import ErrorFeedback


@dataclass
class Progress:
    """How many reductions of one unit one rank has made."""

    steps: int = 0  # reductions between nodes
    micro_batches: int = 0  # of this step


@dataclass(kw_only=True)
class GradientHop:
    """What one rank sends and receives among the G ranks of a hop: its node's P, or the N with its local rank."""

    name: str  # "intra" or "inter" nodes
    rows: tuple[int, ...]  # of what is sent, without L: (P, N) or (N,)
    unit: Unit
    rank: int
    shared: Shared
    progress: Progress
    feedback: ErrorFeedback | None = field(default=None, init=False)  # LoCo's
    element_scales: ElementScales | None = field(default=None, init=False)
    format: WireFormat | None = field(default=None, init=False)  # set by ``GradientHops.begin``

    def __post_init__(self) -> None:
        self.config, loco = self.shared.config, self.shared.config.loco
        if loco is not None and (self.name == "inter" or loco.hops == "both"):
            self.feedback = ErrorFeedback(loco)
        if self.config.gradient_element_scales and self.name == "inter":
            self.element_scales = ElementScales()

    def encode(self, gradients: GradientSum) -> Tensor:
        """Encode gradients [G, ..., L], a piece for each rank of the hop, with LoCo: uint8 [G, ..., nbytes]."""
        assert self.format is not None
        format, scales = self.format, self.element_scales
        exponents = scales.of_sent(format) if scales is not None else None
        noise_seed = None
        if self.config.gradient_rounding == "stochastic":
            draw = (self.name, self.unit.name, self.rank, self.progress.steps, self.progress.micro_batches)
            noise_seed = mix_seed(self.config.seed, "gradients", *draw)
        is_sampled = self.shared.monitor.is_due(self.progress.steps)
        if is_sampled:
            gradients = gradients.computed()  # to compare with what arrives
        error = self.feedback.error if self.feedback is not None else None  # what is added to these gradients
        if self.feedback is not None:
            # The hop between nodes runs once per step, that within a node once per micro-batch.
            wires = self.feedback.encode(gradients, format, noise_seed, self.shared.position.is_last, exponents)
        else:
            wires = gradients.encode(format, noise_seed, exponents=exponents)
        if is_sampled:
            self._sample(gradients.parts, wires, exponents, error)
        sent = wires.nbytes - wires[0].nbytes  # this rank keeps one piece
        if self.name == "intra":
            self.shared.traffic.add(intra_node=sent)
        else:
            self.shared.traffic.add(inter_node=sent)
        return wires

    def sum_of(self, wires: Tensor) -> GradientSum:
        """Return the sum [..., L] of what the G ranks send here, uint8 [G, ..., nbytes], which may arrive later."""
        assert self.format is not None  # GradientSum would take None for parts that are numbers
        exponents = self.element_scales.of_received() if self.element_scales is not None else None
        return GradientSum(wires, self.format, exponents=exponents)

    def arrived(self, sent: Tensor, received: GradientSum) -> None:
        """Let element scales learn from what arrived: ``sent`` by this rank, ``received`` from all."""
        assert self.format is not None
        if self.element_scales is not None:
            self.element_scales.arrived(self.format, sent, received.parts)

    def state_dict(self) -> dict[str, Tensor]:
        # The same keys and shapes from the start: what is not there yet is zeros.
        part, state = self.unit.trainable, dict[str, Tensor]()
        zeros = partial(torch.zeros, dtype=torch.uint8, device=self.unit.device)
        if self.feedback is not None:
            kept = self.feedback.state_dict()
            if "error" not in kept:
                format = self.feedback.format(part.parameters, self.config.gradient_block_size)
                kept["error"] = zeros(*self.rows, format.nbytes)
            state |= {f"{self.name}.{key}": value for key, value in kept.items()}
        if self.element_scales is not None:
            kept = self.element_scales.state_dict()
            if "exponents" not in kept:
                kept["exponents"] = zeros(2, *self.rows, part.numel)
            state |= {f"element_scales.{key}": value for key, value in kept.items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for prefix, part in ((f"{self.name}.", self.feedback), ("element_scales.", self.element_scales)):
            if part is not None:
                kept = below(state, prefix)
                part.load_state_dict({key: value.to(self.unit.device) for key, value in kept.items()})

    def _sample(self, pieces: Tensor, wires: Tensor, exponents: Tensor | None, error: Tensor | None) -> None:
        assert self.format is not None
        scales = exponents.unsqueeze(0) if exponents is not None else None
        arrived = GradientSum(wires.unsqueeze(0), self.format, exponents=scales).compute()
        what, unit = f"gradients/{self.name}", self.unit.name
        self.shared.monitor.record(what, unit, pieces, arrived)
        self.shared.monitor.record_codes(what, unit, self.format, wires)
        if self.feedback is not None:
            old = self.feedback.decode(error) if error is not None else arrived.new_zeros(())
            self.shared.monitor.record_error_state(what, unit, pieces, old)


class GradientHops:
    """One rank's reduction of one unit's gradients: its hops, and the node's sum of the micro-batches so far.

    Each micro-batch: ``begin``, the hop within the node, ``keep``. The step's last one: ``begin``, the hop within the
    node, ``with_kept``, the hop between nodes, ``sent``, and ``finish`` when that has arrived. Sums are in fp32. A hop
    of one rank is None.
    """

    def __init__(self, unit: Unit, layout: RankLayout, shared: Shared) -> None:
        self.unit, self.layout, self.config, self.position = unit, layout, shared.config, shared.position
        config = shared.config
        self.formats = Formats(config, layout.num_nodes)
        # On one rank nothing is rounded.
        kept_as = config if layout.world_size > 1 else replace(config, gradient_sum_dtype="fp32")
        self.node_sum = NodeSum(unit, Formats(kept_as, layout.num_nodes))
        self.begun_at = 0  # the unit's optimizer steps when this step's first micro-batch came
        self.progress = Progress()
        self._specified: tuple[UnitPart, torch.dtype, float] | None = None  # what formats were set for
        self._rotation: WireFormat | None = None  # whose quantized parameters are rotated

        hop = partial(GradientHop, unit=unit, rank=layout.rank, shared=shared, progress=self.progress)
        num_nodes, ranks_per_node = layout.num_nodes, layout.ranks_per_node
        self.within_node = hop(name="intra", rows=(ranks_per_node, num_nodes)) if ranks_per_node > 1 else None
        self.between_nodes = hop(name="inter", rows=(num_nodes,)) if num_nodes > 1 else None
        self._hops = [hop for hop in (self.within_node, self.between_nodes) if hop is not None]
        self.feedback = {hop.name: hop.feedback for hop in self._hops if hop.feedback is not None}

    def rescale_errors(self, factor: float) -> None:
        """Multiply LoCo's errors by ``factor``, by which the loss scale, and so every later gradient, changed."""
        for feedback in self.feedback.values():
            feedback.rescale(factor)

    @property
    def element_scales(self) -> ElementScales | None:
        return self.between_nodes.element_scales if self.between_nodes is not None else None

    def begin(self, part: UnitPart, gradients: Tensor, continues: bool = False) -> GradientSum:
        """Begin with a part's gradients [N, P, L]: return them as [P, N, L], a piece per rank of the node, rotated.

        continues: they are of the step whose gradients were reduced before, though nobody said that it goes on.
        """
        if self.node_sum.kept is None:
            if not continues:
                self.begun_at = self.unit.optimizer_steps
                for feedback in self.feedback.values():
                    feedback.begin_step()
            if self.element_scales is not None:
                self.element_scales.begin_step()
        self.node_sum.begin(part)
        # Formats stay until parameters are frozen or unfrozen, the model is cast, or a warm-up of bits ends.
        step = self.position.optimizer_steps if self.config.gradient_bits_warmup is not None else math.inf
        if (part, gradients.dtype, step) != self._specified:
            self._specify(part, gradients.dtype, step)
        # Sums of rotated gradients are rotated sums: rotate once before both hops and back once after them.
        if self._rotation is not None:
            gradients = self._rotation.rotate(gradients)
        return GradientSum(gradients.transpose(0, 1))

    def _specify(self, part: UnitPart, dtype: torch.dtype, step: float) -> None:
        self._specified = part, dtype, step
        if self.within_node is not None:
            self.within_node.format = self.formats.gradients_within_node(part, dtype)
        if self.between_nodes is not None:
            self.between_nodes.format = self.formats.gradients_between_nodes(part, dtype, step)
        self._rotation = self.formats.rotation(part, dtype)

    def with_kept(self, arrived: GradientSum) -> GradientSum:
        """Return the node's sum [N, L] of this micro-batch and of those that were kept before."""
        return self.node_sum.plus(arrived)

    def keep(self, arrived: GradientSum) -> None:
        """Keep the node's sum [N, L] of this micro-batch for the step's last one."""
        noise_seed = None
        if self.config.gradient_sum_dtype != "fp32":
            draw = (self.unit.name, self.layout.rank, self.progress.steps, self.progress.micro_batches)
            noise_seed = mix_seed(self.config.seed, "sums", *draw)
        self.node_sum.add(arrived, noise_seed)
        self.unit.holds_gradients = True
        self.progress.micro_batches += 1

    def sent(self) -> None:
        """Drop what was kept, which has now been sent between nodes."""
        self._drop_kept()
        self.progress.steps += 1

    def finish(self, total: GradientSum, sent: Tensor | None) -> Tensor:
        """Return the sum [L] over all ranks and micro-batches, in fp32 and rotated back.

        sent: uint8 [N, nbytes], what this rank sent between nodes; None on one node.
        """
        result = total.compute()
        if self.between_nodes is not None and sent is not None:
            self.between_nodes.arrived(sent, total)
        return self._rotation.rotate(result) if self._rotation is not None else result

    def undo_step(self) -> None:
        """Drop the gradients since the last optimizer step, and restore what they changed."""
        self._drop_kept()
        if not self.unit.has_stepped_since(self.begun_at):  # no optimizer has used these gradients
            for feedback in self.feedback.values():
                feedback.undo_step()
            if self.element_scales is not None:
                self.element_scales.undo_step()

    def _drop_kept(self) -> None:
        self.node_sum.drop()
        self.unit.holds_gradients, self.progress.micro_batches = False, 0

    def state_dict(self) -> dict[str, Tensor]:
        state = {key: value for hop in self._hops for key, value in hop.state_dict().items()}
        if self.config.gradient_rounding == "stochastic" or self.config.gradient_sum_dtype != "fp32":
            state["steps"] = torch.tensor(self.progress.steps)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._drop_kept()
        if "steps" in state:
            self.progress.steps = int(state["steps"])
        for hop in self._hops:
            hop.load_state_dict(state)
