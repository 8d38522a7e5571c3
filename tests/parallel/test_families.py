"""Decoders of every kind train on several ranks as on one: latent attention, sinks, soft-caps, norms over all heads."""

import pytest

from tests.convert.hf.small_models import CONFIGS, POSITIONS
from tests.families.find import architecture_of
from tests.parallel.layouts import EPS, assert_trains_as_one_rank, train_runs
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags

SHAPE = f"--num-layers 4 --micro-batch-size 2 {EPS} {NO_DROPOUT} --lr-decay-style constant --log-params-norm"
DEEPSEEK = (
    f"{SHAPE} --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --qk-layernorm --rotary-scaling-factor 4 --mscale-all-dim 1 --num-experts 8 --moe-router-topk 4 "
    "--moe-layer-freq [0]+[1]*3 --moe-ffn-hidden-size 40 --moe-shared-expert-intermediate-size 24 "
    "--moe-shared-expert-gate --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
WINDOWS = "--window-size 6,0 --window-attn-skip-freq 2 --group-query-attention --num-query-groups 2"
GPT_OSS = (
    f"{SHAPE} {WINDOWS} --position-embedding-type rope --softmax-type learnable --quick-geglu --glu-linear-offset 1 "
    "--activation-func-clamp-value 1 --no-rope-freq 4"
)
GEMMA_AND_OLMO = (
    f"{SHAPE} {WINDOWS} --geglu --apply-layernorm-1p --qk-layernorm --qk-layernorm-whole --no-pre-norms "
    "--post-self-attn-layernorm --post-mlp-layernorm --embedding-multiplier 5.6 --residual-multiplier 0.5 "
    "--attn-logit-softcapping 2 --final-logit-softcapping 3 --logits-scaling 2 --softmax-scale 0.2 "
    "--rotary-base-local 100 --attention-bias --mlp-bias --use-parallel-residual"
)
TP2, PP2, CP2 = (f"--{kind}-parallel-size 2" for kind in ("tensor-model", "pipeline-model", "context"))
EP2 = "--expert-model-parallel-size 2"
GPT_OSS_LAYOUTS = {"tp, cp": f"{TP2} {CP2}", "tp, pp": f"{TP2} {PP2} --sequence-parallel"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "common", "layouts"),
    [
        ("llama", DEEPSEEK, {"tp, ep": f"{TP2} {EP2} --sequence-parallel", "tp, pp": f"{TP2} {PP2}", "cp": CP2}),
        pytest.param("gpt", GPT_OSS, GPT_OSS_LAYOUTS, marks=pytest.mark.evidence),
        ("llama", GEMMA_AND_OLMO, {"tp, cp": f"{TP2} {CP2} --sequence-parallel", "tp, pp": f"{TP2} {PP2}"}),
    ],
    ids=["deepseek", "gpt-oss", "gemma and olmo"],
)
def test_four_ranks_train_as_one(data, architecture, common, layouts):
    assert_trains_as_one_rank(data, architecture, f"{common} --train-iters 2", {4: layouts})


ZEROPP = "--zeropp int8 --zeropp-ranks-per-node 2"
# Their parameters have the names and dimensions of another family's, and ZeRO++ sees nothing else of a model.
SAME_PARAMETERS = """
    llama-grouped llama-yarn llama-biases mistral granite phi3 smollm3 seed-oss qwen3-moe-normalized olmoe minimax-m2
    olmo3 deepseek-v3 gemma gpt-neox
"""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SAME_PARAMETERS.split()])
def test_every_family_trains_with_all_of_zeropp_as_without_it(data, name):
    """Two steps on two nodes of two ranks, with low bits everywhere: losses stay within a percent of bf16's."""
    architecture = architecture_of(CONFIGS[name])
    words = architecture.flags(CONFIGS[name], POSITIONS)
    argv = [*flags(data, f"--bf16 --make-vocab-size-divisible-by 4 {NO_DROPOUT}", length="--train-iters 2"), *words]
    runs = {"plain": (architecture.name, argv), "zeropp": (architecture.name, [*argv, *ZEROPP.split()])}
    plain, zeropp = (metrics["lm loss"] for metrics, *_ in run_ranks(4, train_runs, runs)[0].values())
    assert len(zeropp) == 2 and zeropp != plain
    assert zeropp == pytest.approx(plain, rel=1e-2)
