"""One process against real gloo ranks: losses, weights and traffic of training are equal, to the last bit in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.models.init import init_weights
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp, emulate_zeropp
from tests.families.find import architecture_of
from tests.models.configs import gpt_config, llama_config
from tests.ranks import run_ranks
from tests.zeropp.fsdp_model import HAS_UNUSED_SWITCH, CapturedWarnings

STEPS, MICRO_BATCHES = 4, 2

ALL_FLAGS = dict(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True)
BLOCKS = dict(weight_block_size=64, gradient_block_size=32)
CASES = {
    # name: (model, config, dtype)
    "all flags": ("net", ZeroPPConfig(**ALL_FLAGS, loco=LoCoConfig(), **BLOCKS), None),
    "LoCo on both hops": (
        "net",
        ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=LoCoConfig(hops="both", error_dtype="bf16", reset_interval=2)),
        None,
    ),
    "differences": (
        "net",
        ZeroPPConfig(
            **ALL_FLAGS, **BLOCKS, loco=LoCoConfig(), weight_difference_bits=4, weight_difference_block_size=64
        ),
        None,
    ),
    "bits that warm up": (
        "net",
        ZeroPPConfig(
            **ALL_FLAGS,
            **BLOCKS,
            loco=LoCoConfig(),
            gradient_bits=2,
            gradient_bits_warmup="2:4",
            weight_difference_bits=3,
            weight_difference_bits_warmup="1:8",
        ),
        None,
    ),
    "noise": (
        "net",
        ZeroPPConfig(
            **ALL_FLAGS,
            **BLOCKS,
            weight_intra_bits=6,
            hadamard=True,
            weight_rounding="stochastic",
            gradient_rounding="stochastic",
            loco=LoCoConfig(reset="decay", reset_interval=4),
        ),
        None,
    ),
    "int8 copies": ("net", ZeroPPConfig(**ALL_FLAGS, **BLOCKS, hpz_secondary_dtype="int8", gradient_bits=None), None),
    "int8 copies, differences, int8 sums": (
        "net",
        ZeroPPConfig(
            **ALL_FLAGS,
            **BLOCKS,
            hpz_secondary_dtype="int8",
            weight_difference_bits=4,
            gradient_sum_dtype="int8",
            loco=LoCoConfig(exact_undo=False),
        ),
        torch.bfloat16,
    ),
    "moved codes": (
        "net",
        ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=LoCoConfig(), weight_moves=True, weight_bits=6),
        None,
    ),
    "moved bits": (
        "net",
        ZeroPPConfig(quantized_gradients=True, hpz_partition_size=2, gradient_block_size=32, weight_moves=True),
        torch.bfloat16,
    ),
    "bf16 sums": ("net", ZeroPPConfig(**ALL_FLAGS, **BLOCKS, gradient_sum_dtype="bf16"), None),
    "scales of elements": (
        "net",
        ZeroPPConfig(**ALL_FLAGS, **BLOCKS, gradient_bits=2, gradient_element_scales=True, loco=LoCoConfig()),
        torch.bfloat16,
    ),
    "no blocks": (
        "net",
        ZeroPPConfig(**ALL_FLAGS, weight_block_size=None, gradient_block_size=None, gradient_intra_bits=None),
        None,
    ),
    "bf16": ("gpt", ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=LoCoConfig()), torch.bfloat16),
    "fp16": ("llama", ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=LoCoConfig()), torch.float16),
    "GPT": ("gpt", ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=LoCoConfig()), None),
    "Llama": ("llama", ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=LoCoConfig()), None),
    "qwZ alone": ("gpt", ZeroPPConfig(quantized_weights=True, ranks_per_node=2, weight_rounding="stochastic"), None),
    "hpZ alone": ("net", ZeroPPConfig(hpz_partition_size=2), None),
    "ZeRO-3": ("net", ZeroPPConfig(ranks_per_node=2), None),
}
CONFIGS = {
    "gpt": gpt_config(2, 36, 2, vocab_size=50, max_position_embeddings=16, attention_dropout=0.1, hidden_dropout=0.1),
    "llama": llama_config(2, 36, 2, vocab_size=50),
}
UNQUANTIZED_GRADIENTS = ("qwZ alone", "hpZ alone", "ZeRO-3")


class Net(nn.Module):
    """Tied embeddings, odd widths, a bias of less than one element a rank, a frozen layer, one that is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 33)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(33, 70), nn.GELU(), nn.Linear(70, 33)) for _ in range(3))
        self.head = nn.Linear(33, 50)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.1)
        self.extra = nn.Linear(33, 33)
        self.layers[1].requires_grad_(False)
        self.layers[2][0].weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.scale * self.dropout(layer(x))
        if tokens[0, 0] % 2 == 0 or not HAS_UNUSED_SWITCH:
            x = x + self.extra(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten(), reduction="none")


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "net":
        return Net()
    config = CONFIGS[kind]
    model = architecture_of(config).module(config)
    init_weights(model, seed=1)
    return model


def micro_batch(step: int, i: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10000 * step + 100 * i + rank)
    tokens = torch.randint(50, (2, 10), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4, fused=True)


def change(model: nn.Module) -> None:
    """Change parameters behind autograd's back; not those of the root, which FSDP2 keeps after an evaluation."""
    for parameter in model.layers.parameters():
        parameter.data.mul_(1.25)


def policy(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype is torch.bfloat16 else None)


def train_ranks(kind, config, dtype):
    """One real rank: losses of its micro-batches, evaluation's outputs, bytes by step, the parameters at the end."""
    model, rank = build(kind), dist.get_rank()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy(dtype))
    fully_shard(model, mp_policy=policy(dtype))
    zeropp = apply_zeropp(model, config)
    if not config.quantized_gradients and kind == "net" and HAS_UNUSED_SWITCH:
        model.set_reduce_scatter_unused_params(True)
    optimizer = optimizer_of(model)
    torch.manual_seed(100 + rank)
    losses, outputs, traffic = [], [], []
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            zeropp.set_is_last_micro_batch(i == MICRO_BATCHES - 1)
            loss = model(*micro_batch(step, i, rank)).mean() / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                outputs.append(model.eval()(*micro_batch(9, 9, 9)).clone())
                change(model)
                outputs.append(model(*micro_batch(9, 9, 9)).clone())
            model.train()
        traffic.append(zeropp.traffic.take())
    return losses, outputs, traffic, [p.full_tensor().detach() for p in model.parameters()]


def train_emulated(kind, config, dtype, num_nodes, ranks_per_node):
    """All ranks in this process: what ``train_ranks`` returns on each, and one sum of the bytes."""
    model, world_size = build(kind), num_nodes * ranks_per_node
    mp = policy(dtype)
    emulated = emulate_zeropp(
        model,
        config,
        num_nodes,
        ranks_per_node,
        units=list(model.layers),
        param_dtype=mp.param_dtype,
        reduce_dtype=mp.reduce_dtype,
    )
    optimizer = optimizer_of(model)
    emulated.ranks.step_by_shards(optimizer)
    emulated.ranks.random_states.seed(lambda rank: 100 + rank)
    losses, outputs, traffic = [[] for _ in range(world_size)], [], []
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            emulated.set_is_last_micro_batch(i == MICRO_BATCHES - 1)
            for rank, as_rank in enumerate(emulated.ranks):
                with as_rank:
                    loss = model(*micro_batch(step, i, rank)).mean() / MICRO_BATCHES
                    loss.backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            model.eval()
            for changes in (False, True):
                if changes:
                    change(model)
                for as_rank in emulated.ranks:
                    with torch.no_grad(), as_rank:
                        output = model(*micro_batch(9, 9, 9))
                outputs.append(output)
            model.train()
        traffic.append(emulated.traffic.take())
    return losses, outputs, traffic, [p.detach() for p in model.parameters()]


LAYOUTS = {4: (2, 2), 6: (3, 2)}  # nodes and ranks per node


def train_ranks_on(names):
    return {name: train_ranks(*CASES[name]) for name in names}


def train_emulated_on(names, num_nodes, ranks_per_node):
    return {name: train_emulated(*CASES[name], num_nodes, ranks_per_node) for name in names}


def both(names, world_size):
    """What each real rank returned, and the emulation of all, by case."""
    real = run_ranks(world_size, train_ranks_on, names, timeout=400.0)
    emulated = run_ranks(1, train_emulated_on, names, *LAYOUTS[world_size], timeout=400.0)[0]
    return {name: ([rank[name] for rank in real], emulated[name]) for name in names}


@pytest.fixture(scope="module")
def on_four_ranks():
    return both(list(CASES), 4)


def check_traffic(real, traffic):
    for step, sent in enumerate(traffic):
        assert sent.inter_node == sum(rank[2][step].inter_node for rank in real)
        assert sent.intra_node == sum(rank[2][step].intra_node for rank in real)


def check_equal(real, emulated):
    losses, outputs, traffic, parameters = emulated
    assert losses == [rank[0] for rank in real]
    assert all(mine.equal(its) for mine, its in zip(outputs, real[0][1], strict=True))
    for mine, its in zip(parameters, real[0][3], strict=True):
        assert mine.equal(its)
    check_traffic(real, traffic)


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNQUANTIZED_GRADIENTS])
def test_equals_real_ranks_to_the_bit(on_four_ranks, name):
    check_equal(*on_four_ranks[name])


def test_equals_six_ranks_on_three_nodes():
    check_equal(*both(["noise"], 6)["noise"])


@pytest.mark.parametrize("name", UNQUANTIZED_GRADIENTS)
def test_unquantized_gradients_differ_by_the_order_of_sums_alone(on_four_ranks, name):
    real, (losses, _, traffic, parameters) = on_four_ranks[name]
    for mine, its in zip(losses, (rank[0] for rank in real), strict=True):
        assert mine[:2] == its[:2]  # before the first step nothing was summed
        assert mine == pytest.approx(its, rel=1e-6)
    for mine, its in zip(parameters, real[0][3], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    check_traffic(real, traffic)


def _undone(every_rank: bool, loco: LoCoConfig, micro_batches: int):
    """LoCo's state and the gradients of a step, without and with another one thrown away before it."""
    states = []
    for disturbed in (False, True):
        model = build("net").eval()  # dropout would draw on
        config = ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=loco, gradient_element_scales=True)
        emulated = emulate_zeropp(model, config, 2, 2, units=list(model.layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in [0, 8, 1] if disturbed else [0, 1]:
            for i in range(micro_batches):
                emulated.set_is_last_micro_batch(i == micro_batches - 1)
                for rank, as_rank in enumerate(emulated.ranks):
                    if step == 8 and i == micro_batches - 1 and rank == 3 and not every_rank:
                        break
                    with as_rank:
                        model(*micro_batch(step, i, rank)).mean().backward()
            if step == 8:
                emulated.undo_step()
            if step == 0:
                optimizer.step()
            if step != 1:
                model.zero_grad()
        states.append(emulated.state_dict() | {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return states


@pytest.mark.parametrize("every_rank", [True, False])
@pytest.mark.parametrize(
    "loco, micro_batches, hops",
    [
        (LoCoConfig(), 1, ["inter"]),
        (LoCoConfig(hops="both", reset_interval=3), 2, ["inter", "intra"]),  # an undone step counts for no reset
        (LoCoConfig(hops="both", reset_interval=3, reset="decay"), 2, ["inter", "intra"]),
    ],
)
def test_an_undone_step_leaves_no_trace(every_rank, loco, micro_batches, hops):
    expected, state = run_ranks(1, _undone, every_rank, loco, micro_batches)[0]
    assert sorted({key.split("/")[-1][:5] for key in state if key.endswith(".error")}) == hops
    assert any("weight" in name for name in state)
    assert state.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in state.items())


def _begun_anew():
    """State and gradients of a step: the first one, and one after another was thrown away and LoCo kept no copy."""
    states = []
    for steps in ([1], [0, 8, 1]):
        model = build("net").eval()  # dropout would draw on
        config = ZeroPPConfig(**ALL_FLAGS, **BLOCKS, loco=LoCoConfig(exact_undo=False))
        emulated = emulate_zeropp(model, config, 2, 2, units=list(model.layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in steps:
            for rank, as_rank in enumerate(emulated.ranks):
                with as_rank:
                    (model(*micro_batch(step, 0, rank)).mean() * (1e30 if step == 8 else 1)).backward()
            if step == 8:
                emulated.undo_step()
            if step == 0:
                optimizer.step()
                emulated.undo_step()  # too late: the optimizer has used what the errors went with
                assert any(name.endswith(".error") for name in emulated.state_dict())
            if step != 1:
                model.zero_grad()
        states.append(emulated.state_dict() | {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return states


def test_without_a_copy_an_undone_step_lets_loco_begin_anew():
    expected, state = run_ranks(1, _begun_anew)[0]
    assert state.keys() == expected.keys() and any(name.endswith(".error") for name in state)
    assert all(value.equal(expected[name]) for name, value in state.items())


def test_wrong_use_is_refused():
    model = build("net")
    config = CASES["all flags"][1]
    with pytest.raises(ValueError, match="hpz_partition_size 2 must be"):
        emulate_zeropp(model, config, 2, 4)
    with pytest.raises(ValueError, match="not stage 1"):
        emulate_zeropp(model, config, 2, 2, zero_stage=1)
    with pytest.raises(ValueError, match="has no storage yet"):
        emulate_zeropp(nn.Linear(4, 4, device="meta"), config, 2, 2)
    with pytest.raises(ValueError, match="shares a parameter with another unit"):
        emulate_zeropp(model, config, 2, 2, units=[model.embedding])
    emulated = emulate_zeropp(model, config, 2, 2, units=list(model.layers))
    with pytest.raises(RuntimeError, match="in turn: this is rank 1, it is rank 0's"), list(emulated.ranks)[1]:
        model(*micro_batch(0, 0, 1)).mean().backward()
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    other = emulate_zeropp(build("net"), CASES["noise"][1], 2, 2)
    with CapturedWarnings() as warnings:
        emulated.load_state_dict(other.state_dict())
    assert ["another ZeroPPConfig" in message for message in warnings.messages] == [True]


def test_settings_without_effect_are_named(caplog):
    model = nn.Sequential(nn.Linear(8, 8))
    emulate_zeropp(model, ZeroPPConfig(True, 4, True, LoCoConfig()), num_nodes=1, ranks_per_node=4)
    assert "hpZ has no effect" in caplog.text and "LoCo has no effect" in caplog.text
    caplog.clear()
    emulate_zeropp(model, ZeroPPConfig(quantized_gradients=True, loco=LoCoConfig(hops="both")), 1, 4)
    assert "LoCo" not in caplog.text  # it corrects the hop within the node
    assert "matrices of the root module are sent unquantized: a rank holds fewer than 32 elements" in caplog.text
    caplog.clear()
    emulate_zeropp(nn.Linear(32, 32), ZeroPPConfig(quantized_gradients=True, gradient_intra_bits=None), 1, 4)
    assert "qgZ has no effect on 4 data-parallel ranks on one node" in caplog.text and "matrices" not in caplog.text
    alone = ZeroPPConfig(True), ZeroPPConfig(False, 2, weight_difference_bits=4), ZeroPPConfig(quantized_gradients=True)
    for config in alone:
        caplog.clear()
        emulate_zeropp(model, config, 2, 2)
        assert "matrices of the root module are sent unquantized" in caplog.text
    caplog.clear()
    emulate_zeropp(model, ZeroPPConfig(False, 2), 2, 2)
    assert "matrices" not in caplog.text


def test_every_unit_has_a_topology():
    model = build("net")
    emulated = emulate_zeropp(model, ZeroPPConfig(quantized_weights=True), 2, 3, units=list(model.layers))
    assert [(t.num_nodes, t.ranks_per_node, t.rank) for t in emulated.topologies] == [(2, 3, 0)] * 4
    assert emulated.describe().startswith("2 nodes of 3 ranks;") and "\n" not in emulated.describe()


def draws_of(emulated):
    numbers = []
    for as_rank in emulated.ranks:
        with as_rank:
            numbers.append(torch.rand(3).tolist())
    return numbers


def test_random_states_are_loaded_into_ranks_that_were_never_seeded():
    ours, theirs = (emulate_zeropp(nn.Sequential(nn.Linear(8, 8)), ZeroPPConfig(), 2, 2) for _ in range(2))
    unseeded = ours.ranks.random_states.state_dict()
    ours.ranks.random_states.seed(lambda rank: 100 + rank)
    draws_of(ours)
    state = ours.ranks.random_states.state_dict()
    theirs.ranks.random_states.load_state_dict(state)
    expected = draws_of(ours)
    assert draws_of(theirs) == expected and len({tuple(numbers) for numbers in expected}) == 4
    theirs.ranks.random_states.load_state_dict(unseeded)  # one for all ranks again, the process's own
    torch.manual_seed(5)
    own = torch.rand(4, 3).tolist()
    torch.manual_seed(5)
    assert draws_of(theirs) == own


def test_random_states_of_too_few_ranks_are_refused():
    states = [emulate_zeropp(nn.Linear(8, 8), ZeroPPConfig(), 1, n).ranks.random_states for n in (2, 4)]
    states[0].seed(lambda rank: rank)
    with pytest.raises(KeyError, match=r"2\.cpu"):
        states[1].load_state_dict(states[0].state_dict())
