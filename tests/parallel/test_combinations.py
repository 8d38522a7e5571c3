"""Kinds of parallelism beside each other, up to 8 ranks: training equals one rank's."""

from __future__ import annotations

import pytest

from tests.parallel.layouts import EPS, assert_same, results_on
from tests.training.small_run import NO_DROPOUT, flags, write_text

TP, PP, CP = (f"--{kind}-parallel-size 2" for kind in ("tensor-model", "pipeline-model", "context"))
SP = f"{TP} --sequence-parallel"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
LAYOUTS = {
    "tp 2, pp 2, dp 2": f"{TP} {PP}",
    "pp 2, cp 2, dp 2": f"{PP} {CP}",
    "tp 2 with sp, pp 2 of virtual stages, cp 2": f"{SP} {PP} {CP} --num-layers-per-virtual-pipeline-stage 1",
    "tp 2 with sp, pp 2, cp 2, documents": f"{SP} {PP} {CP} {DOCUMENTS}",
    "tp 2, cp 2, dp 2, documents": f"{TP} {CP} {DOCUMENTS} --zero-stage 2",
}


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_training_equals_one_rank(tmp_path, architecture):
    data = write_text(tmp_path)
    common = f"--train-iters 4 --global-batch-size 4 --num-layers 4 {NO_DROPOUT} {EPS} --log-params-norm"
    common += " --group-query-attention --num-query-groups 2" if architecture == "llama" else ""
    alone = {"": "", "documents": DOCUMENTS}
    layouts = LAYOUTS if architecture == "gpt" else {name: of for name, of in LAYOUTS.items() if "virtual" in name}
    argvs = [{name: (architecture, flags(data, common, of)) for name, of in each.items()} for each in (alone, layouts)]
    expected, results = results_on(1, argvs[0]), results_on(8, argvs[1])
    for name, result in results.items():
        assert_same(result, expected["documents" if "documents" in name else ""], name)
    assert abs(expected[""][0]["lm loss"][-1] - expected["documents"][0]["lm loss"][-1]) > 1e-3
