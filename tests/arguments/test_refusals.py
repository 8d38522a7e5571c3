"""Refusals and their words: flags that do not fit together, sizes beyond memory, files that never end."""

import os
import re
from pathlib import Path

import pytest

from megatron_zpp.commands.convert import import_hf
from megatron_zpp.commands.data import preprocess_data, train_tokenizer
from megatron_zpp.convert.hf.files import WeightFiles, from_hf_config
from megatron_zpp.families import ARCHITECTURES
from megatron_zpp.files import LARGEST_TEXT, read_text
from megatron_zpp.planning.cluster import read_cluster
from megatron_zpp.settings.flags import PATHS
from megatron_zpp.settings.groups import flags_by_name
from tests.arguments.parsing import BYTES, MOCK, SMALL, YARN, assert_words, mistakes, parse, refusal
from tests.convert.hf.small_models import CONFIGS, to_hf_config


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        # flags
        ("--micro-batchsize 1", "--micro-batchsize did you mean --micro-batch-size?"),
        ("--zero-quantised-weights", "did you mean --zero-quantized-weights?"),
        ("--use-flash-attention", "did you mean --use-flash-attn"),
        ("--zeropp-weight-rounding nearest", "--zeropp-weight-rounding (CHANGELOG.md lists flags that went)"),
        ("--no-position-embedding", "--no-position-embedding does not hold --position-embedding-type"),
        ("--model-parallel-size=1", "--tensor-model-parallel-size"),
        ("--kd --load-teacher x --num-layers-teacher 3", "--kd, --load-teacher, --num-layers-teacher distillation"),
        ("--load-studnt x", "unknown flag --load-studnt see --help"),  # and no flag that is only a little like it
        ("--layernorm-epsilon 0", "--norm-epsilon"),
        ("--layernorm-epsilon", "--layernorm-epsilon takes one value"),
        ("--enable-zbh1-pipeline 1", "--enable-zbh1-pipeline takes no value"),
        ("--data-parallel-sharding-strategy some", "no_shard, optim, optim_grads, optim_grads_params some"),
        ("--layernorm-epsilon 1e-3 --norm-epsilon 1e-4", "--layernorm-epsilon 1e-3 --norm-epsilon otherwise"),
        ("--dataloader-type external", "--dataloader-type external is not supported use single"),
        ("--dataloader-type twice", "twice single cyclic"),
        ("--num-experts 4 --moe-router-load-balancing-type global_aux_loss", "global_aux_loss is not supported"),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
         "--moe-aux-loss-coeff has no meaning with --moe-router-load-balancing-type sinkhorn"),
        ("--num-experts 4 --moe-router-load-balancing-type all_layers_aux_loss --pipeline-model-parallel-size 2",
         "needs all layers on one rank --pipeline-model-parallel-size"),
        ("--num-experts 4 --tensor-model-parallel-size 4 --expert-tensor-parallel-size 2",
         "--expert-model-parallel-size * --expert-tensor-parallel-size = 2 a multiple of 4"),
        ("--num-layers 4 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
         "--num-virtual-stages-per-pipeline-rank 2 does not divide 4 layers"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
         "--num-layers-per-virtual-pipeline-stage 1", "say the same give one"),
        ("--legacy-tokenizer --tokenizer-type SentencePieceTokenizer --tokenizer-model README.md",
         "--legacy-tokenizer does not hold for this run MegatronSentencePieceTokenizer"),
        ("--check-weight-hash-across-dp-replicas-interval 9 --zero-stage 1", "interval does not hold for this run"),
        ("--main-grads-dtype bf16", "--main-grads-dtype bf16 only fp32"),
        # Flags of Megatron's and DeepSpeed's that would ask for other memory or other numbers than the run has.
        ("--cpu-offload --optimizer-offload-fraction 0.5", "--optimizer-offload-fraction 0.5 is not supported only 1"),
        ("--fp8-margin 2", "--fp8-margin 2 is not supported, only 0"),
        ("--fp8-param-gather --zero-stage 2", "--fp8-param-gather does not hold at --zero-stage 3"),
        ("--optimizer muon --muon-fp32-matmul-prec highest", "--muon-fp32-matmul-prec highest only medium"),
        ("--num-experts 4 --moe-layer-recompute", "--moe-layer-recompute give selective --recompute-modules moe"),
        ("--tensor-model-parallel-size 2 --partition-activations", "does not hold --sequence-parallel"),
        ("--scattered-embeddings", "--scattered-embeddings use --sequence-parallel"),
        ("--rerun-mode report_stats", "--rerun-mode report_stats only disabled or validate_results"),
        ("--step-batch-size-schedule 0:8 --rampup-batch-size 4 4 8", "--rampup-batch-size give one"),
        ("--step-batch-size-schedule 0:8 --global-batch-size 16", "ends at 8 --global-batch-size 16"),
        ("--step-batch-size-schedule 8", "8 must be TOKENS:BATCH_SIZE"),
        ("--mtp-num-layers 1", "--mtp-num-layers multi-token prediction does not exist here"),
        ("--hybrid-layer-pattern M-M*", "--hybrid-layer-pattern Mamba do not exist here"),
        ("--use-distributed-optimizer --zero-stage 0", "--use-distributed-optimizer --zero-stage 1"),
        ("--rampup-batch-size 1 2", "--rampup-batch-size 3"),
        ("stray", "stray"),
        # batches, tokens, growing samples
        ("--global-batch-size 12", "12 2 4 8"),
        ("--global-batch-size 32 --rampup-batch-size 4 4 100", "4 during --rampup-batch-size is not divisible"),
        ("--train-samples 80", "--train-iters --train-samples"),
        ("--curriculum-min-length 8", "--curriculum-iters"),
        ("--curriculum-min-length 4 --curriculum-iters 3", "--curriculum-min-length at least 8"),
        ("--curriculum-min-length 64 --curriculum-iters 3", "--curriculum-min-length 64 --seq-length"),
        ("--curriculum-min-length 8 --curriculum-iters 3 --context-parallel-size 8 --dry-run --dry-run-world-size 8",
         "by 8 tokens to --seq-length 32 of 16"),
        ("--curriculum-min-length 8 --curriculum-iters 3 --reset-attention-mask", "--reset-attention-mask"),
        ("--weight-decay-incr-style cosine --start-weight-decay 0", "stays as --weight-decay says"),
        ("--lr-decay-tokens 64 --lr-decay-iters 4", "--lr-decay-tokens --lr-decay-iters"),
        ("--lr-warmup-tokens 64 --lr-warmup-iters 4", "give the warm-up once"),
        # network
        ("--num-attention-heads 3", "--hidden-size 64 --num-attention-heads 3"),
        ("--max-position-embeddings 16", "--seq-length 32 --max-position-embeddings 16"),
        ("--preset gpt-9t", "--preset gpt-9t gpt-125m"),
        ("--preset llama-8b", "pretrain_llama.py"),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 1, 2, 4"),
        ("--tensor-model-parallel-size 4 --num-attention-heads 2", "--num-attention-heads 1, 2"),
        ("--tensor-model-parallel-size 4 --ffn-hidden-size 6", "--ffn-hidden-size 1, 2"),
        ("--tensor-model-parallel-size 4 --sequence-parallel --seq-length 34", "--seq-length 1, 2"),
        ("--tensor-model-parallel-size 2 --compile", "--compile --tensor-model-parallel-size"),
        ("--pipeline-model-parallel-size 4 --global-batch-size 2 --pipeline-schedule 1f1b",
         "--pipeline-schedule 1f1b needs"),
        ("--disable-bias-linear --num-experts 8 --moe-router-topk 2 --topk 1",
         "--topk 1 is --moe-router-topk says otherwise"),
        ("--num-experts 8 --moe-min-capacity 4", "--moe-min-capacity needs --moe-expert-capacity-factor"),
        ("--num-layers 4 --num-experts 4 8 8", "--moe-experts-per-layer needs 4 numbers"),
        ("--num-experts 4 --moe-experts-per-layer 4,x", "must be numbers from 1 to 4, as 32,32,64"),
        ("--num-experts 4 --mlp-type standart", "--mlp-type must be one of standard, residual, got standart"),
        # optimizer, schedule, precision, recomputation
        ("--min-lr 1", "--min-lr --lr"),
        ("--lr-warmup-samples 5", "--lr-warmup-samples --lr-warmup-iters"),
        ("--lr-warmup-iters 10", "warm-up decay"),
        ("--lr-warmup-init 2", "--lr-warmup-init"),
        ("--lr-decay-samples 100", "--lr-decay-samples does not go with --train-iters; use --lr-decay-iters"),
        ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "give the warm-up once"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2", "must fit into"),
        ("--fp16 --initial-loss-scale 0.5", "--initial-loss-scale at least 1"),
        ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 --bf16"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16 exclude"),
        ("--checkpoint-activations --recompute-activations", "--recompute-granularity --recompute-activations"),
        ("--outer-dp-sharding-strategy optim", "leave out --num-distributed-optimizer-instances"),
        ("--recompute-num-layers 2", "--recompute-num-layers --recompute-granularity full"),
        ("--checkpoint-activations --recompute-num-layers 5", "--recompute-num-layers 5 4"),
        ("--cpu-offloading-num-layers 5", "--cpu-offloading-num-layers 5 is above --num-layers 4"),
        ("--cpu-offloading-num-layers 1 --recompute-activations", "use full, or --recompute-modules"),
        ("--cpu-offloading", "--cpu-offloading does not hold for this run --cpu-offloading-num-layers"),
        ("--checkpoint-in-cpu", "use --cpu-offloading-num-layers"),
        ("--optimizer muon --tensor-model-parallel-size 2", "muon leave --tensor-model-parallel-size out"),
        ("--optimizer muon --num-experts 2 --disable-bias-linear", "muon leave --num-experts out"),
        ("--optimizer muon --cpu-offload", "muon leave --cpu-offload out"),
        ("--optimizer muon --zero-stage 0", "--optimizer muon needs --zero-stage 1, 2 or 3"),
        ("--lora-rank 4", "--lora-rank needs --pretrained-checkpoint"),
        (
            "--lora-rank 4 --pretrained-checkpoint x --tensor-model-parallel-size 2",
            "leave tensor and pipeline parallelism, islands and experts out",
        ),
        ("--optimizer muon --muon-stale-rows", "give a --muon-period above 1"),
        ("--optimizer muon --muon-momentum-bits 7", "--muon-momentum-bits must be one of 1, 2, 3, 4"),
        # ZeRO++
        ("--zero-hpz-partition-size 3", "--zero-hpz-partition-size 3 4 1, 2, 4"),
        ("--zeropp-ranks-per-node 8", "--zeropp-ranks-per-node 8 4"),
        ("--zero-stage 0 --zero-quantized-weights", "--zero-quantized-weights --zero-stage 1"),
        ("--zero-stage 0 --zero-hpz-partition-size 2", "--zero-hpz-partition-size --zero-stage 1, 2 or 3"),
        ("--zero-quantized-weights --zeropp-weight-bits 7", "--zeropp-weight-bits 7"),
        ("--zero-quantized-gradients --zeropp-loco --zeropp-loco-beta 1", "beta 1"),
        ("--zero-hpz-partition-size 2 --zeropp-ranks-per-node 4",
         "--zero-hpz-partition-size 2 --zeropp-ranks-per-node 4"),
        ("--cpu-offload --zero-stage 0", "--cpu-offload moves shards to host memory, and --zero-stage 0 has none"),
        # HSDP
        ("--num-distributed-optimizer-instances 3", "--num-distributed-optimizer-instances 3 4 1, 2, 4"),
        ("--num-distributed-optimizer-instances 2 --zero-stage 0", "instances 2 --zero-stage 0 none"),
        ("--num-distributed-optimizer-instances 2 --zero-quantized-weights", "HSDP leave ZeRO++'s flags"),
        # data, checkpoints
        ("--data-path x", "--data-path --mock-data"),
        ("--hf-dataset x", "--mock-data and --hf-dataset both say where the data is give one"),
        ("--save out", "--save --save-interval"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_are_refused_with_what_to_give_instead(extra, words):
    assert_words(refusal(SMALL + extra), words)


@pytest.mark.parametrize(
    ("left_out", "instead", "words"),
    [
        ("--num-layers 4", "", "--num-layers --preset"),
        ("--micro-batch-size 2", "", "--micro-batch-size"),
        ("--seq-length 32", "", "--seq-length"),
        ("--lr 1e-3", "", "--lr"),
        ("--train-iters 10", "", "--train-iters --train-samples"),
        ("--mock-data", BYTES, "--data-path --mock-data"),
        ("--vocab-size 100", "", "--vocab-size --mock-data"),
        (MOCK, "--data-path p", "--tokenizer-type --vocab-file and --merge-file"),
        (MOCK, f"--split 9,1,0 --train-data-path x {BYTES}",
         "--split does not go with --train-data-path; leave one out"),
        (MOCK, f"--hf-dataset x --dataloader-type cyclic {BYTES}", "--dataloader-type does not go with --hf-dataset"),
        (MOCK, f"--hf-dataset x col=y {BYTES}", "--hf-dataset x col=y KEY=VALUE column"),
    ],
)  # fmt: skip
def test_a_flag_that_is_missing_is_named(left_out, instead, words):
    assert_words(refusal(SMALL.replace(left_out, instead)), words)


@pytest.mark.parametrize(
    ("architecture", "flags", "message"),
    [
        ("llama", "--num-query-groups 2", "--num-query-groups needs --group-query-attention"),
        ("llama", "--group-query-attention --num-query-groups 3", "--num-attention-heads 4 .*--num-query-groups 3"),
        ("llama", "--kv-channels 15", "even .*15"),
        ("llama", "--tie-embeddings-and-output-weights --untie-embeddings-and-output-weights", "--tie-.*--untie-.*one"),
        ("gpt", "--add-qkv-bias", "--add-qkv-bias adds nothing"),
        ("gpt", "--rotary-base 500000", "--rotary-base is of --position-embedding-type rope or yarn, "),
        ("gpt", "--use-rope-scaling", "--use-rope-scaling is of --position-embedding-type rope or yarn"),
        ("llama", "--position-embedding-type none --rotary-percent 0.5", "--rotary-percent is of --position"),
        ("llama", "--yarn-rotary-scaling-factor 4", "--yarn-rotary-scaling-factor is of --position-embedding-type y"),
        ("llama", "--rotary-percent 0.2", "even number of channels per head, got 3; .*--rotary-percent"),
        ("llama", "--rotary-percent 0.01", "even number of channels per head, got 0"),
        ("llama", "--position-embedding-type yarn", "yarn needs --yarn-rotary-scaling-factor"),
        ("llama", f"{YARN} --use-rope-scaling", "--use-rope-scaling and --position-embedding-type yarn exclude"),
        ("llama", f"{YARN} --rotary-base 1", "yarn needs a --rotary-base above 1"),
        ("llama", f"{YARN} --yarn-beta-slow 40", "--yarn-beta-fast 32 must be at least --yarn-beta-slow 40"),
        ("llama", "--window-size 4096", "--window-size 4096 must be LEFT,0"),
        ("llama", "--window-size 16,16", "--window-size 16,16 must be LEFT,0"),
        ("gpt", "--window-size 0,0", "--window-size 0,0 must be LEFT,0"),
    ],
)  # fmt: skip
def test_descriptions_of_a_network_that_make_no_sense_are_refused(architecture, flags, message):
    assert re.search(message, refusal(SMALL + flags, architecture))


def test_a_router_of_one_expert_learns_from_scores_of_all():
    flags = f"{SMALL} --num-experts 4 --moe-router-topk 1"
    assert "learns nothing: give --moe-router-pre-softmax too" in refusal(flags, "llama")
    for more in ("--moe-router-pre-softmax", "--moe-router-score-function sigmoid"):
        parse(f"{flags} {more}", "llama")


def test_sizes_are_checked_before_memory_is_asked_for():
    assert "--seq-length must be at most" in refusal(f"{SMALL} --seq-length 4000000000")
    with pytest.raises(ValueError, match="num_layers is 1000000000"):
        from_hf_config(to_hf_config(CONFIGS["llama"]) | {"num_hidden_layers": 10**9}, ARCHITECTURES)


def test_files_that_never_end_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    for read in (read_text, read_cluster):
        for path in (Path("/dev/zero"), tmp_path / "pipe"):
            with pytest.raises(ValueError, match="is no regular file"):
                read(path)
        with pytest.raises(ValueError, match="the limit is"):
            read(tmp_path / "large")
    assert "is no regular file" in refusal(f"{SMALL} --deepspeed_config /dev/zero")
    (tmp_path / "pipe").rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no regular file"):
        WeightFiles(tmp_path)


def test_every_flag_for_a_path_refuses_a_bucket():
    paths = {flag.name: flag for flag in flags_by_name().values() if flag.metavar in PATHS}
    assert {"--data-path", "--tokenizer-model", "--publish", "--tensorboard-dir"} <= {*paths}
    for name in paths:
        if "URL" in paths[name].metavar:  # or the run would save on a disk that nobody named
            for slip in ("s3:/bucket/a", "file:///data/a"):
                assert any(text.startswith(f"{name} must be a path") for text in mistakes(f"{SMALL} {name} {slip}"))
            continue
        for bucket in ("s3://bucket/a.b", "gs://bucket/a", "hdfs://host:8020/a"):
            (line,) = [text for text in mistakes(f"{SMALL} {name} {bucket}") if bucket in text]
            assert line.startswith(f"{name} must be a path on this machine (docs/how-to/buckets.md"), line
    parse(f"{SMALL} --save s3:x --save-interval 5")  # a folder may be called so


@pytest.mark.parametrize("tool", [import_hf, preprocess_data, train_tokenizer])
def test_tools_refuse_a_bucket_too(tool, capsys):
    with pytest.raises(SystemExit):
        tool.parse_arguments(["--input", "s3://bucket/a"])
    assert "argument --input: must be a path on this machine" in capsys.readouterr().err
