"""What flags, checkpoints and Megatron-LM say of a decoder's shape."""

import dataclasses
import json

import pytest

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.meta import saved_model
from megatron_zpp.convert.megatron import config as megatron_config
from megatron_zpp.convert.megatron.config import args_of
from megatron_zpp.families import find_architecture
from megatron_zpp.families.decoder_only import EXPERT_FLAGS, FLAGS
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import MoEConfig
from megatron_zpp.settings.flags import flat_values
from megatron_zpp.settings.groups import ModelSettings
from tests.arguments.parsing import assert_words, parse, refusal

GPT, LLAMA = find_architecture("gpt"), find_architecture("llama")


def meta(name: str, config: dict) -> dict:
    return {"settings": {"architecture": name}, "model_config": config}


@pytest.mark.parametrize(
    "change",
    [{"normalization": "none"}, {"window_size": 0}, {"swiglu": 1}, {"experts": 4}, {"moe": {"num_experts": 0}}],
)
def test_shapes_that_are_none_are_refused(change):
    with pytest.raises(CheckpointError, match=f"not one of llama .*{next(iter(change))}"):
        saved_model(meta("llama", dataclasses.asdict(config_of("")) | change))


EXPERTS = (
    "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 96 --moe-layer-freq 2 --moe-router-pre-softmax "
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-expert-capacity-factor 1.5 "
    "--moe-shared-expert-intermediate-size 48 --moe-router-topk-scaling-factor 2.5"
)
RUN = (
    "--num-layers 5 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 1 "
    "--lr 1 --mock-data --vocab-size 9 "
)


def config_of(argv: str) -> DecoderConfig:
    return LLAMA.build_config(parse(RUN + argv, LLAMA, 1)[0].model, 512)


def test_experts_come_through_flags_and_checkpoints():
    config = config_of(EXPERTS)
    assert config.moe == MoEConfig(
        *(8, 96), router_topk=3, router_pre_softmax=True, topk_scaling_factor=2.5, aux_loss_coeff=0.01,
        z_loss_coeff=0.001, expert_capacity_factor=1.5, shared_expert_size=48,
    )  # fmt: skip
    assert LLAMA.flags is not None
    assert config_of(" ".join(LLAMA.flags(config, 32))) == config
    assert saved_model(meta("llama", json.loads(json.dumps(dataclasses.asdict(config))))) == (LLAMA, config)


@pytest.mark.parametrize(("config_class", "flags"), [(DecoderConfig, FLAGS), (MoEConfig, EXPERT_FLAGS)])
def test_flags_have_the_defaults_of_their_fields(config_class, flags):
    # ``flags_for`` leaves out what is the default. None is completed by ``resolve``.
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    defaults = {name: flat_values(ModelSettings())[flag] for name, flag in flags.items()}
    assert {name: value for name, value in defaults.items() if value not in (None, fields[name])} == {}


def test_megatron_is_not_given_a_field_that_it_has_no_flag_for(monkeypatch):
    assert args_of(DecoderConfig(1, 8, 1, 8, 8, qk_layernorm=True), 8).qk_layernorm
    monkeypatch.setattr(megatron_config, "READ", megatron_config.READ - {"qk_layernorm"})
    assert not hasattr(args_of(DecoderConfig(1, 8, 1, 8, 8), 8), "qk_layernorm")
    with pytest.raises(ValueError, match="Megatron-LM does not have qk_layernorm True"):
        args_of(DecoderConfig(1, 8, 1, 8, 8, qk_layernorm=True), 8)


@dataclasses.dataclass(frozen=True)
class OfTomorrow(DecoderConfig):
    """A decoder with a part that no exporter knows."""

    value_norm: bool = dataclasses.field(default=False, kw_only=True)


def test_a_new_part_of_the_decoder_is_not_left_out_of_an_export_in_silence():
    exporters = {mapping.model_type: mapping.to_config for mapping in GPT.huggingface}
    for name, export in (exporters | {"Megatron-LM": args_of}).items():
        for value in (False, True):
            config = OfTomorrow(1, 8, 1, 8, 8, value_norm=value)
            try:
                export(config, 8)
                assert not value, name
            except ValueError as error:  # other families have other parts
                assert ("value_norm True" in str(error)) == value, name


def test_operations_of_experts_by_hand():
    config = config_of(EXPERTS)
    dense = dataclasses.replace(config, moe=None)
    # 3 of 5 blocks: in place of a SwiGLU the router, 3 experts and the shared one.
    more = 3 * (64 * 8 + 3 * 64 * (3 * 96 + 48 - dense.ffn_size))
    assert LLAMA.flops_per_token(config, 32) - LLAMA.flops_per_token(dense, 32) == 6 * more
    all_experts = 3 * (64 * 8 + 3 * 64 * (8 * 96 + 48 - dense.ffn_size))
    assert LLAMA.num_parameters(config) - LLAMA.num_parameters(dense) == all_experts


@pytest.mark.parametrize(
    ("world_size", "flags", "words"),
    [
        (1, "--num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 more than --num-experts 2"),
        (1, "--num-experts 4 --moe-layer-freq 6", "--moe-layer-freq 6 more than --num-layers 5; give at most that"),
        (1, "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none", "exclude each other"),
        (1, "--num-experts 4 --moe-residual --moe-shared-expert-gate --moe-shared-expert-intermediate-size 32",
         "both weigh the shared expert"),
        (1, "--num-experts 4 --moe-router-num-groups 2 --moe-router-load-balancing-type sinkhorn", "has no meaning"),
        (2, "--num-experts 4 --moe-shared-expert-intermediate-size 33 --tensor-model-parallel-size 2",
         "does not divide --moe-shared-expert-intermediate-size 33"),
        (1, "--multi-latent-attention --rotary-percent 0.5", "leave --rotary-percent out"),
        (1, "--multi-latent-attention --v-head-dim 256", "--v-head-dim 256 must be at most --qk-head-dim"),
        (3, "--num-experts 4 --expert-model-parallel-size 2", "does not divide the 3 rank(s) choose one of 1, 3"),
        (3, "--num-experts 4 --expert-model-parallel-size 3", "choose sizes whose product is one of 1, 2, 4"),
        (4, "--num-experts 2 --expert-model-parallel-size 2 --tensor-model-parallel-size 2",
         "--num-experts 2 cannot be divided evenly among = 4 rank(s)"),
        (2, "--num-experts 4 --expert-model-parallel-size 2 --moe-token-bits 5", "must be one of (4, 6, 8), got 5"),
        (2, "--num-experts 4 --expert-model-parallel-size 1 --moe-token-bits 8", "-size above 1"),
        (2, "--num-experts 4 --expert-model-parallel-size 2 --compile", "--compile does not see tokens"),
        (12, "--num-experts 4 --expert-model-parallel-size 4 --zeropp-ranks-per-node 6",
         "--expert-model-parallel-size 4 and nodes of 6 ranks"),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_refused(world_size, flags, words):
    assert_words(refusal(f"{RUN} --make-vocab-size-divisible-by 2 {flags}", LLAMA, world_size), words)


def test_flags_of_experts_change_a_preset_that_has_them():
    flags = "--preset mixtral-8x7b --moe-aux-loss-coeff 0.25 --expert-model-parallel-size 2 --vocab-size 9 --mock-data"
    settings, _ = parse(f"{flags} --micro-batch-size 1 --seq-length 8 --train-iters 1 --lr 1", LLAMA, 2)
    assert settings.model.aux_loss_coeff == 0.25 and settings.distributed.expert_model_parallel_size == 2
