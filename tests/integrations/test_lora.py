"""Adapters that the trainer trains beside a Hugging Face model's weights, and PEFT's folder of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_zpp.checkpoint import find_checkpoint, iterate_parameters, read_meta
from megatron_zpp.commands import generate_text
from megatron_zpp.commands.convert import export_hf, export_peft
from tests.commands.test_import_hf import import_, save_theirs
from tests.models.configs import llama_config
from tests.ranks import run_ranks
from tests.tools import call_well, call_wrongly
from tests.training.small_run import train_each, write_text

pytestmark = pytest.mark.integrations

TOKENS = torch.arange(48).view(2, 24)
ZEROPP = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-frozen-dtype nf4"


def train(argv: list[str]) -> list[float]:
    """Train; return the losses."""
    return train_each({"": argv}, "llama")[""]["lm loss"]


@torch.no_grad()
def merged_logits(base: Path, adapters: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Return the logits of TOKENS of our model, with the adapters added to its weights."""
    model = generate_text.load_model(base, read_meta(base), torch.device("cpu"))
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A" in adapters:
            parameter += scale * adapters[f"{layer}.lora_B"] @ adapters[f"{layer}.lora_A"]
    return model(TOKENS)


def command_line(folder: Path, imported: str, *more: str) -> list[str]:
    words = imported.splitlines()[1].split()[2:]  # the flags that the import prints
    shape = [word for word in words if word not in ("--load", f"{folder}/ours", "--finetune")]
    run = f"""--seq-length 24 --micro-batch-size 2 --global-batch-size 8 --lr 2e-2 --log-interval 1 --eval-iters 0
        --data-path {write_text(folder)} --split 1,0,0 --num-workers 0 --train-iters 12
        --attention-dropout 0"""
    return [*shape, *run.split(), *more]


def test_adapters_learn_resume_and_are_pefts(tmp_path):
    from peft import PeftModel

    save_theirs(tmp_path / "theirs", llama_config(2, 32, 4, 257, num_query_groups=2))
    imported = import_(tmp_path, "--tokenizer-type", "ByteTokenizer")
    lora = f"--lora-rank 4 --lora-alpha 8 --pretrained-checkpoint {tmp_path}/ours"
    saves = f"--save {tmp_path}/run --save-interval 6"
    argv = command_line(tmp_path, imported, *f"{saves} {lora} {ZEROPP}".split())
    losses, *_ = run_ranks(4, train, argv)
    assert losses[-1] < losses[0] - 0.1

    checkpoint = find_checkpoint(str(tmp_path / "run"))
    adapters = dict(iterate_parameters(checkpoint, read_meta(checkpoint)))
    assert len(adapters) == 2 * 5 * 2 and all(".lora_" in name for name in adapters)  # 5 layers in each of 2 blocks
    for tool in (export_hf, generate_text):
        more = ("--output", tmp_path / "hf") if tool is export_hf else ("--prompt", "1")
        assert "adapters without their base" in call_wrongly(tool, "--load", tmp_path / "run", *more)

    again = ["--load", str(tmp_path / "run"), "--ckpt-step", "6"]
    resumed, *_ = run_ranks(4, train, [*argv, *again])
    assert resumed == losses[6:]

    call_well(export_peft, "--load", tmp_path / "run", "--output", tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    with torch.no_grad():
        plain = base(TOKENS).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "peft").eval()(TOKENS).logits
    assert (adapted - plain).abs().max() > 0.1
    logits = merged_logits(find_checkpoint(str(tmp_path / "ours")), adapters, scale=8 / 4)
    torch.testing.assert_close(logits, adapted, rtol=1e-4, atol=1e-4)
    assert len(load_file(tmp_path / "peft" / "adapter_model.safetensors")) == 2 * 7 * len(base.model.layers)
