"""Supervised fine-tuning: loss and gradients of packed chats on several ranks equal each chat's alone."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.chat_dataset import CHAT_BEGINS, HAS_LOSS, ID
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.families import find_architecture
from megatron_zpp.models.init import init_weights
from tests.data.test_chats import write_chats
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, call_pretrain, flags, train_each

STEPS, BATCH = 4, 8
SFT = f"--sft --split 1,0,0 --eval-iters 0 --weight-decay 0.1 {NO_DROPOUT}"


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> str:
    """The prefix of 60 chats of one or two turns, some longer than a sample, with answers of 1 to 20 bytes."""
    random = np.random.default_rng(0)

    def chat() -> list[tuple[list[int], int]]:
        sizes = [int(random.integers(1, longest)) for longest in (12, 20) * int(random.integers(1, 3))]
        return [(random.integers(256, size=size).tolist(), i % 2) for i, size in enumerate(sizes)]

    return write_chats(tmp_path_factory.mktemp("chats") / "chats", [chat() for _ in range(60)])


def train_alone(prefix: str, architecture: str) -> list[float]:
    """The loss of each of STEPS steps, each chat by itself, averaged over all tokens of the step's answers."""
    settings = parse_settings(find_architecture(architecture), flags(prefix, SFT))
    model = find_architecture(architecture).build_model(settings.model, 257).to_empty(device="cpu")
    init_weights(model, seed=1234)
    options = SampleOptions(seq_length=32, seed=1234, sft=True)
    dataset = build_datasets(options, data_path=[prefix], split="1", num_samples=(STEPS * BATCH, 0, 0)).train
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)])
    losses = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for sample in (torch.from_numpy(dataset[i]) for i in range(step * BATCH, (step + 1) * BATCH)):
            begins = torch.nonzero(sample & CHAT_BEGINS).flatten().tolist()
            for first, last in zip(begins, [*begins[1:], len(sample)], strict=True):
                ids, has_loss = sample[first:last] & ID, sample[first:last] & HAS_LOSS > 0
                each = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
                total = total + each[has_loss[1:]].sum()
                count += int(has_loss[1:].sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses


@pytest.mark.parametrize(
    ("architecture", "ranks", "layouts"),
    [
        ("gpt", 1, {"one rank": "", "a batch at once": f"--micro-batch-size {BATCH}"}),
        (
            "llama",
            4,
            {
                "2 x 2": "--zero-hpz-partition-size 2 --zeropp-ranks-per-node 2",
                "cp 2": "--context-parallel-size 2",
            },
        ),
        pytest.param(
            "llama",
            4,
            {
                "pp 2": "--pipeline-model-parallel-size 2 --micro-batch-size 2",
                "tp 2": "--tensor-model-parallel-size 2 --sequence-parallel",
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_uneven_answers_on_several_ranks_train_like_each_chat_alone(chats, architecture, ranks, layouts):
    losses = train_alone(chats, architecture)
    runs = {name: flags(chats, SFT, layout, length=f"--train-iters {STEPS}") for name, layout in layouts.items()}
    for metrics in run_ranks(ranks, train_each, runs, architecture):
        for name, run in metrics.items():
            assert run["lm loss"] == pytest.approx(losses, rel=1e-5), name


def test_a_run_resumes_and_prints_how_chats_fill_samples(chats, tmp_path):
    argv = flags(chats, SFT, f"--save {tmp_path} --save-interval 2 --log-interval 1", length="--train-iters 4")
    ((whole, out, err), (resumed, out_again, _)) = run_ranks(
        1, call_pretrain, [*argv, "--exit-interval", "4"], [*argv, "--load", str(tmp_path), "--ckpt-step", "2"]
    )[0]
    assert (whole, resumed) == (0, 0), err
    assert f"  train: 60 chats of {chats} in " in out and " chats are longer than --seq-length 32 and lose" in out
    losses = [line.split("| lm loss: ")[1].split(" |")[0] for line in out.splitlines() if "| lm loss: " in line]
    again = [line.split("| lm loss: ")[1].split(" |")[0] for line in out_again.splitlines() if "| lm loss: " in line]
    assert len(losses) == 4 and again == losses[2:]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--eod-mask-loss", "--eod-mask-loss does not go with --sft"),
        ("--curriculum-min-length 8 --curriculum-iters 3", "--reset-attention-mask and --sft count whole samples"),
        ("--sft-tokenizer-prompt-format identity", "tools/preprocess_data.py writes chats"),
    ],
)
def test_what_does_not_go_with_chats_is_refused(chats, more, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(find_architecture("gpt"), flags(chats, "--sft", more))


def test_a_step_without_a_token_to_learn_is_said_once(tmp_path):
    """Documents that are ends of documents alone, after which nothing is predicted."""
    with IndexedDatasetWriter(tmp_path / "ends", "<u2") as writer:
        for _ in range(400):
            writer.add_document([[256]])
    argv = flags(str(tmp_path / "ends"), "--eod-mask-loss --split 1,1 --seq-length 8", length="--train-iters 3")
    (((code, out, _),),) = run_ranks(1, call_pretrain, argv)
    assert code == 0
    said = [line for line in out.splitlines() if "has a loss, which is shown as 0" in line]
    assert [line.split(" has a loss")[0] for line in said] == [
        "WARNING: no token of iteration 1",
        "WARNING: no token of this evaluation",
    ]
