"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, written as those do from parameters of ours, are these again."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint import find_checkpoint, iterate_parameters, iterate_tensors, read_meta
from megatron_zpp.checkpoint.meta import Counters, saved_model
from megatron_zpp.commands.convert import export_megatron, import_megatron
from megatron_zpp.convert.megatron.config import args_of
from tests.convert.megatron.layouts import (
    CONFIGS,
    FORMATS,
    IDS,
    State,
    random_model,
    save,
    write_legacy,
    write_universal,
)
from tests.models.configs import gpt_config
from tests.ranks import run_ranks
from tests.training.small_run import flags, train_each, write_text


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a tool: exit code, stdout and stderr."""

    def run(tool, *argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, argv)])
        code = tool.main()
        return code, *capsys.readouterr()

    return run


def parameters(folder: Path) -> State:
    checkpoint = find_checkpoint(str(folder))
    assert checkpoint is not None
    return dict(iterate_parameters(checkpoint, read_meta(checkpoint)))


def assert_same(found: State, expected: State, rows: int | None = None) -> None:
    """To the bit. rows: those of the vocabulary that count; the others, which pad it, are zeros if there are any."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if rows is not None and ("word_embeddings" in name or "output_layer" in name):
            assert not found[name][rows:].any(), name
            tensor, found[name] = tensor[:rows], found[name][:rows]
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("layout", FORMATS)
def test_every_layout_is_the_same_model_again(call, tmp_path, model, layout):
    config, ours = CONFIGS[model], random_model(CONFIGS[model])
    FORMATS[layout](tmp_path / "theirs", ours, config)
    code, out, err = call(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours")
    assert (code, err) == (0, "")
    assert f"pretrain-{model} --load {tmp_path}/ours" in out
    assert ("--no-load-optim" in out) == (layout != "universal")
    assert_same(parameters(tmp_path / "ours"), ours, IDS if layout == "universal" else None)
    meta = read_meta(tmp_path / "ours" / "iter_0000005")
    assert saved_model(meta)[1] == config
    expected = Counters(iteration=5, consumed_train_samples=40, consumed_valid_samples=16, scheduled_samples=32)
    assert Counters.from_meta(meta) == expected


def test_moments_of_a_universal_checkpoint_are_kept(call, tmp_path):
    config, ours = CONFIGS["llama"], random_model(CONFIGS["llama"])
    moments = {kind: {n: x * factor for n, x in ours.items()} for kind, factor in (("exp_avg", 2), ("exp_avg_sq", 3))}
    write_universal(tmp_path / "theirs", ours, config, moments)
    call(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours")
    checkpoint = tmp_path / "ours" / "iter_0000005"
    saved = dict(iterate_tensors(checkpoint, read_meta(checkpoint), "optimizer."))
    for kind, expected in moments.items():
        assert_same({n.removesuffix(f".{kind}"): x for n, x in saved.items() if n.endswith(f".{kind}")}, expected, IDS)
    assert {float(x) for name, x in saved.items() if name.endswith(".step")} == {5.0}


@pytest.mark.parametrize("version", [0, 1.0])
def test_queries_keys_and_values_of_old_versions_are_put_in_order(call, tmp_path, version):
    config, ours = CONFIGS["gpt"], random_model(CONFIGS["gpt"])

    def of_old(x: torch.Tensor) -> torch.Tensor:
        """[heads * 3 * 8, …] of a rank -> all queries, keys, values; or the three of each channel in turn."""
        x = x.reshape(2, 3, 8, -1)
        return (x.permute(1, 0, 2, 3) if version == 0 else x.permute(0, 2, 1, 3)).reshape(48, -1).squeeze(-1)

    write_legacy(tmp_path / "theirs", ours, config, version, of_old)
    code, _, err = call(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours")
    assert (code, err) == (0, "")
    assert_same(parameters(tmp_path / "ours"), ours)


def test_what_is_exported_is_imported_as_the_same_bits(call, tmp_path):
    for model, config in CONFIGS.items():
        ours, folder = random_model(config), tmp_path / model
        FORMATS["legacy"](folder / "theirs", ours, config)
        call(import_megatron, "--input", folder / "theirs", "--save", folder / "ours")
        code, out, err = call(export_megatron, "--load", folder / "ours", "--output", folder / "exported")
        assert (code, err) == (0, "") and "iteration 5, 40 samples" in out
        code, _, err = call(import_megatron, "--input", folder / "exported", "--save", folder / "again")
        assert (code, err) == (0, "")
        assert_same(parameters(folder / "again"), ours)
        assert saved_model(read_meta(folder / "again" / "iter_0000005"))[1] == config


def test_a_gelu_that_megatron_does_not_have_is_not_exported():
    """Without biases Megatron's GELU is the exact one, whatever its flags say."""
    config = gpt_config(2, 32, 4, 64, 16, add_bias_linear=False)
    with pytest.raises(ValueError, match="GELU without biases"):
        args_of(config, 16)
    assert not args_of(dataclasses.replace(config, exact_gelu=True), 16).bias_gelu_fusion


@pytest.mark.long
def test_a_run_goes_on_as_if_it_had_never_been_elsewhere(call, tmp_path):
    """Its checkpoint becomes DeepSpeed's universal one, is imported, and gives the losses of the run that went on."""
    data = write_text(tmp_path)
    shape = "--num-layers 4 --ffn-hidden-size 128 --tokenizer-type NullTokenizer --vocab-size 256"
    run = f"{shape} --make-vocab-size-divisible-by 1 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
    argv = flags(data, run, f"--save {tmp_path}/run --save-interval 5")
    losses = run_ranks(1, train_each, {"": argv})[0][""]["lm loss"]
    checkpoint = tmp_path / "run" / "iter_0000005"
    meta = read_meta(checkpoint)
    saved = dict(iterate_tensors(checkpoint, meta, "optimizer."))
    moments = {
        kind: {n.removesuffix(f".{kind}"): x for n, x in saved.items() if n.endswith(f".{kind}")}
        for kind in ("exp_avg", "exp_avg_sq")
    }
    _, config = saved_model(meta)
    model = dict(iterate_parameters(checkpoint, meta))
    write_universal(tmp_path / "theirs", model, config, moments, make_vocab_size_divisible_by=1, scheduled_samples=40)
    code, _, err = call(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours")
    assert (code, err) == (0, "")
    resumed = run_ranks(1, train_each, {"": flags(data, run, f"--load {tmp_path}/ours")})[0][""]["lm loss"]
    assert resumed == losses[5:]


# What is refused: one line each


def remove(folder: Path) -> None:
    (folder / "iter_0000005/mp_rank_01_001/model_optim_rng.pt").unlink()


def edit(folder: Path, change) -> None:
    """Change what the first rank's file holds."""
    file = folder / "iter_0000005/mp_rank_00_000/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    change(state)
    save(file, state)


def narrow(state) -> None:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    state["model0"][name] = state["model0"][name][:, 1:].clone()


def shorten(folder: Path) -> None:
    file = folder / "iter_0000005/mp_rank_00_000/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:1000])


WRONG = {
    "a missing shard": (remove, "is not complete: mp_rank_01_001/model_optim_rng.pt missing, of 4 files"),
    "ranks that make up no tensor": (
        lambda folder: edit(folder, narrow),
        "decoder.layers.0.mlp.linear_fc2.weight is [32, 127], where its flags make it [32, 128]",
    ),
    "more ranks than files": (
        lambda folder: edit(folder, lambda state: vars(state["args"]).update(tensor_model_parallel_size=3)),
        "mp_rank_02_000/model_optim_rng.pt",
    ),
    "an option that we do not have": (
        lambda folder: edit(folder, lambda state: vars(state["args"]).update(squared_relu=True)),
        "squared_relu is True",
    ),
    "an option that nobody here knows": (
        lambda folder: edit(folder, lambda state: vars(state["args"]).update(logit_softcap=30.0)),
        "logit_softcap is 30.0, which is not known here",
    ),
    "a router that we do not have": (
        lambda folder: edit(
            folder, lambda s: vars(s["args"]).update(num_experts=4, moe_router_load_balancing_type="sinkhorn")
        ),
        "moe_router_load_balancing_type is 'sinkhorn'",
    ),
    "a choice of dropped tokens that we do not have": (
        lambda folder: edit(folder, lambda s: vars(s["args"]).update(num_experts=4, moe_token_drop_policy="position")),
        "moe_token_drop_policy is 'position'",
    ),
    "layers of a hybrid": (
        lambda folder: edit(
            folder, lambda s: vars(s["args"]).update(hybrid_override_pattern="M*-", mamba_state_dim=128)
        ),
        "hybrid_override_pattern is 'M*-'",
    ),
    "linear attention": (
        lambda folder: edit(folder, lambda s: vars(s["args"]).update(linear_attention_freq=4)),
        "linear_attention_freq is 4",
    ),
    "layers that differ": (
        lambda folder: edit(folder, lambda s: vars(s["args"]).update(heterogeneous_layers_config_encoded_json="{}")),
        "heterogeneous_layers_config_encoded_json is '{}'",
    ),
    "positions that we do not have": (
        lambda folder: edit(folder, lambda state: vars(state["args"]).update(position_embedding_type="alibi")),
        "position_embedding_type is 'alibi'",
    ),
    "a size that is none": (
        lambda folder: edit(folder, lambda state: vars(state["args"]).update(hidden_size="32")),
        "hidden_size is '32', not a size",
    ),
    "a width that is none": (
        lambda folder: edit(folder, lambda state: vars(state["args"]).update(ffn_hidden_size=-1)),
        "ffn_hidden_size is -1",
    ),
    "another shape than the flags say": (
        lambda folder: edit(folder, lambda state: vars(state["args"]).update(num_layers=5)),
        "it lacks decoder.layers.4.",
    ),
    "a tensor too many": (
        lambda folder: edit(folder, lambda state: state["model0"].update({"adapter.weight": torch.zeros(1)})),
        "adapter.weight",
    ),
    "NaN": (
        lambda folder: edit(folder, lambda state: state["model0"]["embedding.word_embeddings.weight"].fill_(torch.nan)),
        "has NaN or Inf",
    ),
    "no flags": (lambda folder: edit(folder, lambda state: state.pop("args")), "does not hold the flags of its run"),
    "counters that are none": (
        lambda folder: edit(folder, lambda state: state.update(iteration="7")),
        "its iteration is '7'",
    ),
    "a damaged file": (shorten, "is damaged"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line(call, tmp_path, what):
    change, expected = WRONG[what]
    FORMATS["torch"](tmp_path / "theirs", random_model(CONFIGS["gpt"]), CONFIGS["gpt"])
    change(tmp_path / "theirs")
    code, _, err = call(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours")
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert expected in err
    assert not (tmp_path / "ours").exists()


def test_folders_without_a_checkpoint_are_one_line(call, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, expected in {"absent": "is not a folder", "empty": "holds no checkpoint of Megatron-LM"}.items():
        code, _, err = call(import_megatron, "--input", tmp_path / folder, "--save", tmp_path / "ours")
        assert code == 1 and err.count("\n") == 1 and expected in err


def test_a_checkpoint_of_zero_3_is_named(call, tmp_path):
    save(tmp_path / "global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt", {})
    (tmp_path / "latest").write_text("global_step5")
    code, _, err = call(import_megatron, "--input", tmp_path, "--save", tmp_path / "ours")
    assert code == 1 and "divided by ZeRO-3" in err and "ds_to_universal.py" in err


def test_a_tokenizer_that_is_not_here_is_asked_for(call, tmp_path):
    config = CONFIGS["gpt"]
    gone = dict(tokenizer_type="GPT2BPETokenizer", vocab_file="/nowhere/vocab.json", merge_file="/nowhere/merges.txt")
    write_universal(tmp_path / "theirs", random_model(config), config, **gone)
    code, _, err = call(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours")
    assert code == 1 and "/nowhere/vocab.json, is not opened" in err and "--tokenizer-type" in err
    given = ["--tokenizer-type", "NullTokenizer", "--vocab-size", IDS - 1]
    code, _, err = call(import_megatron, "--input", tmp_path / "theirs", "--save", tmp_path / "ours", *given)
    assert (code, err) == (0, "")
