"""A decoder with all that flags can describe, in every layout: training equals one rank's."""

from __future__ import annotations

import pytest

from tests.parallel.layouts import EPS, assert_same, results_on
from tests.training.small_run import NO_DROPOUT, flags, write_text

SHAPE = (
    "--num-layers 2 --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --apply-layernorm-1p "
    "--qk-layernorm --disable-bias-linear --add-qkv-bias --window-size 5,0 --rotary-percent 0.5 "
    "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
)
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
TP, PP, CP = (f"--{kind}-parallel-size 2" for kind in ("tensor-model", "pipeline-model", "context"))
ON_TWO = {
    "tp": TP,
    "tp, sp": f"{TP} --sequence-parallel --recompute-activations",
    "pp": PP,
    "cp": CP,
    "cp, documents": f"{CP} {DOCUMENTS}",
}
ON_FOUR = {"tp with sp, cp, documents": f"{TP} --sequence-parallel {CP} {DOCUMENTS}", "pp, cp": f"{PP} {CP}"}


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "layouts"), [(2, ON_TWO), (4, ON_FOUR)], ids=["two", "four"])
def test_training_equals_one_rank(tmp_path, world_size, layouts):
    common = f"{SHAPE} {NO_DROPOUT} {EPS} --micro-batch-size 2 --log-params-norm"
    data = write_text(tmp_path)

    def runs(of: dict[str, str]) -> dict:
        return {name: ("gpt", flags(data, common, more, length="--train-iters 8")) for name, more in of.items()}

    expected = results_on(1, runs({"": "", "documents": DOCUMENTS}))
    for name, result in results_on(world_size, runs(layouts)).items():
        assert_same(result, expected["documents" if "documents" in name else ""], name)
    assert abs(expected[""][0]["lm loss"][-1] - expected["documents"][0]["lm loss"][-1]) > 1e-4
