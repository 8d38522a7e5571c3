"""State in torch.distributed.checkpoint: a fresh object on all ranks goes on to the same bits, others start over."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from tests.ranks import run_in_turn, run_ranks
from tests.zeropp.fsdp_model import CapturedWarnings
from tests.zeropp.training_on_ranks import equal, evaluate, micro_batches, shard, shards

EVERYTHING = ZeroPPConfig(
    quantized_weights=True,
    hpz_partition_size=2,
    weight_rounding="stochastic",
    quantized_gradients=True,
    gradient_bits=2,
    gradient_bits_warmup="3:4",
    gradient_rounding="stochastic",
    gradient_element_scales=True,
    loco=LoCoConfig(hops="both", reset_interval=3),
    gradient_block_size=32,
    weight_block_size=32,
)
INT8_COPIES = ZeroPPConfig(
    quantized_weights=True,
    hpz_partition_size=2,
    weight_moves=True,
    quantized_gradients=True,
    gradient_sum_dtype="int8",
    loco=LoCoConfig(exact_undo=False),
)
SETTINGS = {
    "everything": EVERYTHING,
    "int8": INT8_COPIES,
    "flat": ZeroPPConfig(True, weight_rounding="stochastic"),
}
STEPS = 2


class Loop:
    """A model whose second unit has some frozen parameters, under ZeRO++, and its steps."""

    def __init__(self, config: ZeroPPConfig, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48))
        self.model[2].bias.requires_grad_(False)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        self.zeropp = shard(self.model, config, [self.model[0]], mp_policy=policy)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # which keeps nothing

    def train(self, first: int, steps: int = STEPS) -> None:
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            for _ in micro_batches(self.zeropp, 2):
                self.model(torch.randn(8, 48, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> None:
        evaluate(self.model, torch.ones(1, 48))

    def change_weights(self) -> None:
        """Leave no trace that autograd could see."""
        self.evaluate()
        self.model[0].weight.data.mul_(3)

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "zeropp": self.zeropp}

    def bits(self) -> list[torch.Tensor]:
        return [*shards(self.model), *(value.clone() for _, value in sorted(self.zeropp.state_dict().items()))]


# Settings, when the state is saved, and how.
CASES = [
    ("everything", "after a step", "async_save"),
    ("int8", "after an evaluation", "save"),
    ("everything", "after a change", "save"),
    ("flat", "before anything", "async_save"),
]


def _resumed(folder: str, settings: str, moment: str, how: str) -> bool:
    """Whether a run that goes on from a checkpoint has the bits of one that was never interrupted."""
    config = SETTINGS[settings]
    dtype = torch.bfloat16 if config is INT8_COPIES else torch.float32
    loop, again = Loop(config, dtype), Loop(config, dtype)
    if moment != "before anything":
        loop.train(0)
    if moment == "after an evaluation":
        loop.evaluate()
    if moment == "after a change":
        loop.change_weights()
    # async_save's collectives run beside training's.
    saving = getattr(dcp, how)(loop.state(), checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    loop.train(STEPS)
    if how == "async_save":
        saving.result()
    dcp.load(again.state(), checkpoint_id=folder)
    again.train(STEPS)
    return equal(loop.bits(), again.bits())


def test_a_fresh_object_goes_on_to_the_same_bits(tmp_path):
    resumes = {", ".join(case): partial(_resumed, str(tmp_path / str(i)), *case) for i, case in enumerate(CASES)}
    assert run_in_turn(4, resumes) == {name: [True] * 4 for name in resumes}


def _on_other_settings(folder: str):
    """What loading says where ranks or settings are others, and whether training then is as from the start."""
    with CapturedWarnings() as warnings:
        loop = Loop(EVERYTHING) if dist.get_world_size() == 4 else Loop(INT8_COPIES)
        if dist.get_world_size() == 4:
            loop.train(0)
            dcp.save(loop.state(), checkpoint_id=folder)
            saved = loop.zeropp.state_dict()
            loop = Loop(INT8_COPIES)
        try:
            dcp.load(loop.state(), checkpoint_id=folder)
            message = "loaded"
        except dcp.api.CheckpointException as error:
            message = str(error)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(loop.state(), checkpoint_id=folder, planner=planner)
        before = len(warnings.messages)
        if dist.get_world_size() == 4:
            loop.zeropp.load_state_dict(saved)
    loop.train(STEPS)
    fresh = Loop(INT8_COPIES)
    dcp.load({"model": fresh.model.state_dict()}, checkpoint_id=folder)
    fresh.train(STEPS)
    return message, warnings.messages[before:], equal(loop.bits(), fresh.bits())


def test_state_of_other_ranks_or_settings_is_refused_by_name_or_left_out(tmp_path):
    for rank, (message, warnings, is_anew) in enumerate(run_ranks(4, _on_other_settings, str(tmp_path))):
        assert "Missing key in checkpoint state_dict: zeropp.0.2 x 2 ranks, settings " in message and is_anew
        assert [text.startswith("the state of ZeRO++ is left out") for text in warnings] == [True] * (rank == 0)
    for message, _, is_anew in run_ranks(2, _on_other_settings, str(tmp_path)):
        assert "Missing key in checkpoint state_dict: zeropp.0.1 x 2 ranks, settings " in message and is_anew


def _state_of_rank_0_alone():
    """As accelerate's ``register_for_checkpointing`` saves it: then no rank may take its own."""
    loop = Loop(EVERYTHING)
    loop.train(0)
    loop.evaluate()
    state = [loop.zeropp.state_dict()]
    dist.broadcast_object_list(state)
    with CapturedWarnings() as warnings:
        loop.zeropp.load_state_dict(state[0])
    anew = [value.any().item() for key, value in loop.zeropp.state_dict().items() if "row" in key or "error" in key]
    loop.train(STEPS)
    return warnings.messages, any(anew)


def _nothing_kept(config):
    loop = Loop(config)
    loop.train(0)
    assert loop.zeropp.state_dict() == {}
    with CapturedWarnings() as warnings:
        loop.zeropp.load_state_dict({})
    return warnings.messages


KEEP_NOTHING = {"off": ZeroPPConfig(), "no LoCo": ZeroPPConfig(True, 2)}


@pytest.fixture(scope="module")
def without_checkpoint():
    functions = {name: partial(_nothing_kept, config) for name, config in KEEP_NOTHING.items()}
    return run_in_turn(4, functions | {"rank 0 alone": _state_of_rank_0_alone})


def test_where_one_rank_has_no_state_all_begin_anew(without_checkpoint):
    for rank, (warnings, has_any) in enumerate(without_checkpoint["rank 0 alone"]):
        assert len(warnings) == (rank == 0) and not has_any


@pytest.mark.parametrize("name", KEEP_NOTHING)
def test_settings_that_keep_nothing_have_no_state_and_miss_none(without_checkpoint, name):
    assert without_checkpoint[name] == [[]] * 4
