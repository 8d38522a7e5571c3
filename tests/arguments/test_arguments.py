"""parse_settings: what a command line becomes, and what it is refused for."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from megatron_zpp.arguments.foreign_flags import NOT_NEEDED, REFUSED, TRANSLATED, translate
from megatron_zpp.arguments.help import help_text
from megatron_zpp.arguments.page import render_reference
from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import ARCHITECTURES, GPT, LLAMA, find_architecture
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.settings.checks import flag_of
from megatron_zpp.settings.flags import iterate_flags, setting_of
from megatron_zpp.settings.groups import Settings, all_flags, iterate_groups, with_current_names
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from tests.models.configs import llama_config

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 "
)
YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 4096"
PRESETS = {name: preset for each in ARCHITECTURES for name, preset in each.presets.items()}


def parse(command: str, architecture: str = "gpt", world_size: int = 4) -> tuple[Settings, list[str]]:
    notes: list[str] = []
    return parse_settings(find_architecture(architecture), shlex.split(command), world_size, notes.append), notes


def refusal(command: str, architecture: str = "gpt", world_size: int = 4) -> str:
    with pytest.raises(SettingsError) as error:
        parse(command, architecture, world_size)
    (message,) = error.value.messages
    assert "\n" not in message
    return message


# What is set


def test_megatron_defaults():
    flat = parse(SMALL)[0].as_flat_dict()
    megatron = dict(
        make_vocab_size_divisible_by=128, norm_epsilon=1e-5, init_method_std=0.02, rotary_base=10000,
        attention_dropout=0.1, hidden_dropout=0.1, weight_decay=0.01, clip_grad=1.0, adam_beta1=0.9, adam_beta2=0.999,
        adam_eps=1e-8, sgd_momentum=0.9, optimizer="adam", seed=1234, eval_iters=100, lr_decay_style="linear",
        min_lr=0.0, lr_warmup_init=0.0, lr_wsd_decay_style="exponential", weight_decay_incr_style="constant",
        initial_loss_scale=2**32, min_loss_scale=1.0, loss_scale_window=1000, hysteresis=2, num_workers=2,
        log_interval=100, tensorboard_log_interval=1, tensorboard_queue_size=1000, distributed_timeout_minutes=10,
        rope_scaling_factor=8.0, tensor_model_parallel_size=1, manual_gc_interval=0,
    )  # fmt: skip
    assert {name: flat[name] for name in megatron} == megatron


def test_every_setting_is_one_flag_with_help():
    seen, flags = set(), []
    for _, group in iterate_groups():
        assert dataclasses.fields(group) and group.__dataclass_params__.frozen
        for flag in iterate_flags(group):
            assert flag.help, flag.name
            assert flag.value_type in (bool, int, float, str), flag.name
            assert flag.setting not in seen, f"two settings are called {flag.setting}"
            assert flag_of(flag.setting) == flag.name
            seen.add(flag.setting)
            flags.append(flag.name)
    assert {"--num-layers", "--override-opt_param-scheduler", "--zeropp-loco-beta"} <= set(flags)
    assert len(flags) == len(set(flags))
    assert not set(flags) & NOT_NEEDED.keys() and not set(flags) & REFUSED.keys()
    assert not REFUSED.keys() & NOT_NEEDED.keys() and not TRANSLATED.keys() & {*flags, *REFUSED, *NOT_NEEDED}


def test_refusals_point_to_flags_that_exist():
    known = {*(flag.name for flag in all_flags().values()), *NOT_NEEDED}
    for name, instead in REFUSED.items():
        for word in instead.replace(",", " ").replace(";", " ").replace(":", " ").split():
            if word.startswith("--"):
                assert word in known, f"{name}: {word}"


def test_values_reach_their_group():
    settings, notes = parse(
        SMALL + "--rampup-batch-size 8 8 100 --global-batch-size 32 --no-save-rng --save out --save-interval 5 "
        "--log-throughput --adam-beta2=0.95 --override-opt_param-scheduler"
    )
    assert settings.training.rampup_batch_size == (8, 8, 100)
    assert settings.training.global_batch_size == 32
    assert settings.checkpoint.save == "out" and settings.checkpoint.no_save_rng
    assert settings.optimizer.adam_beta2 == 0.95
    assert settings.schedule.override_opt_param_scheduler
    assert notes == []


def test_data_paths_become_tuples():
    command = SMALL.replace("--mock-data", "--train-data-path 3 a 7 b --tokenizer-type ByteTokenizer")
    assert parse(command)[0].data.train_data_path == ("3", "a", "7", "b")


def test_derived_gpt():
    settings, _ = parse(SMALL)
    model = settings.model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (256, 16, 4)
    assert model.max_position_embeddings == 32
    assert (model.normalization, model.position_embedding_type, model.swiglu) == (
        "LayerNorm",
        "learned_absolute",
        False,
    )
    assert not model.untie_embeddings_and_output_weights
    assert settings.training.global_batch_size == 2 * 4
    assert settings.tokenizer.tokenizer_type == "NullTokenizer"


def test_derived_llama():
    model = parse(SMALL.replace("--hidden-size 64", "--hidden-size 4096"), "llama")[0].model
    assert model.ffn_hidden_size == 10880  # Megatron's int(8/3 * 4096 / 64) * 64
    assert (model.attention_dropout, model.hidden_dropout) == (0, 0)
    assert model.num_query_groups == 4
    assert model.swiglu and model.disable_bias_linear and model.untie_embeddings_and_output_weights
    assert (model.normalization, model.position_embedding_type) == ("RMSNorm", "rope")
    # So narrow that 8/3 of it rounds down to 0: one multiple of 64, by the flags and by the model's own rule.
    assert parse(SMALL.replace("--hidden-size 64", "--hidden-size 16"), "llama")[0].model.ffn_hidden_size == 64
    assert llama_config(1, 16, 1, 128).ffn_size == 64


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_embeddings_are_tied_as_asked(architecture):
    for ask, tied in {"": architecture == "gpt", "--tie": True, "--untie": False}.items():
        model = parse(f"{SMALL} {ask and f'{ask}-embeddings-and-output-weights'}", architecture)[0].model
        assert find_architecture(architecture).build_model(model, 100).config.tie_embeddings == tied
        assert model.tie_embeddings_and_output_weights != model.untie_embeddings_and_output_weights


@pytest.mark.parametrize("name", PRESETS)
def test_presets_parse(name):
    settings, notes = parse(
        f"--preset {name} --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9",
        "gpt" if name in GPT.presets else "llama",
    )
    flat = settings.as_flat_dict()
    assert {key: flat[key] for key in PRESETS[name]} == PRESETS[name]
    assert notes == []


def test_flags_override_the_preset():
    model = parse("--preset gpt-125m --num-layers 2 " + SMALL.replace("--num-layers 4 --hidden-size 64", ""))[0].model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 768, 4)


def test_recomputation():
    assert parse(SMALL)[0].activation.recompute_granularity is None
    assert parse(SMALL + "--recompute-activations")[0].activation.recompute_granularity == "selective"
    full = parse(SMALL + "--checkpoint-activations")[0].activation
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == ("full", "uniform", 1)


def test_bf16_reduces_in_fp32_unless_told_otherwise():
    assert parse(SMALL + "--bf16")[0].precision.accumulate_allreduce_grads_in_fp32
    assert not parse(SMALL + "--bf16 --grad-reduce-in-bf16")[0].precision.accumulate_allreduce_grads_in_fp32
    assert not parse(SMALL + "--fp16")[0].precision.accumulate_allreduce_grads_in_fp32


@pytest.mark.parametrize(
    "more, in_fp32",
    [
        ("", False),
        ("--accumulate-allreduce-grads-in-fp32", True),
        ("--zeropp-gradient-bits 0", True),
        ("--zeropp-gradient-intra-bits 0", True),
        ("--zero-stage 1", True),  # FSDP2 adds up micro-batches
        ("--zero-stage 2", False),
    ],
)
def test_bf16_gradients_are_handed_over_as_they_are_where_all_sums_are_in_fp32(more, in_fp32):
    precision = parse(f"{SMALL} --bf16 --zero-quantized-gradients {more}")[0].precision
    assert precision.accumulate_allreduce_grads_in_fp32 is in_fp32
    assert precision.grad_reduce_in_bf16 is not in_fp32


def test_zero_means_none():
    settings, _ = parse(
        SMALL + "--zero-quantized-gradients --zeropp-gradient-block-size 0 --zeropp-gradient-intra-bits 0 "
        "--zeropp-loco --zeropp-loco-reset-interval 0"
    )
    config = ZeroPPConfig(
        quantized_gradients=True, gradient_block_size=None, gradient_intra_bits=None,
        loco=LoCoConfig(reset_interval=None, exact_undo=False), seed=1234,
    )  # fmt: skip
    assert settings.zeropp == config


def test_every_zeropp_flag_together():
    settings, _ = parse(
        SMALL + "--zero-stage 3 --zero-quantized-weights --zero-hpz-partition-size 2 --zeropp-ranks-per-node 2 "
        "--zero-quantized-gradients --zeropp-loco --zeropp-loco-beta 0.5 --zeropp-gradient-bits 3 "
        "--zeropp-weight-bits 6"
    )
    assert settings.zeropp == ZeroPPConfig(
        quantized_weights=True, hpz_partition_size=2, quantized_gradients=True,
        loco=LoCoConfig(beta=0.5, exact_undo=False), ranks_per_node=2, weight_bits=6, gradient_bits=3, seed=1234,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words, exact", [("", False), ("--bf16", False), ("--fp16", True), ("--bf16 --loss-spike-factor 2", True)]
)
def test_loco_keeps_a_second_error_where_finite_steps_are_undone(words, exact):
    settings, _ = parse(SMALL + f"--zero-quantized-gradients --zeropp-loco {words}")
    assert settings.zeropp.loco.exact_undo == exact


@pytest.mark.parametrize(
    "words, message",
    [
        ("--zero-stage 0", "--cpu-offload moves the shards of real ranks at --zero-stage 1, 2 or 3"),
        ("--emulate-ranks 2", "--cpu-offload moves the shards of real ranks"),
        ("--use-apex", "--use-apex steps on the GPU, --cpu-offload on the host"),
    ],
)
def test_offloading_is_refused_where_there_is_nothing_to_offload(words, message):
    assert message in refusal(SMALL + f"--cpu-offload {words}", world_size=1)


def test_megatron_llama_script_with_its_usual_flags():
    settings, notes = parse(
        "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
        "--position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --micro-batch-size 1 "
        "--global-batch-size 128 --train-samples 10000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine "
        "--lr-warmup-fraction .01 --use-distributed-optimizer --overlap-grad-reduce --attention-backend auto "
        "--data-path p --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model t "
        "--ckpt-fully-parallel-load",
        "llama",
        world_size=64,
    )
    assert settings.model.num_query_groups == 8
    assert [note.split()[0] for note in notes] == [
        "--use-mcore-models", "--use-distributed-optimizer", "--overlap-grad-reduce", "--attention-backend",
        "--ckpt-fully-parallel-load",
    ]  # fmt: skip


# Flags as published scripts have them, a few of each kind


def test_flags_of_a_deepspeed_launcher_and_of_logging_change_nothing():
    settings, notes = parse(
        SMALL + "--local_rank=3 --log-batch-size-to-tensorboard --log-optimizer-states-to-tensorboard --DDP-impl local "
        "--transformer-impl transformer_engine --ckpt-format torch_dist --fp8-format hybrid --fp8-param-gather "
        "--timing-log-level 1 --recompute-modules core_attn mlp "
        "--moe-expert-parallel-size 1 --num-experts 1 --moe-loss-coeff 0.01 --mlp-type residual"
    )
    assert settings == parse(SMALL)[0]
    assert [note.partition(" ")[0].rstrip(",") for note in notes] == [
        "--local_rank", "--log-batch-size-to-tensorboard", "--log-optimizer-states-to-tensorboard", "--DDP-impl",
        "--transformer-impl", "--ckpt-format", "--fp8-format", "--timing-log-level", "--recompute-modules",
        "--moe-expert-parallel-size",
    ]  # fmt: skip
    assert notes[-1] == (
        "--moe-expert-parallel-size, --num-experts, --moe-loss-coeff, --mlp-type are accepted but need no setting: "
        "there is one MLP, and so no experts"
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "there is one rank"),
        ("--tensor-model-parallel-size 2", "not known with --tensor-model-parallel-size 2"),
        ("--num-distributed-optimizer-instances 2", "not known with --num-distributed-optimizer-instances 2"),
        ("--zero-stage 0", "not known with --zero-stage 0"),
    ],
)
def test_stragglers_are_told_apart_where_ranks_wait_in_fsdp_alone(flags, reason):
    settings, notes = parse(f"{SMALL} --log-straggler {flags}", world_size=4 if flags else 1)
    assert not settings.logging.log_straggler
    assert notes[0].startswith("--log-straggler has no effect: ") and notes[0].endswith(reason)
    settings, notes = parse(f"{SMALL} --log-straggler", world_size=4)
    assert settings.logging.log_straggler and not notes


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("--activations-checkpoint-method uniform", "--recompute-granularity full --recompute-method uniform"),
        ("--ds-sequence-parallel-size 2", "--context-parallel-size 2"),
        ("--layernorm-epsilon=1e-6", "--norm-epsilon 1e-6"),
        ("--enable-zbh1-pipeline --pipeline-model-parallel-size 2 --global-batch-size 8",
         "--pipeline-schedule zero-bubble --pipeline-model-parallel-size 2 --global-batch-size 8"),
        ("--cpu-optimizer", "--cpu-offload"),
        ("--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp", "--zero-stage 2"),
    ],
)  # fmt: skip
def test_flags_with_another_name(foreign, ours):
    settings, notes = parse(SMALL + foreign)
    assert settings == parse(SMALL + ours)[0]
    assert any(foreign.replace("=", " ").startswith(note.partition(" is --")[0]) for note in notes[:1])


def test_of_a_flag_with_another_name_the_last_holds():
    settings, notes = parse(SMALL + "--ds-sequence-parallel-size 2 --ds-sequence-parallel-size 4")
    assert settings.distributed.context_parallel_size == 4
    assert notes == ["--ds-sequence-parallel-size 4 is --context-parallel-size 4 here"]


def test_every_translation_is_of_flags_that_exist():
    flags = {flag.name for flag in all_flags().values()}
    for name, meaning in TRANSLATED.items():
        for value in meaning if isinstance(meaning, dict) else [[], ["1"]]["{" in meaning] or [""]:
            words = translate(name, [value] if value else []).split()
            assert {word for word in words if word.startswith("--")} <= flags, name


def test_what_megatron_deepspeeds_experts_leave_unsaid_is_as_there():
    settings, notes = parse(SMALL + " --num-experts 8 --moe-expert-parallel-size 1 --moe-loss-coeff 0.01")
    model = settings.model
    assert (model.moe_router_topk, model.moe_router_pre_softmax, model.moe_aux_loss_coeff) == (1, True, 0.01)
    assert (model.moe_layer_freq, model.moe_first_layer) == (2, 2)
    capacities = model.moe_expert_capacity_factor, model.moe_eval_capacity_factor, model.moe_min_capacity
    assert capacities == (1.0, 1.0, 4)
    assert any("what Megatron-DeepSpeed's experts leave unsaid is --moe-router-topk 1" in note for note in notes)
    model = parse(SMALL + " --num-experts 8 --topk 2 --expert-interval 1 --moe-min-capacity 7")[0].model
    assert (model.moe_router_topk, model.moe_router_pre_softmax, model.moe_min_capacity) == (2, False, 7)
    assert (model.moe_layer_freq, model.moe_first_layer) == (1, 1)
    model = parse(SMALL + " --num-experts 8 --moe-router-topk 2")[0].model  # Megatron-LM's
    assert (model.moe_layer_freq, model.moe_aux_loss_coeff, model.moe_expert_capacity_factor) == (1, 0.0, None)


def test_pyramids_of_residual_experts_as_megatron_deepspeed_says_them():
    flags = "--num-layers 8 --num-experts 4 4 8 8 --mlp-type residual --moe-loss-coeff 0.01"
    model = parse(f"{SMALL} {flags}")[0].model
    assert (model.num_experts, model.moe_experts_per_layer, model.moe_residual) == (8, "4,4,8,8", True)
    assert model.moe_shared_expert_intermediate_size == model.ffn_hidden_size
    assert parse(f"{SMALL} --num-experts 4 --mlp-type standard")[0].model.moe_residual is False


def test_megatrons_default_tokenizer():
    command = SMALL.replace("--mock-data --vocab-size 100", "--data-path p --vocab-file v --merge-file m")
    assert parse(command)[0].tokenizer.tokenizer_type == "GPT2BPETokenizer"
    message = refusal(SMALL.replace("--mock-data --vocab-size 100", "--data-path p"))
    assert "--tokenizer-type" in message and "--vocab-file and --merge-file" in message


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        ("--train-tokens 6400", 200),
        ("--train-tokens 6401", 208),  # by the step that reaches it
        ("--train-samples 100 --train-tokens 6400", 100),
        ("--train-samples 1000 --train-tokens 6400", 200),
        ("--train-tokens 6400 --rampup-batch-size 4 4 20 --micro-batch-size 1 --global-batch-size 8", 204),
    ],
)
def test_a_run_ends_at_its_tokens(words, samples):
    command = SMALL.replace("--train-iters 10 ", "--lr-decay-tokens 6400 --lr-warmup-tokens 640 ")
    assert parse(command + words)[0].training.train_samples == samples


def test_tokens_end_a_run_in_iterations_too():
    assert parse(SMALL + "--train-tokens 1000")[0].training.train_iters == 4  # of 8 * 32 tokens
    assert parse(SMALL + "--train-tokens 100000")[0].training.train_iters == 10


def test_tokens_of_samples_that_grow():
    # Steps of 8 samples: 8 and then 16 tokens, 24, 32.
    command = SMALL + "--curriculum-min-length 8 --curriculum-iters 6 --train-tokens "
    assert parse(command + str(8 * (8 + 16 + 16 + 24)))[0].training.train_iters == 4
    assert parse(command + str(8 * (8 + 16 + 16 + 24) + 1))[0].training.train_iters == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--curriculum-min-length 8", "--curriculum-iters"),
        ("--curriculum-iters 3", "--curriculum-iters needs --curriculum-min-length"),
        ("--curriculum-min-length 4 --curriculum-iters 3", "--curriculum-length-step 8"),
        ("--curriculum-min-length 8 --curriculum-iters 3 --context-parallel-size 2 --curriculum-length-step 2",
         "--curriculum-length-step 2 4"),
        ("--curriculum-min-length 8 --curriculum-iters 3 --reset-attention-mask", "--reset-attention-mask"),
        ("--lr-decay-tokens 64 --lr-decay-iters 4", "--lr-decay-tokens --lr-decay-iters"),
        ("--lr-warmup-tokens 64 --lr-warmup-iters 4", "--lr-warmup-tokens --lr-warmup-iters"),
    ],
)  # fmt: skip
def test_what_tokens_and_growing_samples_are_refused_for(words, message):
    said = refusal(SMALL + words)
    assert all(word in said for word in message.split()), said


def test_a_pipeline_that_is_never_full():
    command = SMALL + "--pipeline-model-parallel-size 4 --global-batch-size "
    assert parse(command + "2")[0].distributed.pipeline_schedule == "gpipe"
    assert parse(command + "8")[0].distributed.pipeline_schedule == "1f1b"
    assert "--pipeline-schedule 1f1b needs" in refusal(command + "2 --pipeline-schedule 1f1b")


def test_notes_for_settings_without_effect():
    _, notes = parse(SMALL + "--bf16 --initial-loss-scale 65536 --manual-gc-interval 5 --wandb-exp-name x")
    assert [note.split(" has no effect without ") for note in notes] == [
        ["--initial-loss-scale", "--fp16"],
        ["--manual-gc-interval", "--manual-gc"],
        ["--wandb-exp-name", "--wandb-project"],
    ]


def test_only_the_first_rank_prints_notes(capsys, monkeypatch):
    for rank, expected in ("0", 1), ("3", 0):
        monkeypatch.setenv("RANK", rank)
        parse_settings(GPT, shlex.split(SMALL + "--use-flash-attn"), 4)
        assert capsys.readouterr().err.count("--use-flash-attn") == expected


def test_help_exits_cleanly_and_shows_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_settings(LLAMA, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "peak learning rate" in text and "--adam-beta2" not in text and 25 <= text.count(" --") <= 60
    everything = help_text(LLAMA, ["--help-all"])
    assert "(default: 0.999)" in everything and all(flag.name in everything for flag in all_flags().values())
    assert "--use-flash-attn" not in everything  # only what does something
    logging = help_text(LLAMA, ["--help", "logging"])
    assert "--log-interval" in logging and "--lr " not in logging
    with pytest.raises(SettingsError, match="--help loging is no group of flags; did you mean logging"):
        help_text(LLAMA, ["--help", "loging"])
    assert max(map(len, help_text(GPT).partition("\n\n")[0].splitlines())) < 100


def test_former_names_of_flags_and_saved_settings_are_understood():
    former = "--zero-quantized-weights --zero-weight-bits 6 --zero-hpz-partition-size 2 --hpz-secondary-dtype int8"
    now = "--zero-quantized-weights --zeropp-weight-bits 6 --zero-hpz-partition-size 2 --zeropp-secondary-dtype int8"
    settings = parse_settings(GPT, shlex.split(SMALL + now), 2)
    assert parse_settings(GPT, shlex.split(SMALL + former), 2) == settings
    saved = settings.as_flat_dict()
    names = {flag.setting: flag.aliases[0] for flag in all_flags().values() if flag.aliases}
    old = {setting_of(names.get(setting, setting)): value for setting, value in saved.items()}
    assert (
        settings.zeropp.weight_bits == 6
        and "zero_weight_bits" in old
        and "zeropp_weight_bits" not in old
        and with_current_names(old) == saved
    )


def test_reference_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "arguments.md"
    assert page.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m megatron_zpp.arguments.page docs/arguments.md"
    )


# What is refused: the message must name every one of the words


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        # flags
        ("--micro-batchsize 1", "--micro-batchsize did you mean --micro-batch-size?"),
        ("--zero_stage 3", "--zero_stage did you mean --zero-stage?"),
        ("--zero-quantised-weights", "did you mean --zero-quantized-weights?"),
        ("--use-flash-attention", "did you mean --use-flash-attn"),
        ("--xyzzy", "--xyzzy --help"),
        ("--no-position-embedding", "--no-position-embedding does not hold --position-embedding-type"),
        ("--num-layer 3", "--num-layer did you mean --num-layers?"),  # no abbreviations
        ("--batch-size 1", "--batch-size --micro-batch-size"),
        ("--warmup 1", "--lr-warmup-fraction"),
        ("--model-parallel-size=1", "--tensor-model-parallel-size"),
        (
            "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --topk 1",
            "--topk 1 is --moe-router-topk says otherwise",
        ),
        (
            "--num-experts 8 --moe-min-capacity 4",
            "--moe-min-capacity needs --moe-expert-capacity-factor",
        ),
        ("--num-layers 4 --num-experts 4 8 8", "--moe-experts-per-layer 4,8,8 has 3 numbers, and 4 of --num-layers 4"),
        ("--num-experts 4 --moe-experts-per-layer 4,x", "must be numbers from 1 to --num-experts 4, as 32,32,64"),
        ("--num-experts 4 --mlp-type standart", "--mlp-type must be one of standard, residual, got standart"),
        ("--kd --load-teacher x --num-layers-teacher 3", "--kd, --load-teacher, --num-layers-teacher distillation"),
        ("--load-studnt x", "unknown flag --load-studnt see --help"),  # and no flag that is only a little like it
        ("--layernorm-epsilon 0", "--norm-epsilon"),
        ("--layernorm-epsilon", "--layernorm-epsilon takes one value"),
        ("--enable-zbh1-pipeline 1", "--enable-zbh1-pipeline takes no value"),
        ("--data-parallel-sharding-strategy some", "no_shard, optim, optim_grads, optim_grads_params some"),
        ("--layernorm-epsilon 1e-3 --norm-epsilon 1e-4", "--layernorm-epsilon 1e-3 --norm-epsilon otherwise"),
        ("--dataloader-type external", "external single cyclic"),
        ("--use-distributed-optimizer --zero-stage 0", "--use-distributed-optimizer --zero-stage 1"),
        ("--optimizer lion", "--optimizer lion adam sgd"),
        ("--seed x", "--seed x"),
        ("--rampup-batch-size 1 2", "--rampup-batch-size 3"),
        ("stray", "stray"),
        # batches
        ("--global-batch-size 12", "12 2 4 8"),
        ("--micro-batch-size 0", "--micro-batch-size 1 0"),
        ("--global-batch-size 32 --rampup-batch-size 8 7 100", "--rampup-batch-size 7"),
        ("--train-samples 80", "--train-iters --train-samples"),
        # network
        ("--num-attention-heads 3", "--hidden-size 64 --num-attention-heads 3"),
        ("--max-position-embeddings 16", "--seq-length 32 --max-position-embeddings 16"),
        ("--hidden-dropout 1.5", "--hidden-dropout 1.5"),
        ("--preset gpt-9t", "--preset gpt-9t gpt-125m"),
        ("--preset llama-8b", "pretrain_llama.py"),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 1, 2, 4"),
        ("--tensor-model-parallel-size 4 --num-attention-heads 2", "--num-attention-heads 1, 2"),
        ("--tensor-model-parallel-size 4 --ffn-hidden-size 6", "--ffn-hidden-size 1, 2"),
        ("--tensor-model-parallel-size 4 --sequence-parallel --seq-length 34", "--seq-length 1, 2"),
        ("--tensor-model-parallel-size 2 --compile", "--compile --tensor-model-parallel-size"),
        # optimizer, schedule, precision, recomputation
        ("--min-lr 1", "--min-lr --lr"),
        ("--lr-warmup-samples 5", "--lr-warmup-samples --lr-warmup-iters"),
        ("--lr-warmup-iters 10", "warm-up decay"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-iters"),
        ("--start-weight-decay 0.1", "--start-weight-decay --weight-decay-incr-style"),
        ("--adam-beta1 1", "--adam-beta1 1"),
        ("--fp16 --bf16", "--fp16 --bf16"),
        ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 --bf16"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16 exclude"),
        ("--checkpoint-activations --recompute-activations", "--checkpoint-activations --recompute-activations"),
        ("--recompute-num-layers 2", "--recompute-num-layers --recompute-granularity full"),
        ("--checkpoint-activations --recompute-num-layers 5", "--recompute-num-layers 5 4"),
        # ZeRO++
        ("--zero-stage 4", "--zero-stage 4"),
        ("--zero-hpz-partition-size 3", "--zero-hpz-partition-size 3 4 1, 2, 4"),
        ("--zeropp-ranks-per-node 8", "--zeropp-ranks-per-node 8 4"),
        ("--zero-stage 0 --zero-quantized-weights", "--zero-quantized-weights --zero-stage 1"),
        ("--zero-stage 1 --zero-hpz-partition-size 2", "--zero-hpz-partition-size --zero-stage 3"),
        ("--zeropp-loco", "--zeropp-loco --zero-quantized-gradients"),
        ("--zeropp-gradient-bits 4", "--zeropp-gradient-bits --zero-quantized-gradients"),
        ("--zero-quantized-weights --zeropp-weight-bits 7", "--zeropp-weight-bits 7"),
        ("--zero-quantized-gradients --zeropp-loco --zeropp-loco-beta 1", "beta 1"),
        (
            "--zero-hpz-partition-size 2 --zeropp-ranks-per-node 4",
            "--zero-hpz-partition-size 2 --zeropp-ranks-per-node 4",
        ),
        # HSDP
        ("--num-distributed-optimizer-instances 3", "--num-distributed-optimizer-instances 3 4 1, 2, 4"),
        ("--num-distributed-optimizer-instances 2 --zero-stage 0", "instances 2 --zero-stage 0 none"),
        ("--num-distributed-optimizer-instances 2 --zero-quantized-weights", "HSDP --zero-quantized-weights"),
        ("--num-distributed-optimizer-instances 2 --zero-hpz-partition-size 2", "HSDP --zero-hpz-partition-size"),
        ("--num-distributed-optimizer-instances 2 --zero-quantized-gradients", "HSDP --zero-quantized-gradients"),
        # data, checkpoints
        ("--data-path x", "--data-path --mock-data"),
        ("--save out", "--save --save-interval"),
        ("--finetune", "--finetune --load"),
        ("--save out --save-interval 0", "--save-interval 1 0"),
    ],
)
def test_refused(extra, words):
    message = refusal(SMALL + extra)
    for word in words.split():
        assert word in message, message


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("--num-layers 4", "--num-layers --preset"),
        ("--micro-batch-size 2", "--micro-batch-size"),
        ("--seq-length 32", "--seq-length"),
        ("--lr 1e-3", "--lr"),
        ("--train-iters 10", "--train-iters --train-samples"),
        ("--mock-data", "--data-path --mock-data"),
        ("--vocab-size 100", "--vocab-size --mock-data"),
    ],
)
def test_missing(left_out, words):
    message = refusal(SMALL.replace(left_out, "--tokenizer-type ByteTokenizer" if left_out == "--mock-data" else ""))
    for word in words.split():
        assert word in message, message


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--num-query-groups 2", "--num-query-groups --group-query-attention"),
        ("--group-query-attention --num-query-groups 3", "--num-attention-heads 4 --num-query-groups 3"),
        ("--kv-channels 15", "even 15"),
        ("--tie-embeddings-and-output-weights --untie-embeddings-and-output-weights", "--untie- --tie- give one"),
    ],
)
def test_refused_for_llama(extra, words):
    message = refusal(SMALL + extra, "llama")
    for word in words.split():
        assert word in message, message


@pytest.mark.parametrize(
    ("architecture", "flags", "message"),
    [
        ("gpt", "--add-qkv-bias", "--add-qkv-bias adds nothing"),
        (
            "gpt",
            "--rotary-base 500000",
            "--rotary-base is of --position-embedding-type rope or yarn, ",
        ),
        ("gpt", "--use-rope-scaling", "--use-rope-scaling is of --position-embedding-type rope or yarn"),
        ("llama", "--position-embedding-type none --rotary-percent 0.5", "--rotary-percent is of --position"),
        (
            "llama",
            "--yarn-rotary-scaling-factor 4",
            "--yarn-rotary-scaling-factor is of --position-embedding-type yarn",
        ),
        ("llama", "--rotary-percent 0.2", "even number of channels per head, got 3; .*--rotary-percent"),
        ("llama", "--rotary-percent 0.01", "even number of channels per head, got 0"),
        ("llama", "--position-embedding-type yarn", "yarn needs --yarn-rotary-scaling-factor"),
        ("llama", f"{YARN} --use-rope-scaling", "--use-rope-scaling and --position-embedding-type yarn exclude"),
        ("llama", f"{YARN} --rotary-base 1", "yarn needs a --rotary-base above 1"),
        ("llama", f"{YARN} --yarn-beta-slow 40", "--yarn-beta-fast 32 must be above --yarn-beta-slow 40"),
        ("llama", "--window-size 4096", "--window-size 4096 must be LEFT,0"),
        ("llama", "--window-size 16,16", "--window-size 16,16 must be LEFT,0"),
        ("gpt", "--window-size 0,0", "--window-size 0,0 must be LEFT,0"),
    ],
)
def test_descriptions_of_a_network_that_make_no_sense_are_refused(architecture, flags, message):
    found = refusal(SMALL + flags, architecture)
    assert re.search(message, found) and found.count("\n") == 0


def test_flags_describe_any_decoder():
    flags = """--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 --rotary-base 500000
        --group-query-attention --num-query-groups 2 --disable-bias-linear --add-qkv-bias --qk-layernorm
        --window-size (15,0) --apply-layernorm-1p --untie-embeddings-and-output-weights --use-rope-scaling"""
    settings, notes = parse(SMALL + flags)
    config = GPT.build_model(settings.model, 100).config
    assert notes == [] and config == DecoderConfig(
        *(4, 64, 4, 128),
        ffn_hidden_size=128,  # SwiGLU's
        num_query_groups=2,
        kv_channels=16,
        normalization="RMSNorm",
        layernorm_1p=True,
        qk_layernorm=True,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        window_size=15,
        position_embedding_type="rope",
        rotary_percent=0.5,
        rotary_base=500000,
        rope_scaling_factor=8.0,
        tie_embeddings=False,
    )
    # Llama's flags, given to pretrain_gpt.py, describe pretrain_llama.py's model.
    llama = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"""
    of_gpt, of_llama = (parse(SMALL + more, name)[0].model for more, name in ((llama, "gpt"), ("", "llama")))
    assert of_gpt == of_llama
    other = parse(SMALL + f"--normalization LayerNorm {YARN}", "llama")[0].model
    assert (other.normalization, other.position_embedding_type) == ("LayerNorm", "yarn")


def test_a_preset_that_ties_the_embeddings_is_overridden():
    rest = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9"
    for more, tied in ("", True), (" --untie-embeddings-and-output-weights", False):
        model = parse(f"--preset qwen3-0.6b {rest}{more}", "llama")[0].model
        assert model.tie_embeddings_and_output_weights == tied


def test_split_is_refused_with_data_for_each_split():
    flags = "--split 9,1,0 --train-data-path x --tokenizer-type ByteTokenizer"
    message = refusal(SMALL.replace("--mock-data --vocab-size 100", flags))
    assert message == "--split divides --data-path; it has no meaning with --train-data-path: leave it out"


def test_decrease_batch_size_if_needed():
    settings, _ = parse(SMALL + "--global-batch-size 12 --decrease-batch-size-if-needed")
    assert settings.training.global_batch_size == 12  # what was asked for; the batch schedule rounds
