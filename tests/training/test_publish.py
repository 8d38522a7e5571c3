"""A run publishes its weights in every layout of ranks, and goes on after a restart."""

import json
from functools import partial

import pytest
import torch

from megatron_zpp.publish import WeightReader
from tests.conftest import fill
from tests.parallel.layouts import results_on
from tests.ranks import run_ranks
from tests.training.small_run import call_pretrain, flags

EXPERTS = (
    "--num-experts 4 --moe-layer-freq 2 --disable-bias-linear --expert-model-parallel-size 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
LAYOUTS = {
    "all flags": "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --bf16",
    "zero 1": "--zero-stage 1 --zeropp int8 --zeropp-ranks-per-node 2 --bf16",
    "zero 0, fp16": "--zero-stage 0 --fp16",
    "replicas": "--num-distributed-optimizer-instances 2",
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp, tied": "--pipeline-model-parallel-size 2",
    "experts": EXPERTS,
}


@pytest.mark.long
def test_every_layout_publishes_the_whole_model(data, tmp_path):
    published = f"--train-iters 3 --publish {tmp_path}"
    folders = {name: str(number) for number, name in enumerate(LAYOUTS)}
    argvs = {name: flags(data, f"{published}/{folders[name]} {more}") for name, more in LAYOUTS.items()}
    for name, (_, weights, _) in results_on(4, {name: ("gpt", argv) for name, argv in argvs.items()}).items():
        reader = WeightReader(tmp_path / folders[name])
        assert reader.update() and (reader.version, reader.step) == (4, 3)
        seen = dict(reader.tensors())
        assert seen.keys() | {"output_layer.weight"} == weights.keys() | {"output_layer.weight"}  # may be tied
        for key, tensor in seen.items():
            expected = weights[key] if "expert_bias" in key else weights[key].to(tensor.dtype)
            assert torch.equal(tensor, expected), f"{name}, {key}"
        dtypes = {tensor.dtype for key, tensor in seen.items() if "expert_bias" not in key}
        assert dtypes == {torch.float16 if "fp16" in name else torch.bfloat16}


def test_a_run_goes_on_where_it_published_and_no_other_one_does(data, tmp_path):
    weights = tmp_path / "weights"
    run = partial(flags, data, f"--publish {weights} --publish-interval 2 --save {tmp_path}/run --save-interval 2")
    first = run("--exit-interval 2", length="--train-iters 5")
    again, other = run(f"--load {tmp_path}/run", length="--train-iters 5"), flags(data, f"--publish {weights}")
    ((stopped, refused, went_on),) = run_ranks(1, call_pretrain, first, other, again)
    assert stopped[0] == went_on[0] == 0, stopped[2] + went_on[2]
    assert refused[0] == 2 and refused[2].count("\n") == 1
    assert f"error: --publish {weights}: {weights} holds weights of another run, up to version 2: give an" in refused[2]
    reader = WeightReader(weights)
    assert reader.update() and (reader.version, reader.step) == (5, 5)  # published: steps 0, 2; 2, 4, 5
    assert reader.about["model_config"]["num_layers"] == 2
    described = [json.loads(path.read_text())["about"] != {} for path in sorted(weights.glob("v*.json"))]
    assert described[0] and not all(described)  # what comes after an anchor leaves it to that


def test_a_full_publish_disk_ends_no_resume(data, small_disk, tmp_path):
    """A new run says at once that it cannot publish. One that resumes trains on, and publishes when there is room.

    One that ends without having published its last weights ends with an error.
    """
    common = (
        f"--publish {small_disk} --publish-interval 1 --save {tmp_path}/run --load {tmp_path}/run --save-interval 9"
    )
    argv, disk = flags(data, common, "--eval-iters 0 --exit-interval 2", length="--train-iters 6"), str(small_disk)
    filler, reader = fill(small_disk), WeightReader(small_disk)
    ((refused,),) = run_ranks(1, call_pretrain, argv)
    assert refused[0] == 2 and refused[2].count("\n") == 1
    assert f"error: --publish {disk}: cannot " in refused[2] and "No space left on device" in refused[2]
    filler.unlink()
    ((begun,),) = run_ranks(1, call_pretrain, argv)
    filler = fill(small_disk)
    ((full,),) = run_ranks(1, call_pretrain, argv)
    assert begun[0] == full[0] == 0 and (tmp_path / "run/iter_0000004").is_dir(), begun[2] + full[2]
    assert full[2].count(f"NOT PUBLISHED (--publish {disk}): cannot publish weights as {disk}/v") == 3
    assert "[Errno" not in full[2] and reader.update() and reader.step == 2
    ((lost,),) = run_ranks(1, call_pretrain, [*argv, "--save", f"{tmp_path}/other"])
    assert lost[0] != 0 and (tmp_path / "other/iter_0000006").is_dir()
    assert "the last weights were not published, for the reason above" in lost[2]
    filler.unlink()
    ((ended,),) = run_ranks(1, call_pretrain, argv)
    assert ended[0] == 0 and reader.update() and reader.step == 6 and reader.about["settings"]
