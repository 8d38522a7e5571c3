"""What tools/estimate.py counts is what real ranks then have and send."""

import gc
import itertools
import os
import shlex
import statistics
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.commands import estimate
from megatron_zpp.families.gpt import GPT
from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing
from megatron_zpp.models.activation_offload import ActivationOffload
from megatron_zpp.models.init import init_weights
from megatron_zpp.models.transformer import as_model_output
from megatron_zpp.planning.cluster import parse_cluster
from megatron_zpp.planning.needs.estimate import Estimate, RankEstimate
from megatron_zpp.planning.predict import Prediction, predict
from megatron_zpp.planning.search import WIRES
from megatron_zpp.zeropp.fsdp.fsdp_unit import FSDPUnit
from megatron_zpp.zeropp.reduce.loco import NodeSum
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, train_each, train_quietly

SHAPE = "--hidden-size 72 --num-attention-heads 3 --micro-batch-size 1 --bf16 --distributed-backend gloo"
ALL_FLAGS = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients"
REPLICAS = "--num-distributed-optimizer-instances"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear"
RECIPES = {
    "ZeRO-3": "--zeropp-ranks-per-node 2 --grad-reduce-in-bf16",
    "ZeRO-2": "--zero-stage 2 --zeropp-ranks-per-node 2",
    "ZeRO-2 with hpZ": f"{ALL_FLAGS} --zero-stage 2 --zeropp-loco",
    "ZeRO-1": "--zero-stage 1 --zeropp-ranks-per-node 2 --optimizer sgd",
    "ZeRO-1 with qgZ": "--zero-stage 1 --zeropp-ranks-per-node 2 --zero-quantized-gradients",
    "qwZ": "--zero-quantized-weights --zeropp-weight-bits 6 --zeropp-ranks-per-node 2",
    "hpZ": "--zero-hpz-partition-size 2",
    "all": f"{ALL_FLAGS} --zeropp-weight-block-size 0",
    "LoCo, both hops": f"{ALL_FLAGS} --zeropp-loco --zeropp-loco-hops both --zeropp-secondary-dtype int8",
    "more bits at first": f"{ALL_FLAGS} --zeropp-loco --zeropp-loco-error-dtype bf16 "
    "--zeropp-gradient-bits 2 --zeropp-scale-dtype bf16 --zeropp-gradient-bits-warmup 2:8",
    "least memory": f"{ALL_FLAGS} --zeropp-loco --zeropp-secondary-dtype int8 --zeropp-gradient-sum-dtype int8",
    "copies in host memory": f"{ALL_FLAGS} --zeropp-weight-moves --zeropp-offload copies",
    "16-bit copies in host memory": "--zero-hpz-partition-size 2 --zeropp-offload copies",
    "copies on each card": "--zero-hpz-partition-size 2 --zeropp-weight-moves --zeropp-weight-copies card",
    "scales of elements": f"{ALL_FLAGS} --zeropp-gradient-bits 2 --zeropp-gradient-element-scales",
    "Muon": f"{ALL_FLAGS} --optimizer muon --muon-momentum-bits 4",
    "undone steps": f"{ALL_FLAGS} --zeropp-loco --loss-spike-factor 1000 --zeropp-gradient-sum-dtype bf16 "
    "--zeropp-offload all",
    "HSDP, a replica on each node": f"{REPLICAS} 2 --zeropp-ranks-per-node 2 --micro-batch-size 2",
    "HSDP, several on a node": f"{REPLICAS} 4 --zeropp-ranks-per-node 2 --zero-stage 2 --grad-reduce-in-bf16",
    "HSDP, each over two nodes": f"{REPLICAS} 2 --zeropp-ranks-per-node 1",
    "experts divided in a node": f"{EXPERTS} {ALL_FLAGS} --zeropp-loco --zeropp-loco-hops both",
    "experts divided, ZeRO-3": f"{EXPERTS} --zeropp-ranks-per-node 2",
    "LoCo on one node": "--zero-quantized-gradients --zeropp-loco --zeropp-loco-hops both --zeropp-ranks-per-node 4",
}
# What the planner tries.
RECIPES |= {f"planner: {way.name}": f"--zeropp-ranks-per-node 2 {way.flags.format(N=2)}" for way in WIRES}
KINDS = ("parameters", "state", "secondary", "summed", "LoCo", "scales")
_WITH_ADDED = NodeSum.with_added
CLUSTERS = {  # the others: 2 nodes of 2 ranks
    "LoCo on one node": ["--nodes", "1", "--ranks-per-node", "4"],
    "HSDP, each over two nodes": ["--nodes", "4", "--ranks-per-node", "1"],
}


def timed(argv: list[str], *more: str) -> Prediction:
    cluster = ["--nodes", "2", "--ranks-per-node", "2", "--vocabulary", "257", *more]
    return estimate.run(estimate.parse_arguments([*cluster, "pretrain_gpt.py", *argv]))


def sent_bytes(plan: Estimate) -> list[int]:
    """Return the bytes between and within nodes, without tokens, which the log counts apart."""
    sent = (plan.sent_between_nodes, plan.sent_within_nodes)
    return [sum(nbytes for what, nbytes in per_link.items() if what != "tokens") for per_link in sent]


def kept_bytes(rank: RankEstimate) -> dict[str, int]:
    """Return the bytes that a rank keeps, by the kinds of ``_measured``."""
    states = [*rank.states.items(), *rank.host.items()]
    return {kind: sum(size for name, size in states if kind in name and not name.startswith("all")) for kind in KINDS}


def _measured(runs: dict[str, list[str]]) -> dict[str, tuple[int, list[float], dict[str, int], list[float]]]:
    """Train each run; return its parameters, the bytes of its last step between and within nodes, the bytes that this
    rank keeps, by kind, and the mean bytes of tokens between and within nodes."""
    found = {}
    for name, argv in runs.items():
        run, metrics = start(argv)
        sums: dict[FSDPUnit, int] = {}  # bytes of each between two micro-batches

        def with_added(node_sum: NodeSum, *arguments: Any, sums: dict[FSDPUnit, int] = sums) -> NodeSum:
            node_sum = _WITH_ADDED(node_sum, *arguments)
            sums[node_sum.unit] = _nbytes(node_sum.kept)
            return node_sum

        with patch.object(NodeSum, "with_added", with_added):
            train_quietly(run)
        zeropp = run.zeropp
        assert zeropp is not None
        roots = run.pipeline.stages.values() if run.pipeline is not None else [run.model]
        for module in (module for root in roots for module in root.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # the evaluation at the end leaves the root gathered, and below stage 3 all
        reductions = [unit.reduce_scatter for unit in zeropp.units if hasattr(unit.reduce_scatter, "hops")]
        hops = [hop for reduction in reductions for hop in reduction.hops.values()]
        before = [hop for reduction in reductions for hop in reduction._before_step.values()]
        feedbacks = [hop.feedback for hop in (*hops, *before) if hop.feedback is not None]
        scales = [hop.scales for hop in hops if hop.scales is not None]
        copies = [getattr(unit.all_gather, "secondary_partition", None) for unit in zeropp.units]
        values = [value for state in run.optimizer.state.values() for value in state.values()]
        moments = [_local(value) for value in values if torch.is_tensor(value) and value.dim() > 0]
        sent_scales = [tensor for s in scales for tensor in (s.exponents, *(wires for _, wires in s.wires))]
        kept = {
            "parameters": sum(_local(p).nbytes for p in run.model.parameters()),
            "state": sum(moment.nbytes for moment in moments),
            "secondary": _nbytes(*copies),
            "summed": sum(sums.values()),
            "LoCo": _nbytes(*(feedback.error for feedback in feedbacks)),
            "scales": _nbytes(*sent_scales),
        }
        links = ("between", "within")
        sent = [metrics[f"comm/bytes-{link}-nodes"][-1] for link in links]
        # A router does not spread tokens evenly in every step.
        tokens = [statistics.fmean(metrics.get(f"comm/token-bytes-{link}-nodes", [0])) for link in links]
        found[name] = (sum(p.numel() for p in run.model.parameters()), sent, kept, tokens)
    return found


def _nbytes(*tensors: torch.Tensor | None) -> int:
    """Return the bytes of their memory, which several may share."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.long
def test_memory_and_bytes_are_those_of_real_ranks(data):
    runs = {name: flags(data, SHAPE, recipe, length="--train-iters 3") for name, recipe in RECIPES.items()}
    ranks = run_ranks(4, _measured, runs, timeout=600)
    for name, argv in runs.items():
        plan = timed(argv, *CLUSTERS.get(name, [])).needs
        parameters, sent, kept, _ = ranks[0][name]
        assert plan.parameters == parameters
        # Moves are planned with the mean of a whole run; most codes move at its beginning.
        expected = pytest.approx(sent, rel=0.5 if {"--zeropp-weight-moves", "--zeropp"} & {*argv} else 1e-6)
        assert sent_bytes(plan) == expected, name
        assert kept_bytes(plan.ranks[0]) == kept, name


DEEP = "--num-layers 4 --untie-embeddings-and-output-weights --max-position-embeddings 32"
LOW_BITS = "--zero-quantized-weights --zero-quantized-gradients --zeropp-loco"
MIXED = "--num-experts 4 --disable-bias-linear"
MODEL_PARALLEL = {  # on 2 nodes of 2 ranks
    "tensor parallel": "--tensor-model-parallel-size 2 --swiglu --group-query-attention --num-query-groups 2",
    "tensor and sequence parallel": f"--tensor-model-parallel-size 2 --sequence-parallel {LOW_BITS}",
    "context parallel": f"--context-parallel-size 2 {LOW_BITS} --zero-hpz-partition-size 2",
    "a pipeline over nodes": "--pipeline-model-parallel-size 2 --global-batch-size 8",
    "a pipeline of virtual stages": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "a pipeline without bubbles": "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
    "experts over nodes": f"{MIXED} --expert-model-parallel-size 4 {LOW_BITS} --zero-hpz-partition-size 2",
    "experts over nodes, few bits": f"{MIXED} --expert-model-parallel-size 4 --moe-token-bits 4 "
    "--recompute-activations",
    "experts beside tensor parallelism": f"{MIXED} --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
    f"{LOW_BITS}",
    "experts by tensor parallelism": f"{MIXED} --tensor-model-parallel-size 2 --sequence-parallel --moe-layer-freq 2",
    "experts in a pipeline": f"{MIXED} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def _measured_on_nodes_of_two(runs: dict[str, list[str]]) -> Any:
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    return _measured(runs)


@pytest.mark.long
def test_model_parallelism_divides_what_is_kept_and_sent(data):
    shape = SHAPE.replace("--num-attention-heads 3", "--num-attention-heads 4")
    runs = {name: flags(data, shape, DEEP, way, length="--train-iters 3") for name, way in MODEL_PARALLEL.items()}
    ranks = run_ranks(4, _measured_on_nodes_of_two, runs, timeout=600)
    for name, argv in runs.items():
        plan = timed(argv).needs
        assert sent_bytes(plan) == pytest.approx(ranks[0][name][1], rel=1e-6), name
        tokens = [per_link.get("tokens", 0) for per_link in (plan.sent_between_nodes, plan.sent_within_nodes)]
        assert tokens == pytest.approx(ranks[0][name][3], rel=0.1), name
        for number, rank in enumerate(plan.ranks):
            assert kept_bytes(rank) == ranks[number * 4 // len(plan.ranks)][name][2], (name, number)


LAYERS = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 8 --bf16 "
    "--distributed-backend gloo --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
)
PEAKS = ("ZeRO-3", "all", "least memory")
# Both ends are larger than a layer, and units of their own.
LARGE_ENDS = "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 4096"


def _peaks(runs: dict[str, list[str]]) -> dict[str, int]:
    """Return for each run the most bytes that this rank had allocated at once, by torch's count of allocations."""
    wait, peaks = dist.Work.wait, {}

    def wait_and_settle(work: dist.Work, *arguments: Any) -> bool:
        """A thread of gloo lets go of a collective's buffers when it is done with it, a little after this rank."""
        result = wait(work, *arguments)
        time.sleep(0.01)
        return result

    for name, argv in runs.items():
        profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with profiled as counted, patch.object(dist.Work, "wait", wait_and_settle):
            run, _ = start(argv)
            train_quietly(run)
        events = [e for e in counted.profiler.kineto_results.events() if e.name() == "[memory]"]
        peaks[name] = max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
        del run, counted
        gc.collect()  # a model and its hooks hold each other, and what is freed later would count for the next run
    return peaks


@pytest.mark.long
def test_peaks_of_memory_are_within_five_percent_of_those_of_real_ranks(data):
    kinds = {name: f"{LARGE_ENDS} {RECIPES[name]}" for name in PEAKS} | {"tied": RECIPES["all"]}
    runs = {name: flags(data, LAYERS, kind, length="--train-iters 3") for name, kind in kinds.items()}
    expected = {name: timed(argv).needs.memory for name, argv in runs.items()}
    for peaks in run_ranks(4, _peaks, runs, timeout=600):
        assert peaks == pytest.approx(expected, rel=0.05)


class Results(TorchDispatchMode):
    """Finds which results of operators are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, with bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def nbytes(self) -> int:
        return sum(nbytes for reference, nbytes in self.storages.values() if not reference.expired())


RECOMPUTED = "--recompute-granularity full"
MIXTURE = (
    "--disable-bias-linear --swiglu --num-experts 4 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 80"
)
PLAIN = "--attn-logit-softcapping 30 --softmax-type learnable"


SMALL = "--num-layers 5 --hidden-size 72 --num-attention-heads 3 --seq-length 64 --max-position-embeddings 64"
SMALL += " --attention-dropout 0 --micro-batch-size 2 --bf16 --lr 1 --train-iters 1 --mock-data --vocab-size 257"


def planned_and_kept(words: str) -> tuple[int, int]:
    """Bytes of activations as estimated, and those that are in memory after a forward pass, weights aside."""
    needs, kept, _ = needs_and_kept(words)
    return needs.largest.working["activations"], kept


def needs_and_kept(words: str) -> tuple[Estimate, int, int]:
    """What a run needs, and the bytes of activations after a forward pass: on the device, and in host memory."""
    argv = shlex.split(f"--vocabulary 257 --ranks-per-node 1 pretrain_gpt.py {SMALL} {words}")
    needs = estimate.run(estimate.parse_arguments(argv)).needs
    model = GPT.build_model(needs.settings.model, 257).to_empty(device="cpu").bfloat16()
    init_weights(model, 1)
    recompute = needs.settings.activation
    if recompute.recompute_granularity is not None:
        apply_activation_checkpointing(
            *(model, recompute.recompute_granularity, recompute.recompute_method, recompute.recompute_num_layers),
            modules=recompute.recompute_modules or (),
        )
    offload = ActivationOffload()
    offload.apply(model.layers, recompute.cpu_offloading_num_layers)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with Results() as results:
        output = as_model_output(model(tokens, tokens))
    assert output.losses.requires_grad  # and so holds on to what its backward pass needs
    in_host, block_pass = 0, offload._near[0] if offload._near else None
    while block_pass is not None:
        in_host += sum(flat.nbytes for flat in block_pass.in_host)
        block_pass = block_pass.previous()
    return needs, results.nbytes() - in_host, in_host


OFFLOADED = "activations of offloaded layers (about)"


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        ("", 0.1),
        # Rotary positions leave values as a view, which keeps the memory of queries and keys before them.
        ("--swiglu --position-embedding-type rope", 0.16),
        (MIXTURE, 0.1),
        (f"{PLAIN} --recompute-granularity selective --recompute-modules core_attn", 0.1),
    ],
)
def test_offloaded_activations_are_those_that_a_forward_pass_copies(words, tolerance):
    everything, kept, _ = needs_and_kept(words)
    needs, left, in_host = needs_and_kept(f"{words} --cpu-offloading-num-layers 2")
    assert needs.largest.host[OFFLOADED] == pytest.approx(in_host, rel=tolerance)
    gone = everything.largest.working["activations"] - needs.largest.working["activations"]
    assert gone == needs.largest.host[OFFLOADED] and kept - left == pytest.approx(gone, rel=tolerance)
    # Two of the five layers are there at a time, beside recomputed tensors.
    all_of_them = needs_and_kept(f"{words} --cpu-offloading-num-layers 5")[0].largest
    more = needs_and_kept(f"{words} --cpu-offloading-num-layers 4")[0].largest
    assert all_of_them.host[OFFLOADED] == pytest.approx(2.5 * needs.largest.host[OFFLOADED], abs=2)
    assert all_of_them.working["activations"] == pytest.approx(more.working["activations"], abs=2)


@pytest.mark.parametrize(
    "words",
    [f"{RECOMPUTED} --recompute-method uniform --recompute-num-layers {k}" for k in (2, 3, 4)]
    + [f"{RECOMPUTED} --recompute-method block --recompute-num-layers 2", "--recompute-granularity selective"]
    + ["--swiglu --position-embedding-type rope --qk-layernorm --recompute-granularity selective"]
    + [f"{PLAIN} --group-query-attention --recompute-granularity selective"]
    + [f"{MIXTURE} --recompute-granularity selective"]
    + [f"{PLAIN} {RECOMPUTED} --recompute-method block --recompute-num-layers 2"],
)
def test_activations_that_recomputing_leaves_are_those_of_a_forward_pass(words):
    planned, kept = planned_and_kept(words)
    least = f"{words.partition('--recompute')[0]} {RECOMPUTED}"
    least_planned, least_kept = planned_and_kept(least)  # the rest, outside of blocks, is the same in both
    assert planned - least_planned == pytest.approx(kept - least_kept, rel=0.1)


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("", "mlp"),
        ("--swiglu", "mlp"),
        (PLAIN, "core_attn"),
        ("--swiglu", "core_attn"),
        (MIXTURE, "moe"),
        (MIXTURE, "shared_experts"),
    ],
)
def test_activations_that_recomputed_modules_leave(model, modules):
    everything, kept = planned_and_kept(model)
    planned, left = planned_and_kept(f"{model} --recompute-granularity selective --recompute-modules {modules}")
    # One of 5 layers has it again in the backward pass. 12 bytes a token: sums of scores of 3 heads in fp32.
    assert everything - planned == pytest.approx(4 / 5 * (kept - left), rel=0.04, abs=4 * 2 * 64 * 12)


@pytest.mark.parametrize(
    "preset, of_block", [("llama-8b", 2 * 1024), ("deepseek-v2-lite", 2 * 16 * (128 + 64)), ("gemma3-1b", 2 * 256)]
)
def test_caches_of_keys_and_values_by_hand(preset, of_block):
    words = (
        f"--nodes 1 --ranks-per-node 1 --vocabulary 9 pretrain_llama.py --preset {preset} --num-layers 3 --bf16 --lr 1"
    )
    words += " --micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 9"
    needs = estimate.run(estimate.parse_arguments(words.split())).needs
    assert needs.largest.cache_per_token == 3 * 2 * of_block


BASE = "--preset gpt-350m --micro-batch-size 4 --bf16 --lr 1e-3 --mock-data --vocab-size 50257"


def base_time(words: str, *more: str) -> Prediction:
    return timed(shlex.split(f"{BASE} {words}"), "--vocabulary", "50257", *more)


def test_bytes_between_islands_are_those_of_a_run(data):
    """It holds for one interval; pieces that do not divide evenly count as full ones."""
    wires = ("", "--island-bits 4 --island-fragments 2")
    interval = 2
    # One more step: after the last one, all that was trained since is sent as well.
    common = flags(data, f"--islands 2 --island-sync-interval {interval} --train-iters {interval + 1}")
    runs = {wire: [*common, *wire.split()] for wire in wires}
    metrics = run_ranks(4, train_each, runs)[-1]
    for wire, argv in runs.items():
        sent = sum(metrics[wire]["comm/bytes-between-islands"][:interval])
        assert sent > 0
        assert interval * timed(argv).needs.sent_between_islands == pytest.approx(sent, rel=0.02), wire


def test_outer_state_is_where_the_run_keeps_it():
    islands = "--global-batch-size 64 --train-iters 10 --islands 2"
    name = "the islands' outer parameters and momentum, fp32"
    kept = base_time(islands).needs.largest
    of_rank = 2 * sum(4 * part.numel for unit in kept.units for part in unit.shards)
    assert kept.states[name] == of_rank
    assert name in base_time(f"{islands} --cpu-offload").needs.largest.host  # beside the parameters


def test_steps_tokens_and_time():
    time = base_time("--global-batch-size 64 --train-iters 1000")
    plan = time.needs
    assert (plan.steps, plan.micro_batches, plan.tokens) == (1000, 4, 1000 * 64 * 2048)
    assert time.time.seconds == predict(parse_cluster("2x2xA100@100"), plan).time.seconds  # what plan says
    assert base_time("--global-batch-size 64 --train-samples 64000").needs == plan
    ramp = base_time("--global-batch-size 64 --rampup-batch-size 32 16 96 --train-iters 10").needs
    assert ramp.tokens == (2 * 32 + 1 * 48 + 7 * 64) * 2048


def test_output(capsys, monkeypatch):
    words = "--nodes 2 --gpu H100 --vocabulary 32000 pretrain_llama.py --preset llama-0.8b --micro-batch-size 1 --bf16"
    words += " --lr 1 --train-iters 9 --mock-data --vocab-size 32000"
    monkeypatch.setattr("sys.argv", ["estimate.py", *words.split()])
    assert estimate.main() == 0
    out = capsys.readouterr().out
    assert "llama on 2 x 8 H100" in out and " parameters\n" in out and "MFU" in out and "989 TFLOP/s" in out
    assert out.splitlines()[-1].endswith("minutes")


@pytest.mark.parametrize(
    "words, more, message",
    [
        ("--zero-stage 0", "", "--zero-stage 0 shards nothing"),
        ("--zero-hpz-partition-size 4", "", "make them agree"),
        ("--skip-train", "", "no training to estimate"),
        ("--num-layer 3", "", r"unknown flag --num-layer; did you mean --num-layers\?"),
        (f"{REPLICAS} 2", "--nodes 3", "replicas of 3 ranks, 2 on a node: one must be a multiple"),
        ("", "--gpu Z80", "the GPU Z80 is not known: give one of"),
    ],
)
def test_refusals(words, more, message):
    with pytest.raises(ValueError, match=message):
        base_time(f"--train-iters 1 {words}", *more.split())
