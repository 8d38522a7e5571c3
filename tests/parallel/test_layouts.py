"""Every layout of ranks trains as one rank does; checkpoints move between them."""

import re
import subprocess
import sys

import pytest
import torch

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.checkpoint import find_checkpoint, iterate_parameters, iterate_tensors, read_meta
from megatron_zpp.families import GPT
from tests.parallel.layouts import EPS, assert_same, assert_trains_as_one_rank, results_on
from tests.training.small_run import NO_DROPOUT, ROOT, flags

TP, PP, CP = (f"--{kind}-parallel-size 2" for kind in ("tensor-model", "pipeline-model", "context"))
TP4, PP4 = TP.replace("2", "4"), PP.replace("2", "4")
SP = f"{TP} --sequence-parallel"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
ZERO_BUBBLE = "--pipeline-schedule zero-bubble"
REPLICAS = "--num-distributed-optimizer-instances 2"
POSITIONS = "--reset-attention-mask --reset-position-ids"
DOCUMENTS = f"{POSITIONS} --eod-mask-loss"
GQA = "--group-query-attention --num-query-groups 2"
UNTIED = "--untie-embeddings-and-output-weights"  # tokens that do not occur have gradients of zero then
TOKEN_MEAN = "--calculate-per-token-loss --recompute-granularity full --reset-attention-mask"

FOUR_LAYERS = f"--num-layers 4 {NO_DROPOUT} {EPS} --log-params-norm"
COMBINED = f"{FOUR_LAYERS} --train-iters 2 --global-batch-size 4"
VIRTUAL_CP = {8: {"tp 2 with sp, pp 2 of virtual stages, cp 2": f"{SP} {PP} {CP} {VIRTUAL}"}}
PIPELINES = f"--num-layers 4 --train-iters 2 --eval-interval 1 --log-params-norm {NO_DROPOUT}"
# All that flags can describe of a decoder.
DESCRIBED = (
    f"--num-layers 2 {GQA} --swiglu --normalization RMSNorm --apply-layernorm-1p "
    "--qk-layernorm --disable-bias-linear --add-qkv-bias --window-size 5,0 --rotary-percent 0.5 "
    "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 "
    f"{NO_DROPOUT} {EPS} --micro-batch-size 2 --log-params-norm --train-iters 2"
)
TENSORS = f"{NO_DROPOUT} {EPS} --log-params-norm --global-batch-size 4 --micro-batch-size 2 --train-iters 2"
EIGHT_HEADS = "--group-query-attention --num-query-groups 4 --num-attention-heads 8 --ffn-hidden-size 64"
ON_TWO = {2: {"tp": TP, "sp": SP}}
ON_FOUR = {
    4: {
        "tp": f"{TP4} --recompute-granularity full",
        "sp": f"{TP4} --sequence-parallel --recompute-granularity selective",
        "beside dp": f"{SP} --zero-stage 1 --calculate-per-token-loss",
    }
}
CONTEXTS = f"{NO_DROPOUT} --train-iters 2 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 {EPS}"
GPT_DOCUMENTS, LLAMA_DOCUMENTS = f"{DOCUMENTS} --recompute-granularity full", f"{DOCUMENTS} --calculate-per-token-loss"
GROWS = (
    f"--curriculum-min-length 8 --curriculum-iters 3 {FOUR_LAYERS} --train-iters 3 --train-tokens 100000 "
    "--lr-decay-tokens 700 --lr-warmup-tokens 200"
)


def contexts(plain: str, documents: str) -> dict[int, dict[str, str]]:
    """Layouts of context parallelism, without and with documents."""
    by = {"cp 4": CP.replace("2", "4"), "cp 2, tp 2": f"{CP} {SP}"}
    kinds = {"": plain, ", documents": documents}
    return {4: {f"{name}{kind}": f"{by[name]} {kinds[kind]}" for name in by for kind in kinds}}


CASES = {  # architecture, flags, layouts by number of ranks, and flags that one rank has too
    "combined": (
        *("gpt", COMBINED),
        {
            8: {
                "tp 2 with sp, pp 2, cp 2, documents": f"{SP} {PP} {CP} {DOCUMENTS}",
                "tp 2, cp 2, dp 2, documents": f"{TP} {CP} {DOCUMENTS} --zero-stage 2",
                **VIRTUAL_CP[8],
            }
        },
        DOCUMENTS,
    ),
    "combined llama": ("llama", f"{COMBINED} {GQA}", VIRTUAL_CP),
    "described": (
        *("gpt", DESCRIBED),
        {
            2: {
                "tp": TP,
                "sp": f"{SP} --recompute-activations",
                "pp": PP,
                "cp": CP,
                "cp, documents": f"{CP} {POSITIONS}",
            },
            4: {"tp with sp, cp, documents": f"{SP} {CP} {POSITIONS}", "pp, cp": f"{PP} {CP}"},
        },
        POSITIONS,
    ),
    # GPT's embeddings are tied, so the first and the last stage have a copy each.
    "two stages": (
        *("gpt", PIPELINES),
        {
            2: {
                "gpipe, stages of 3 and 1": f"{PP} --pipeline-schedule gpipe --decoder-first-pipeline-num-layers 3 "
                "--zero-stage 2",
                "zero-bubble, virtual": f"{PP} {ZERO_BUBBLE} {VIRTUAL} --zero-stage 1",
                "token mean, recomputed": f"{PP} {TOKEN_MEAN}",
                "1f1b": PP,
                "interleaved": f"{PP} {VIRTUAL}",
                "zero-bubble": f"{PP} {ZERO_BUBBLE}",
                "recomputed, zero-bubble": f"{PP} {ZERO_BUBBLE} --recompute-granularity full",
            }
        },
        TOKEN_MEAN,
    ),
    "stages on four ranks": (
        *("llama", f"{PIPELINES} {GQA}"),
        {
            4: {
                "1f1b": PP4,
                "gpipe": f"{PP4} --pipeline-schedule gpipe",
                "zero-bubble": f"{PP4} {ZERO_BUBBLE}",
                "pp 2 * dp 2, interleaved": f"{PP} {VIRTUAL} --zero-stage 2",
                "pp 2 * dp 2, zbv": f"{PP} {VIRTUAL} --pipeline-schedule zbv",
                "pp 2 * dp 2, stages of 1 and 3": f"{PP} --decoder-last-pipeline-num-layers 3 --zero-stage 1",
                "pp 2 * tp 2, sequence parallel, interleaved": f"{PP} {VIRTUAL} {SP}",
                "pp 2 * tp 2, zero-bubble": f"{PP} {TP} {ZERO_BUBBLE}",
            }
        },
    ),
    "tensors": ("gpt", TENSORS, ON_TWO | ON_FOUR),
    "tensors of llama": ("llama", f"{TENSORS} {EIGHT_HEADS} {POSITIONS}", ON_FOUR),
    "contexts": ("gpt", CONTEXTS, contexts("", GPT_DOCUMENTS), GPT_DOCUMENTS),
    "contexts of llama": (
        *("llama", f"{CONTEXTS} {GQA}"),
        contexts("--recompute-activations", f"{LLAMA_DOCUMENTS} --zero-stage 2"),
        LLAMA_DOCUMENTS,
    ),
    "plain data parallelism": (
        *("gpt", f"{FOUR_LAYERS} --train-iters 2 --zero-stage 0"),
        {4: {"sp": SP, "pp": PP, "cp": CP}},
    ),
    "replicas": (
        *("gpt", f"{FOUR_LAYERS} --train-iters 2"),
        {
            8: {
                "sp, cp": f"{REPLICAS} {SP} {CP}",
                "pp": f"{REPLICAS} {PP} --zero-stage 2",
                "tp, pp, zero-bubble": f"{REPLICAS} {TP} {PP} {ZERO_BUBBLE}",
            }
        },
    ),
    "growing samples": ("gpt", GROWS, {4: {"pp": PP, "sp": f"{SP} --zero-stage 0", "cp": CP}}),
}


# Other cases find what these do.
MORE = {"combined llama", "stages on four ranks", "described", "tensors of llama", "contexts of llama"}


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.evidence if case in MORE else ()) for case in CASES]
)
def test_training_equals_one_rank(data, case):
    architecture, common, layouts, *changing = CASES[case]
    assert_trains_as_one_rank(data, architecture, common, layouts, changing=tuple(changing))


def test_tensor_parallel_training_equals_one_rank(data):
    assert_trains_as_one_rank(data, "llama", f"{TENSORS} {EIGHT_HEADS} {POSITIONS}", ON_TWO)


def test_norms_and_zeros_are_those_of_one_rank(data):
    layouts = {
        "tensor parallelism": TP,
        "sequence parallelism": f"{SP} {UNTIED}",
        "pipeline with tied embeddings": PP,
        "pipeline": f"{PP} {UNTIED}",
        "context parallelism": CP,
        "replicas": f"--zero-stage 0 {UNTIED}",
        "shards": f"--zero-stage 3 {UNTIED}",
    }
    common = f"{NO_DROPOUT} {EPS} --log-params-norm --log-num-zeros-in-grad --train-iters 1 --eval-iters 0"
    one = assert_trains_as_one_rank(data, "gpt", common, {2: layouts}, changing=(UNTIED,), also=("num-zeros",))
    assert one[""][0]["grad-norm"][0] > 1.0 and one[UNTIED][0]["num-zeros"][0] > 1000 > one[""][0]["num-zeros"][0]


EXPERTS = (
    f"--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 40 --micro-batch-size 2 {EPS} --lr-decay-style constant "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"
)
EP, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
SAVED = f"{NO_DROPOUT} {EPS} --train-iters 4 --save-interval 1 --no-async-save"
MOVES = {  # architecture, flags of all runs; of each run its own, and the run whose checkpoint it loads
    "contexts": ("gpt", SAVED, {"cp 2": (CP, "whole"), "dp 4": ("", "cp 2")}),
    "replicas": ("gpt", SAVED, {"hsdp": (f"{REPLICAS} --zeropp-ranks-per-node 2", "whole"), "dp 4": ("", "hsdp")}),
    "tensors": (
        *("llama", f"{SAVED} --global-batch-size 4 {EIGHT_HEADS} {POSITIONS}"),
        {"tp 4": (TP4, "whole"), "sp": (SP, "whole"), "sp to tp 4": (TP4, "sp"), "dp 4": ("", "sp")},
    ),
    "pipelines": (
        *("gpt", f"{SAVED} --num-layers 4"),
        {
            "pp 4": (PP4, "whole"),
            "virtual": (f"{PP} {VIRTUAL}", "whole"),
            "virtual to pp 2": (f"{PP} --zero-stage 1", "virtual"),
            "virtual to dp 4": ("", "virtual"),
            "virtual to pp 2 * tp 2": (f"{PP} {TP}", "virtual"),
        },
    ),
    "experts": (
        *("llama", f"{SAVED} {EXPERTS}"),
        {
            "ep 2": (EP, "whole"),
            "ep 2 to ep 4": (EP4, "ep 2"),
            "ep 2 to tp 2, ep 2": (f"{EP} {TP}", "ep 2"),
            "ep 2 to pp 2, ep 2": (f"{EP} {PP}", "ep 2"),
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", MOVES)
def test_checkpoints_move_between_layouts(data, tmp_path, case):
    architecture, common, moves = MOVES[case]
    runs = {"whole": (architecture, flags(data, common, f"--save {tmp_path / 'whole'}"))}
    for name, (more, source) in moves.items():
        to, of = (tmp_path / folder.replace(" ", "_") for folder in (name, source))
        words = f"--save {to} --load {of} --ckpt-step {2 if source == 'whole' else 3}"
        runs[name] = architecture, flags(data, common, more, words)
    results = results_on(4, runs)
    whole = results.pop("whole")
    odd = find_checkpoint(str(tmp_path / "whole"), 3)  # after an even number of steps a bias may be 0 again
    tensors = iterate_tensors(odd, read_meta(odd), "model.")
    biases = [value for name, value in tensors if name.endswith("expert_bias")]
    assert len(biases) == (4 if case == "experts" else 0) and any(bias.any() for bias in biases) == (case == "experts")
    saved = find_checkpoint(str(tmp_path / "whole"), 4)
    parameters = dict(iterate_parameters(saved, read_meta(saved)))
    for name, result in results.items():
        assert len(result[0]["lm loss"]) == (2 if moves[name][1] == "whole" else 1), name
        assert_same(result, whole, name)
        other = find_checkpoint(str(tmp_path / name.replace(" ", "_")), 4)  # the tools read it as any other
        torch.testing.assert_close(dict(iterate_parameters(other, read_meta(other))), parameters, rtol=0, atol=1e-5)
        if case in ("contexts", "replicas"):  # each shard is written once
            size, expected = (sum(file.stat().st_size for file in of.rglob("*.safetensors")) for of in (other, saved))
            assert size == pytest.approx(expected, rel=0.1)
    if case == "tensors":
        assert "random states start over: 4 ranks saved, 4 load, divided otherwise" in results["tp 4"][2]
    if case == "pipelines":
        command = f"tools/export_hf.py --load {tmp_path / 'virtual'} --output {tmp_path / 'hf'}"
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)
        assert (tmp_path / "hf" / "model.safetensors").exists()


SIX, EIGHT = f"--num-layers 6 {PP4}", f"--num-layers 8 {PP4}"
REFUSED = [  # ranks, flags, what the error says
    (
        *(8, "--seq-length 36 --context-parallel-size 4"),
        "--seq-length 36 is not a multiple of 2 * --context-parallel-size 4; choose another "
        "length, or a --context-parallel-size of 1, 2, 3, 6, 9, 18",
    ),
    (8, "--context-parallel-size 3", "does not divide the 8 rank(s) of this run"),
    (8, "--context-parallel-size 2 --global-batch-size 6", "micro-batch size 1 * data-parallel size 4"),
    (4, SIX, "--num-layers 6 cannot be split for --pipeline-model-parallel-size 4: 6 layers are not divisible by 4"),
    (4, f"{SIX} --decoder-first-pipeline-num-layers 5", "1 layers are not divisible by 3 pipeline ranks"),
    (4, f"{SIX} --pipeline-schedule interleaved", "give their layers by --num-layers-per-virtual"),
    (
        *(4, f"{EIGHT} --global-batch-size 3 --pipeline-schedule 1f1b"),
        "1f1b needs at least as many micro-batches as its 4 stages",
    ),
    (4, f"{EIGHT} {VIRTUAL} --global-batch-size 9", "9 micro-batches do not divide into 2 rounds"),
    (4, f"{SIX} {VIRTUAL} --decoder-last-pipeline-num-layers 2", "exclude each other"),
    (4, f"{EIGHT} {VIRTUAL} --pipeline-schedule gpipe", "has one stage on each rank"),
    (4, f"{EIGHT} {VIRTUAL} --pipeline-schedule zbv", "cannot tie embeddings"),
    (
        4,
        f"{PP4} --num-layers 12 {VIRTUAL} --pipeline-schedule zbv",
        "--num-layers-per-virtual-pipeline-stage must be --num-layers / 8",
    ),
    (4, f"{EIGHT} {ZERO_BUBBLE} --compile", "leave one out"),
    (
        *(4, f"{PP4} --num-layers 4 --recompute-granularity full --recompute-num-layers 2"),
        "the smallest stage has 1; give at most 1",
    ),
    (4, "--pipeline-schedule gpipe", "needs --pipeline-model-parallel-size above 1"),
    (4, "--num-layers 6 --pipeline-model-parallel-size 3", "choose sizes whose product is one of 1, 2, 4"),
    (None, "--local-ranks 8 --local-nodes 2 --zero-hpz-partition-size 2", "must be 4 or 1"),
    (None, "--local-ranks 8 --local-nodes 2 --zeropp-ranks-per-node 2", "4 or left out"),
]


@pytest.mark.parametrize(("ranks", "more", "message"), REFUSED)
def test_what_does_not_divide_is_refused(ranks, more, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        parse_settings(GPT, flags("nowhere", more), world_size=ranks)
