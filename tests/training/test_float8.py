"""``--fp8-format``: float8 products by torchao, emulated on CPUs, of weights that ZeRO++ sends in low bits."""

import sys

import pytest
import torch
from torch import nn

from megatron_zpp.checkpoint import iterate_parameters, read_meta
from megatron_zpp.checkpoint.resume import find_checkpoint
from megatron_zpp.commands.convert import export_hf
from megatron_zpp.commands.generate_text import load_model
from megatron_zpp.integrations.float8 import check_float8, convert_to_float8, describe_float8
from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.moe import MoEConfig
from tests.models.configs import llama_config
from tests.parallel.layouts import results_on
from tests.ranks import run_ranks
from tests.training.small_run import call_pretrain, flags

INT8 = "--bf16 --zeropp int8 --zeropp-ranks-per-node 1"
FLOAT8 = f"{INT8} --fp8-format hybrid"


@pytest.mark.long
def test_trains_resumes_to_the_bit_and_exports(data, tmp_path):
    saved = str(tmp_path / "saved")
    runs = {
        "bf16": INT8,
        "float8": f"{FLOAT8} --save {saved} --save-interval 2",
        "resumed": f"{FLOAT8} --load {saved} --ckpt-step 2",
        "recomputed": f"{FLOAT8} --recompute-activations",
        "rows": f"{INT8} --fp8-format e4m3 --load {saved} --ckpt-step 2",
        "TP, bf16": "--bf16 --tensor-model-parallel-size 2",
        "TP, float8": "--bf16 --tensor-model-parallel-size 2 --fp8-format hybrid",
    }
    shape = "--ffn-hidden-size 64 --train-iters 4"
    results = results_on(2, {name: ("llama", flags(data, shape, words)) for name, words in runs.items()})
    losses = {name: metrics["lm loss"] for name, (metrics, _, _) in results.items()}
    for name in ("resumed", "recomputed"):
        assert losses[name] == losses["float8"][-len(losses[name]) :]
        for key, parameter in results["float8"][1].items():
            assert torch.equal(parameter, results[name][1][key]), (name, key)
    for name, of_bf16 in ("float8", "bf16"), ("rows", "bf16"), ("TP, float8", "TP, bf16"):
        expected = losses[of_bf16][-len(losses[name]) :]
        assert losses[name] == pytest.approx(expected, rel=5e-3) and losses[name] != expected
    assert "fp8_format hybrid there, e4m3 here; fp8_recipe tensorwise there, rowwise here" in results["rows"][2]

    checkpoint = find_checkpoint(saved, 4)
    meta = read_meta(checkpoint)
    parameters = dict(iterate_parameters(checkpoint, meta))
    assert parameters.keys() == results["bf16"][1].keys()
    for key, parameter in results["float8"][1].items():
        assert parameters[key].dtype == torch.float32 and torch.equal(parameters[key], parameter)
    model = load_model(checkpoint, meta, torch.device("cpu"))
    assert not any(type(module).__name__ == "Float8Linear" for module in model.modules())
    export_hf.export(export_hf.parse_arguments(["--load", saved, "--output", str(tmp_path / "hf")]))
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_what_becomes_float8():
    experts = MoEConfig(4, 32, shared_expert_size=40)
    config = llama_config(2, 32, 4, 64, ffn_hidden_size=64, moe=experts, moe_layer_freq="[0,1]")
    with torch.device("meta"):
        model = Decoder(config)
    names = list(dict(model.named_parameters()))
    convert_to_float8(model.layers, "tensorwise", emulate=True)
    assert names == list(dict(model.named_parameters()))
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    attention = {f"layers.{i}.self_attention.linear_{part}" for i in (0, 1) for part in ("qkv", "proj")}
    assert converted == attention | {f"layers.0.mlp.linear_{part}" for part in ("fc1_gate", "fc1_up", "fc2")}
    said = describe_float8(model.layers, "tensorwise", emulate=True)
    assert said.startswith("7 of 11 linear layers in this rank's blocks") and "slower" in said
    with pytest.raises(ValueError, match="finds no linear layer"):
        convert_to_float8([nn.Linear(16, 24), model.layers[1].mlp.router], "rowwise", emulate=True)


def _without_torchao(argv):
    sys.modules["torchao"] = None
    return call_pretrain(argv)


def test_refused_without_torchao_and_on_old_gpus(data, monkeypatch):
    for code, _, err in (rank[0] for rank in run_ranks(1, _without_torchao, flags(data, FLOAT8))):
        assert code == 2 and err.count("error: ") == 1
        assert "--fp8-format needs the package torchao: pip install torchao, or megatron_zpp's extra fp8" in err
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"capability 8.9 .* and A100 has 8.0"):
        check_float8(torch.device("cuda"))
