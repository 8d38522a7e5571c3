"""Models of megatron-core itself: imported, gone on with, and exported to it again."""

import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import find_checkpoint, iterate_parameters, read_meta
from megatron_zpp.checkpoint.meta import saved_model
from megatron_zpp.commands.convert import export_megatron, import_megatron
from megatron_zpp.data.text.description import describe_tokenizer
from megatron_zpp.families import find_architecture
from megatron_zpp.training.data import build_data, find_tokenizer
from tests.ranks import run_ranks
from tests.training.small_run import train_each

pytestmark = pytest.mark.long
evidence = pytest.mark.evidence
RUN = """--seq-length 32 --micro-batch-size 4 --global-batch-size 4 --train-iters 6 --lr 1e-2 --lr-decay-style constant
    --clip-grad 0 --weight-decay 0 --eval-iters 0 --split 1,0,0 --num-workers 0 --log-interval 1"""
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]
TOKENS = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))


def train_and_save(folder: Path, name: str, data: str) -> tuple[Tensor, list[float]]:
    """Train megatron-core's model for 3 steps, save it in both formats, and train it for 3 more.

    Returns its logits for TOKENS where it was saved, and the losses after that. For ``run_ranks``.
    """
    from tests.convert.megatron import mcore

    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1"
    settings = parse_settings(find_architecture("gpt"), [*f"{shape} {RUN} --data-path {data}".split(), *NULL])
    tokenizer = find_tokenizer(settings.tokenizer)
    datasets = build_data(settings, tokenizer, describe_tokenizer("NullTokenizer", tokenizer), (24, 0, 0))
    assert datasets.train is not None
    samples = torch.stack([torch.from_numpy(datasets.train[i]) for i in range(24)])
    args = mcore.args_of(name)
    model = mcore.build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    batches = list(samples.split(4))
    mcore.train(model, optimizer, batches[:3])
    mcore.save_torch_dist(folder / "torch_dist", model, args, optimizer)
    mcore.save_torch(folder / "torch", model, args)
    with torch.no_grad():
        logits = mcore.logits(model, TOKENS)
    return logits, mcore.train(model, optimizer, batches[3:])


def save_on_ranks(folder: Path, name: str, formats: tuple[str, ...], **sizes: int) -> Tensor:
    """Save megatron-core's model on parallel ranks; return its logits. For ``run_ranks``."""
    from tests.convert.megatron import mcore

    args = mcore.args_of(name, **sizes)
    model = mcore.build(args)
    for kind in formats:
        {"torch_dist": mcore.save_torch_dist, "torch": mcore.save_torch}[kind](folder / kind, model, args)
    with torch.no_grad():
        return mcore.logits(model, TOKENS)


def load_on_ranks(folder: Path, name: str, **sizes: int) -> Tensor:
    """Return megatron-core's logits with exported weights; TP 2 pads its vocabulary by 8 rows. For ``run_ranks``."""
    from tests.convert.megatron import mcore

    model = mcore.load_torch_dist(folder, mcore.args_of(name, **sizes))
    with torch.no_grad():
        return mcore.logits(model, TOKENS)


def import_(theirs: Path, ours: Path) -> list[str]:
    """Import; return the words of the command that goes on."""
    said = import_megatron.import_(import_megatron.parse_arguments(["--input", str(theirs), "--save", str(ours)]))
    return shlex.split(said.splitlines()[1])


def our_logits(folder: Path) -> Tensor:
    checkpoint = find_checkpoint(str(folder))
    assert checkpoint is not None
    meta = read_meta(checkpoint)
    architecture, config = saved_model(meta)
    model = architecture.module(config)
    model.load_state_dict(dict(iterate_parameters(checkpoint, meta)))
    with torch.no_grad():
        return model.eval()(TOKENS)


@pytest.mark.parametrize("name", ["gpt", pytest.param("gpt-exact", marks=evidence), "llama"])
def test_a_run_of_megatron_core_goes_on(data, tmp_path, name):
    ((expected, losses),) = run_ranks(1, train_and_save, tmp_path, name, data, timeout=400)
    for layout in ("torch", "torch_dist"):
        command = import_(tmp_path / layout, tmp_path / "ours" / layout)
        logits = our_logits(tmp_path / "ours" / layout)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert command[1] == f"pretrain-{name.partition('-')[0]}" and "--no-load-optim" not in command
    argv = [*command[2:], *RUN.split(), "--data-path", data]
    resumed = run_ranks(1, train_each, {"": argv}, name.partition("-")[0], timeout=400)[0][""]["lm loss"]
    assert resumed == pytest.approx(losses, rel=0, abs=1e-4)


def parameters_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = find_checkpoint(str(folder))
    assert checkpoint is not None
    return dict(iterate_parameters(checkpoint, read_meta(checkpoint)))


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=evidence), "llama"])
def test_tensor_parallel_ranks_of_megatron_core_there_and_back(tmp_path, name):
    expected, _ = run_ranks(2, partial(save_on_ranks, tp=2), tmp_path, name, ("torch", "torch_dist"), timeout=400)
    assert expected.shape[-1] == 272  # padded for two ranks
    for layout in ("torch", "torch_dist"):
        import_(tmp_path / layout, tmp_path / "ours" / layout)
        logits = our_logits(tmp_path / "ours" / layout)
        assert logits.shape[-1] == 264
        torch.testing.assert_close(logits, expected[..., :264], rtol=0, atol=1e-5)
    argv = ["--load", str(tmp_path / "ours" / "torch"), "--output", str(tmp_path / "exported")]
    export_megatron.export(export_megatron.parse_arguments(argv))
    for loaded in run_ranks(2, partial(load_on_ranks, tp=2), tmp_path / "exported", name, timeout=400):
        torch.testing.assert_close(loaded[..., :264], expected[..., :264], rtol=0, atol=1e-5)


STAGES, TENSORS = dict(pp=2, ep=2), dict(tp=2, ep=2)


@pytest.mark.parametrize(
    ("name", "saved_on", "loaded_on"),
    [("deepseek", STAGES, TENSORS), pytest.param("gpt-oss", TENSORS, STAGES, marks=evidence)],
)
def test_pipeline_and_expert_parallel_ranks_of_megatron_core_there_and_back(tmp_path, name, saved_on, loaded_on):
    """Latent attention and experts in some layers; sinks, windows and experts with biases in all."""
    save = partial(save_on_ranks, **saved_on)
    expected = run_ranks(4, save, tmp_path, name, ("torch_dist",), timeout=400)[-1][..., :264]
    command = import_(tmp_path / "torch_dist", tmp_path / "ours")
    assert ("--moe-router-enable-expert-bias" in command) == (name == "deepseek")
    torch.testing.assert_close(our_logits(tmp_path / "ours"), expected, rtol=0, atol=1e-5)
    argv = ["--load", str(tmp_path / "ours"), "--output", str(tmp_path / "exported")]
    export_megatron.export(export_megatron.parse_arguments(argv))
    load = partial(load_on_ranks, **loaded_on)
    loaded = run_ranks(4, load, tmp_path / "exported", name, timeout=400)[-1][..., :264]
    torch.testing.assert_close(loaded, expected, rtol=0, atol=1e-5)
    if name == "deepseek":  # biases of experts are fp32 in any run: 16 bits would change the choice
        argv = ["--load", str(tmp_path / "ours"), "--output", str(tmp_path / "short"), "--dtype", "bfloat16"]
        export_megatron.export(export_megatron.parse_arguments(argv))
        import_(tmp_path / "short", tmp_path / "again")
        first, again = (parameters_of(tmp_path / folder) for folder in ("ours", "again"))
        for parameter, tensor in first.items():
            kept = tensor if parameter.endswith("expert_bias") else tensor.bfloat16().float()
            assert torch.equal(again[parameter], kept), parameter
        assert any(not torch.equal(again[parameter], tensor) for parameter, tensor in first.items())
