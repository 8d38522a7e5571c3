"""More bits in the first steps: which step gets which, what counts as a step, and that a resume changes neither."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from tests.ranks import run_in_turn
from tests.zeropp import training_on_ranks
from tests.zeropp.training_on_ranks import resumes_exactly, shard

NODES, RANKS_PER_NODE, ROWS, COLUMNS, BLOCK = 2, 2, 64, 32, 32
GRADIENTS = dict(quantized_gradients=True, gradient_bits=2, gradient_block_size=BLOCK, loco=LoCoConfig())
WARMUP = dict(gradient_bits_warmup="2:4")


def config_of(**options) -> ZeroPPConfig:
    return ZeroPPConfig(**(dict(hpz_partition_size=RANKS_PER_NODE, **GRADIENTS) | WARMUP | options))


@pytest.mark.parametrize(
    "options, message",
    [
        *(
            (dict(gradient_bits_warmup=text), f"gradient_bits_warmup must be STEPS:BITS, such as 500:4, got '{text}'")
            for text in ("", "4", "0:4", "-1:4", "10:", "10:4:2", "1.5:4", "10:four", " 10:4")
        ),
        (dict(gradient_bits_warmup="10:7"), "gradient_bits_warmup 10:7 must have bits of"),
        (dict(gradient_bits_warmup="10:2"), "and more than gradient_bits 2"),
        (dict(quantized_gradients=False, loco=None), "gradient_bits_warmup requires quantized_gradients"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ValueError) as caught:
        config_of(**options)
    assert message in str(caught.value)


def model_and_zeropp(config: ZeroPPConfig):
    torch.manual_seed(1)
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    return model, shard(model, config)


def backward(model, zeropp, step: int, num_micro_batches: int = 1):
    """One step's gradients, which depend on the rank, the step and the weights that arrived."""

    def loss_of(step: int, i: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * i + rank)
        return model(torch.randn(8, COLUMNS, generator=generator)).square().mean()

    training_on_ranks.backward(zeropp, loss_of, step, num_micro_batches)


NUMEL = ROWS * COLUMNS // (NODES * RANKS_PER_NODE)  # elements in a rank's shard
WEIGHTS = (NODES - 1) * 4 * NUMEL


def nbytes(bits: int) -> int:
    """Bytes of gradients that a rank sends to the other node: a code for each element and a scale for each block."""
    return (NODES - 1) * (NUMEL * bits // 8 + 4 * NUMEL // BLOCK)


def _bytes_until_quantization_stops():
    """Bytes between nodes of four steps that are quantized in the first two."""
    model, zeropp = model_and_zeropp(config_of(gradient_bits=None, loco=None))
    sent = []
    for step in range(4):
        train(model, zeropp, [step])
        sent.append(zeropp.traffic.take().inter_node)
    return sent


def _bytes_by_step():
    """Bytes between nodes of four steps, with what is no optimizer step before the second; what is said and kept."""
    model, zeropp = model_and_zeropp(config_of())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05), torch.optim.SGD(model.parameters(), lr=0.05)]
    sent = []
    for step in range(4):
        if step == 1:
            with torch.no_grad():
                model(torch.ones(1, COLUMNS))
            for skipped in (70, 71):
                backward(model, zeropp, skipped)
                model.zero_grad()
                zeropp.undo_step()
            zeropp.traffic.take()
        backward(model, zeropp, step, num_micro_batches=2)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        weights = WEIGHTS
        if step == 1:  # the evaluation has sent what step 0 moved, and no undone step moved anything: ranks only look
            weights = 6 if dist.get_rank() % RANKS_PER_NODE == RANKS_PER_NODE - 1 else 0
        sent.append(zeropp.traffic.take().inter_node - weights)
    return sent, zeropp.describe(), next(v for key, v in zeropp.state_dict().items() if "optimizer_steps" in key)


def test_bytes_of_each_step_are_those_of_its_bits(found):
    """Gradients of steps 0 and 1 in 4 bits; weights in full, once."""
    for sent, description, steps in found["bytes"]:
        assert sent == [nbytes(bits) for bits in (4, 4, 2, 2)]
        assert "int2 (mean, int4 in the first 2 steps) with LoCo" in description and steps == 4


def test_quantization_may_stop_in_the_middle_of_a_run(found):
    unquantized = WEIGHTS  # in fp32, as weights are sent
    for sent in found["bytes until it stops"]:
        assert sent == [WEIGHTS + each for each in (nbytes(4), nbytes(4), unquantized, unquantized)]


def train(model, zeropp, steps, skipped: int | None = None):
    """SGD over these steps; before the one with the number ``skipped`` another one is skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        if step == skipped:
            backward(model, zeropp, 70)
            model.zero_grad()
            zeropp.undo_step()
        backward(model, zeropp, step)
        optimizer.step()
        model.zero_grad()


def _resumes_exactly(save_at: int, skipped: int | None) -> bool:
    """Whether training resumes after ``save_at`` steps; before the step ``skipped`` another one is skipped."""

    def build():
        model, zeropp = model_and_zeropp(config_of())
        return model, zeropp, torch.optim.SGD(model.parameters(), lr=0.05)

    def train_part(model, zeropp, optimizer, part):
        train(model, zeropp, range(save_at, 4) if part else range(save_at), skipped)

    return resumes_exactly(build, train_part)


RESUMES = [(1, None), (2, None), (2, 1), (3, 3)]  # gradients switch after 2 steps


def test_a_resume_before_at_and_after_a_switch_is_exact(found):
    assert all(all(found[f"resume {case}"]) for case in RESUMES)


def _continued(options_of_saved, told: int | None = None, has_number: bool = True):
    """Bytes of the steps after 4 others were taken, saved with other settings, and loaded."""
    model, zeropp = model_and_zeropp(config_of(**options_of_saved))
    train(model, zeropp, range(4))
    state = {key: value for key, value in zeropp.state_dict().items() if has_number or "optimizer_steps" not in key}
    again, zeropp = model_and_zeropp(config_of(gradient_bits_warmup="5:4"))
    again.load_state_dict(model.state_dict())
    zeropp.load_state_dict(state)
    if told is not None:
        zeropp.set_optimizer_steps(told)
    sent = []
    for step in range(4, 6):
        train(again, zeropp, [step])
        sent.append(zeropp.traffic.take().inter_node - WEIGHTS)
    return sent


def _all_continued():
    none = dict.fromkeys(WARMUP)
    return _continued({}), _continued(none), _continued(none, told=4, has_number=False)


def test_another_warmup_takes_over_the_state_and_its_number_of_steps(found):
    for same, none, told in found["continued"]:
        assert same == none == told == [nbytes(4), nbytes(2)]


@pytest.fixture(scope="module")
def found():
    resumes = {f"resume {case}": partial(_resumes_exactly, *case) for case in RESUMES}
    bytes_sent = {"bytes": _bytes_by_step, "bytes until it stops": _bytes_until_quantization_stops}
    return run_in_turn(4, bytes_sent | {"continued": _all_continued} | resumes)
