"""parse_settings: what a command line becomes, and what it is refused for."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from docs.flags_page import flag_changes, render_reference
from megatron_zpp.arguments.foreign_flags import NOT_NEEDED, REFUSED, TRANSLATED, translate
from megatron_zpp.arguments.help import help_text
from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import GPT, LLAMA, find_architecture
from megatron_zpp.settings.checks import flag_of
from megatron_zpp.settings.flags import iterate_flags
from megatron_zpp.settings.groups import all_flags, iterate_groups
from tests.arguments.parsing import BYTES, MOCK, SMALL, flat, parse
from tests.models.configs import llama_config

TP_EP = "--num-experts 8 --tensor-model-parallel-size 2"
ONE_STEP = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9"


def test_every_setting_is_one_flag_with_help():
    flags = []
    for _, group in iterate_groups():
        assert dataclasses.fields(group) and group.__dataclass_params__.frozen
        flags += iterate_flags(group)
    for flag in flags:
        assert flag.help, flag.name
        assert flag.value_type in (bool, int, float, str), flag.name
        assert flag_of(flag.setting) == flag.name
        assert flag.name not in flag.aliases, flag.name
    names = {flag.name for flag in flags}
    assert len(flags) == len(names) == len({flag.setting for flag in flags}) <= 345
    assert {"--num-layers", "--override-opt_param-scheduler", "--zeropp-loco-beta"} <= names
    assert not names & NOT_NEEDED.keys() and not names & REFUSED.keys()
    assert not REFUSED.keys() & NOT_NEEDED.keys() and not TRANSLATED.keys() & {*names, *REFUSED, *NOT_NEEDED}


def test_refusals_and_translations_name_flags_that_exist():
    flags = {flag.name for flag in all_flags().values()}
    for name, instead in REFUSED.items():
        assert set(re.findall(r"--[\w-]+", instead)) <= {*flags, *NOT_NEEDED}, name
    for name, meaning in TRANSLATED.items():
        for value in meaning if isinstance(meaning, dict) else [[], ["1"]]["{" in meaning] or [""]:
            words = translate(name, [value] if value else []).split()
            assert {word for word in words if word.startswith("--")} <= flags, name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rampup-batch-size 8 8 100 --global-batch-size 32", dict(rampup_batch_size=(8, 8, 100))),
        ("--no-save-optim --save out --save-interval 5", dict(save="out", no_save_optim=True)),
        ("--log-throughput --adam-beta2=0.95", dict(log_throughput=True, adam_beta2=0.95)),
        ("--override-opt_param-scheduler", dict(override_opt_param_scheduler=True)),
        ("", dict(ffn_hidden_size=256, kv_channels=16, num_query_groups=4, max_position_embeddings=32)),
        ("", dict(normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False)),
        ("", dict(untie_embeddings_and_output_weights=False, global_batch_size=8, tokenizer_type="NullTokenizer")),
        ("", dict(recompute_granularity=None)),
        ("--recompute-activations", dict(recompute_granularity="selective")),
        ("--recompute-activations --recompute-modules mlp core_attn", dict(recompute_modules=("mlp", "core_attn"))),
        ("--recompute-modules mlp", dict(recompute_modules=None)),
        ("--checkpoint-activations",
         dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
        ("--bf16", dict(accumulate_allreduce_grads_in_fp32=True)),
        ("--bf16 --grad-reduce-in-bf16", dict(accumulate_allreduce_grads_in_fp32=False)),
        ("--fp16", dict(accumulate_allreduce_grads_in_fp32=False)),
        # The batch schedule rounds what was asked for.
        ("--ds-sequence-parallel-size 2 --ds-sequence-parallel-size 4", dict(context_parallel_size=4)),
        ("--num-layers 8 --num-experts 4 4 8 8 --mlp-type residual --moe-loss-coeff 0.01",
         dict(num_experts=8, moe_experts_per_layer="4,4,8,8", moe_residual=True,
              moe_shared_expert_intermediate_size=256)),
        ("--num-experts 4 --mlp-type standard", dict(moe_residual=False)),
        ("--num-experts 8 --topk 2 --expert-interval 1 --moe-min-capacity 7",  # Megatron-DeepSpeed's
         dict(moe_router_topk=2, moe_router_pre_softmax=False, moe_min_capacity=7, moe_layer_freq="1",
              moe_first_layer=1)),
        ("--num-experts 8 --moe-router-topk 2",  # Megatron-LM's
         dict(moe_layer_freq=None, moe_aux_loss_coeff=0.0, moe_expert_capacity_factor=None)),
        ("--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
         dict(moe_router_load_balancing_type="sinkhorn")),
        ("--num-experts 8 --moe-router-score-function sigmoid --moe-router-pre-softmax",
         dict(moe_router_pre_softmax=False)),
        ("--num-experts 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
         "--moe-router-bias-update-rate 0", dict(moe_router_bias_update_rate=0.0)),
        # 8 ranks with a whole expert each are 4 data-parallel ones times 2 tensor-parallel ones here.
        (f"{TP_EP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
         dict(expert_model_parallel_size=2, expert_tensor_parallel_size=None)),
        (f"{TP_EP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
         dict(expert_model_parallel_size=2)),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
         dict(num_layers_per_virtual_pipeline_stage=1, pipeline_schedule="interleaved")),
        ("--num-layers 6 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
         "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         dict(num_layers_per_virtual_pipeline_stage=2)),
        ("--rampup-batch-size '[8 8 100]' --global-batch-size 32", dict(rampup_batch_size=(8, 8, 100))),
        ("--step-batch-size-schedule 0:8 1K:16", dict(global_batch_size=16)),
        ("--override-opt-param-scheduler --most-recent-k 3",
         dict(override_opt_param_scheduler=True, save_keep_last=3)),
        ("--most-recent-k -1", dict(save_keep_last=None)),
        ("--num-layers 3 --num-experts 4 --moe-layer-freq '\"[0]*1+[1]*2\"'", dict(num_experts=4)),
        ("--train-tokens 1000", dict(train_iters=4)),  # a step has 8 * 32 tokens
        ("--train-tokens 100000", dict(train_iters=10)),
        # Steps of 8 samples: 8 and then 16 tokens, 24, 32.
        ("--curriculum-min-length 8 --curriculum-iters 6 --train-tokens 512", dict(train_iters=4)),
        ("--curriculum-min-length 8 --curriculum-iters 6 --train-tokens 513", dict(train_iters=5)),
        ("--pipeline-model-parallel-size 4 --global-batch-size 2", dict(pipeline_schedule="gpipe")),  # never full
        ("--pipeline-model-parallel-size 4 --global-batch-size 8", dict(pipeline_schedule="1f1b")),
    ],
)  # fmt: skip
def test_what_flags_set(flags, expected):
    settings = flat(SMALL + flags)
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("instead", "expected"),
    [
        (f"--train-data-path 3 a 7 b {BYTES}", dict(train_data_path=("3", "a", "7", "b"))),
        ("--data-path p --vocab-file v --merge-file m", dict(tokenizer_type="GPT2BPETokenizer")),  # Megatron's default
    ],
)
def test_data_and_their_tokenizer(instead, expected):
    settings = flat(SMALL.replace(MOCK, instead))
    assert {name: settings[name] for name in expected} == expected


def test_a_llama_gets_megatrons_sizes_and_parts_where_flags_leave_them_out():
    model = parse(f"{SMALL} --hidden-size 4096", "llama")[0].model
    assert model.ffn_hidden_size == 10880  # Megatron's int(8/3 * 4096 / 64) * 64
    assert (model.attention_dropout, model.hidden_dropout, model.num_query_groups) == (0, 0, 4)
    assert model.swiglu and model.disable_bias_linear and model.untie_embeddings_and_output_weights
    assert (model.normalization, model.position_embedding_type) == ("RMSNorm", "rope")
    # So narrow that 8/3 of it rounds down to 0: one multiple of 64, by the flags and by the model's own rule.
    assert flat(f"{SMALL} --hidden-size 16", "llama")["ffn_hidden_size"] == llama_config(1, 16, 1, 128).ffn_size == 64


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_embeddings_are_tied_as_asked(architecture):
    for ask, tied in {"": architecture == "gpt", "--tie": True, "--untie": False}.items():
        model = parse(f"{SMALL} {ask and f'{ask}-embeddings-and-output-weights'}", architecture)[0].model
        assert find_architecture(architecture).build_model(model, 100).config.tie_embeddings == tied
        assert model.tie_embeddings_and_output_weights != model.untie_embeddings_and_output_weights


def test_flags_override_the_preset():
    model = parse(f"--preset gpt-125m --num-layers 2 {ONE_STEP}")[0].model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 768, 12)
    for more, tied in ("", True), (" --untie-embeddings-and-output-weights", False):
        assert flat(f"--preset qwen3-0.6b {ONE_STEP}{more}", "llama")["tie_embeddings_and_output_weights"] == tied


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


@pytest.mark.parametrize(
    "words, exact", [("", False), ("--bf16", False), ("--fp16", True), ("--bf16 --loss-spike-factor 2", True)]
)
def test_loco_keeps_a_second_error_where_finite_steps_are_undone(words, exact):
    settings, _ = parse(SMALL + f"--zero-quantized-gradients --zeropp-loco {words}")
    assert settings.zeropp.loco.exact_undo == exact


def test_flags_of_a_deepspeed_launcher_and_of_logging_change_nothing():
    settings, notes = parse(
        SMALL + "--local_rank=3 --log-batch-size-to-tensorboard --log-optimizer-states-to-tensorboard --DDP-impl local "
        "--transformer-impl transformer_engine --ckpt-format torch_dist --fp8-param-gather "
        "--timing-log-level 1 "
        "--moe-expert-parallel-size 1 --num-experts 1 --moe-loss-coeff 0.01 --mlp-type residual"
    )
    assert settings == parse(SMALL)[0]
    assert [note.partition(" ")[0].rstrip(",") for note in notes] == [
        "--local_rank", "--log-batch-size-to-tensorboard", "--log-optimizer-states-to-tensorboard", "--DDP-impl",
        "--transformer-impl", "--ckpt-format", "--fp8-param-gather", "--timing-log-level",
        "--moe-expert-parallel-size",
    ]  # fmt: skip
    assert notes[-1] == (
        "--moe-expert-parallel-size, --num-experts, --moe-loss-coeff, --mlp-type are accepted but need no setting: "
        "there is one MLP, and so no experts"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp8-format hybrid", "tensorwise"),
        ("--fp8-e4m3", "rowwise"),
        ("--fp8 e4m3 --no-fp8-wgrad", "rowwise_with_gw_hp"),
        ("--fp8-format hybrid --fp8-recipe rowwise", "computes in e4m3 alone, not hybrid: give --fp8-format e4m3"),
        ("--fp8-format hybrid --fp8-recipe delayed", "is not supported: use --fp8-recipe tensorwise"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "is not supported: use --fp8-recipe rowwise"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "is not supported: use --fp8-recipe rowwise"),
        (
            "--num-layers 2 --fp8-format hybrid --first-last-layers-bf16",
            "--first-last-layers-bf16 leaves none of --num-layers 2",
        ),
        ("--fp8-format hybrid --seq-length 8", "a multiple of 16 tokens on a rank, not 8"),
        ("--fp8-format hybrid --seq-length 32 --curriculum-min-length 8 --curriculum-iters 2", "not 8"),
    ],
)
def test_float8_flags_choose_a_recipe_or_name_the_one_that_works(flags, expected):
    words = f"{SMALL} --bf16 --seq-length 16 --micro-batch-size 1 {flags}"
    if " " not in expected:
        assert parse(words)[0].precision.fp8_recipe == expected
        return
    with pytest.raises(SettingsError, match=re.escape(expected)):
        parse(words)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "there is one rank"),
        ("--tensor-model-parallel-size 2", "not known with --tensor-model-parallel-size 2"),
        ("--num-distributed-optimizer-instances 2", "not known with --num-distributed-optimizer-instances 2"),
        ("--zero-stage 0", "not known with --zero-stage 0"),
    ],
)
def test_stragglers_are_found_only_where_ranks_wait_in_fsdp_alone(flags, reason):
    settings, notes = parse(f"{SMALL} --log-straggler {flags}", world_size=4 if flags else 1)
    assert not settings.logging.log_straggler
    assert notes[0].startswith("--log-straggler has no effect: ") and notes[0].endswith(reason)
    settings, notes = parse(f"{SMALL} --log-straggler")
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


def test_defaults_of_megatron_deepspeeds_experts_are_as_there():
    settings, notes = parse(f"{SMALL} --num-experts 8 --moe-expert-parallel-size 1 --moe-loss-coeff 0.01")
    expected = dict(
        moe_router_topk=1, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.01, moe_layer_freq="2", moe_first_layer=2,
        moe_expert_capacity_factor=1.0, moe_eval_capacity_factor=1.0, moe_min_capacity=4,
    )  # fmt: skip
    assert settings.as_flat_dict().items() >= expected.items()
    assert any("what Megatron-DeepSpeed's experts leave unsaid is --moe-router-topk 1" in note for note in notes)


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
    assert flat(command + words)["train_samples"] == samples


def test_a_note_says_what_train_tokens_trains():
    for tokens, trained in (1000, 1024), (1024, None):  # a step is 8 * 32 tokens
        note = f"--train-tokens {tokens} ends with the step that reaches it, after {trained} tokens"
        for length in ("--train-iters 10", "--train-samples 80"):
            run = SMALL.replace("--train-iters 10", length)
            assert parse(f"{run} --train-tokens {tokens}")[1] == ([note] if trained else [])


def test_a_note_says_that_context_parallel_ranks_drop_other_tokens():
    experts = "--num-experts 2 --disable-bias-linear --moe-expert-capacity-factor 1"
    for ranks, size in (1, 1), (2, 2):
        _, notes = parse(f"{SMALL} {experts} --context-parallel-size {size}", GPT, ranks)
        assert sum("it drops other tokens than one rank would" in note for note in notes) == size - 1


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


def test_reference_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "reference" / "flags.md"
    assert page.read_text(encoding="utf-8") == render_reference(), (
        "run: python docs/flags_page.py docs/reference/flags.md"
    )


def test_a_flag_that_comes_or_goes_has_a_line_in_the_list_of_changes():
    listed: set[str] = set()
    for _, sign, names in flag_changes():
        assert listed.isdisjoint(names) if sign == "+" else listed.issuperset(names), names
        listed = listed | {*names} if sign == "+" else listed - {*names}
    assert listed == {flag.name for flag in all_flags().values()}, "list it in docs/reference/flag_changes.txt"


def test_the_stable_promise_is_one_that_can_be_kept():
    assert sum(flag.tier == "stable" for flag in all_flags().values()) <= 150
    assert {flag.tier for flag in all_flags().values()} == {"stable", "advanced", "experimental"}
