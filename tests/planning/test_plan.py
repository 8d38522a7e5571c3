"""Plans: what is tried, ranked and refused, and that the command lines are those that were predicted."""

import dataclasses
import json
import re
import shlex

import pytest

from megatron_zpp.arguments.parse import parse_settings, stated_flags
from megatron_zpp.commands import plan as tool
from megatron_zpp.commands.plan import NEAR, reasons, suggested, table, why
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.planning.cluster import parse_cluster
from megatron_zpp.planning.predict import estimate_on, predict
from megatron_zpp.planning.search import Outcome, Plan, complete, is_settled, make_plan
from megatron_zpp.settings.checks import SettingsError
from megatron_zpp.zeropp.recipes import LOSS_BUDGET, RECIPES

EXACT = [*RECIPES][1]
WITHIN_BUDGET = [name for name, recipe in RECIPES.items() if recipe.risk <= LOSS_BUDGET][-1]  # rounds most of these
MODEL = "--preset llama-8b --num-layers 8 --seq-length 2048"  # eight layers, for speed
VOCABULARY = 32000
ONE_WIRE = "--zeropp int8 --recompute-granularity full"  # where the others would show the same
ONE_LAYOUT = f"--tensor-model-parallel-size 1 {ONE_WIRE}"


def planned(word: str, flags: str = "--global-batch-size 64", **more: float) -> Plan:
    return make_plan(LLAMA, f"{MODEL} {flags}".split(), VOCABULARY, parse_cluster(word), **more)


def data_alone(plan: Plan) -> list[Outcome]:
    """Return the outcomes whose ranks divide data alone, fastest first."""
    return [outcome for outcome in plan.outcomes if outcome.candidate.layout.name == "data"]


@pytest.fixture(scope="module")
def slow() -> Plan:
    return planned("4x8xH100@10")


def test_over_slow_links_few_bits_win(slow):
    seconds = [outcome.prediction.time.seconds for outcome in slow.outcomes]
    assert seconds == sorted(seconds)
    presets = {o.candidate.wire.name: o.prediction.time.seconds for o in data_alone(slow)}
    first, *_, a, b, c = presets
    assert first == [*RECIPES][-1] and {a, b, c} == {"ZeRO-3", "HSDP", EXACT}
    assert presets["ZeRO-3"] > 3 * presets[first]
    # Larger micro-batches are tried as far as they fit: 64 samples on 32 ranks.
    assert {o.prediction.needs.settings.training.micro_batch_size for o in data_alone(slow)} <= {1, 2}
    assert slow.outcomes[0].prediction.needs.memory < 0.9 * 80e9


def test_layouts_keep_to_nodes(slow):
    sizes = [outcome.candidate.layout for outcome in slow.outcomes]
    assert {layout.tensor for layout in sizes} == {1, 2, 4, 8}  # divisors of 8 query groups, on nodes of 8
    assert {layout.pipeline for layout in sizes} == {1, 2, 4}  # divisors of 8 layers, on 4 nodes
    assert {layout.context for layout in sizes} == {1}  # sequences of 2048
    words = f"{MODEL} --seq-length 32768 --global-batch-size 32 {ONE_WIRE}"
    long = make_plan(LLAMA, words.split(), VOCABULARY, slow.cluster)
    assert {outcome.candidate.layout.context for outcome in long.outcomes} == {1, 2, 4}


def test_plain_zero_3_is_suggested_over_fast_links():
    assert {o.candidate.wire.name for o in data_alone(planned("1x8xH100@10"))} == {"ZeRO-3"}  # the only one on one node
    plan = planned("4x8xH100@3200", "--global-batch-size 512")
    assert suggested(plan).candidate.wire.name == "ZeRO-3"
    fastest = plan.outcomes[0].prediction.time.seconds
    assert suggested(plan).prediction.time.seconds <= NEAR * fastest


def test_the_loss_budget_decides_what_is_suggested(slow):
    fastest = slow.outcomes[0].prediction.time.seconds
    for budget, names in ((0.0, {"ZeRO-3", "HSDP", EXACT}), (LOSS_BUDGET, {WITHIN_BUDGET}), (1.0, {[*RECIPES][-1]})):
        plan = dataclasses.replace(slow, loss_budget=budget)
        assert suggested(plan).candidate.wire.name in names
        assert ("It is the fastest" in why(plan, suggested(plan))) == (budget == 1.0)
    assert suggested(plan).prediction.time.seconds <= NEAR * fastest


def test_the_command_line_repeats_the_prediction(slow):
    cluster = slow.cluster
    for outcome in slow.outcomes:
        given = [*MODEL.split(), "--global-batch-size", "64"]
        completed, added = complete(given, stated_flags(LLAMA, given), cluster, VOCABULARY)
        assert added == ["--bf16"] and outcome.flags.startswith("--bf16 ")
        words = [*completed, *outcome.flags.split()[1:]]
        settings = parse_settings(LLAMA, words, cluster.world_size, lambda _: None, ranks_per_node=8)
        again = predict(cluster, estimate_on(cluster, LLAMA, settings, VOCABULARY))
        assert (again.needs, again.time) == (outcome.prediction.needs, outcome.prediction.time)


def test_refusals_name_the_memory_needed():
    plan = planned("2x2xT4@100", f"--global-batch-size 4 {ONE_WIRE}", usable=0.25)
    assert not plan.outcomes
    assert all(re.fullmatch(r"needs \d+ GB of a GPU's 4 that can be used", r.reason) for r in plan.refused)
    more = planned("2x2xA100@100", f"--global-batch-size 4 {ONE_WIRE}")
    assert more.outcomes and len(reasons(more)) == len(more.outcomes) - 1 + len(more.refused)


@pytest.mark.parametrize(
    ("recompute", "granularity"), [("--recompute-activations", "selective"), ("--checkpoint-activations", "full")]
)
def test_given_flags_are_kept(recompute, granularity):
    flags = f"--global-batch-size 64 --micro-batch-size 2 {recompute} --zero-hpz-partition-size 8 "
    flags += "--tensor-model-parallel-size 1"
    plan = planned("4x8xH100@10", flags)
    (outcome,) = plan.outcomes
    assert outcome.candidate.wire.name == "as given" and outcome.flags == "--bf16"
    settings = outcome.prediction.needs.settings
    assert settings.training.micro_batch_size == 2 and settings.activation.recompute_granularity == granularity
    assert settings.zeropp.hpz_partition_size == 8


def test_what_a_command_or_its_deepspeed_file_states_is_not_stated_again(tmp_path):
    file = tmp_path / "ds.json"
    of_file = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": True},
    }
    file.write_text(json.dumps(of_file))
    for flags in (
        f"--deepspeed_config {file}",
        f"--deepspeed_config={file}",
        "--global-batch-size=64 --lr=3e-4 --bf16",
    ):
        plan = planned("2x8xH100@10", f"{flags} {ONE_LAYOUT}")
        settings = plan.outcomes[0].prediction.needs.settings
        assert settings.training.global_batch_size == 64 and settings.optimizer.lr == 3e-4
        assert not any("--global" in outcome.flags or "--bf16" in outcome.flags for outcome in plan.outcomes)
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}))
    for outcome in planned("2x8xH100@10", f"--deepspeed_config {file} {ONE_LAYOUT}").outcomes:
        training = outcome.prediction.needs.settings.training
        assert training.micro_batch_size == 2 and "batch-size" not in outcome.flags
    planned("2x8xH100@10", f"--global-batch-size 64 --sft {ONE_LAYOUT}")


def test_flags_that_allow_no_candidate_raise_one_line():
    batch = "global batch size 31 is not divisible by micro-batch size 1 * data-parallel size 32"
    for flags, said in (("--global-batch-size 31", batch), ("--num-layer 3", "did you mean --num-layers?")):
        with pytest.raises(SettingsError, match=re.escape(said)):
            planned("4x8xH100@10", flags)


@pytest.mark.parametrize(
    "cluster, experts, layouts, with_experts",
    [
        ("2x8xH100@1", 4, "data, TP2, TP4, PP2, TP2 PP2, TP4 PP2", "EP2, EP4, TP2 EP2, PP2 EP2, PP2 EP4"),
        ("3x4xH100@1", 12, "data, TP2, TP4", "EP2, EP4, EP12, TP2 EP2, TP2 EP6, TP4 EP3"),  # over whole nodes
    ],
)
def test_experts_are_divided_within_nodes_or_over_whole_ones(cluster, experts, layouts, with_experts):
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --disable-bias-linear "
    flags += ONE_WIRE
    flags = [*flags.split(), "--num-experts", str(experts), "--global-batch-size", str({4: 16, 12: 12}[experts])]
    plan = make_plan(GPT, flags, 500, parse_cluster(cluster))
    assert {outcome.candidate.layout.name for outcome in plan.outcomes} == {*f"{layouts}, {with_experts}".split(", ")}


def test_the_price_of_tokens(slow):
    prediction = slow.outcomes[0].prediction
    priced = dataclasses.replace(prediction, cluster=dataclasses.replace(slow.cluster, dollars_per_gpu_hour=2.0))
    dollars_per_second = 32 * 2.0 / 3600
    assert priced.dollars_per_million_tokens == pytest.approx(dollars_per_second / prediction.tokens_per_second * 1e6)
    assert "$/M tokens" not in table(slow, 3)[0]


def test_the_tool_prints_ranking_reasons_and_a_command(capsys, monkeypatch):
    words = f"--cluster 4x8xH100@10 --vocabulary {VOCABULARY} --dollars-per-gpu-hour 2"
    model = [*MODEL.split(), "--zeropp", "auto", "--data-path", "/my data/text"]
    monkeypatch.setattr("sys.argv", ["plan.py", *words.split(), "pretrain_llama.py", *model])
    assert tool.main() == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert "$/M tokens" in said and f"suggested: {WITHIN_BUDGET}" in said and "ZeRO-3, TP8 PP4 takes" in said
    assert f"{[*RECIPES][-1]}, TP2 takes" in said and "may cost 0.69 % of loss, above --loss-budget 0.4" in said
    assert "waits for links between nodes for" in said
    (command,) = re.findall(r"torchrun .*", out)
    words = shlex.split(command)
    assert words[1:6] == ["--nnodes", "4", "--nproc-per-node", "8", "pretrain_llama.py"]
    assert words[words.index("--global-batch-size") + 1] == "32"  # one sample for each GPU
    assert words[words.index("--data-path") + 1] == "/my data/text"
    assert "auto" not in words and words.count("--zeropp") == 1
    sent = [line for line in out.splitlines() if re.search(r"\d x \d+ ", line)]
    assert len(sent) == 1 + 10 and max(map(len, sent)) <= 110  # the cluster, and ten rows
    assert "--all lists" in out


def test_the_model_may_come_from_transformers(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=512, hidden_size=64, intermediate_size=128, max_position_embeddings=256)
    transformers.LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=4).save_pretrained(tmp_path)
    argv = ["plan.py", "--cluster", "2x2xA100@10", "--huggingface", str(tmp_path), "--", "--global-batch-size", "8"]
    argv += ONE_WIRE.split()
    monkeypatch.setattr("sys.argv", argv)
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert "--hidden-size 64" in out and "--seq-length 256" in out and "2,048 tokens in a step" in out


def test_mistakes_in_the_command(capsys):
    for words, said in {
        "--cluster 2x2xA100@10": "which model?",
        "--cluster 2x2xA100@10 --vocabulary 9 pretrain_bert.py": "pretrain-bert is not pretrain-gpt",
        "--cluster 2x2xA100@10 pretrain_gpt.py": "give --vocabulary",
        "pretrain_gpt.py": "--cluster",
    }.items():
        with pytest.raises(SystemExit):
            tool.parse_arguments(words.split())
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "settles"), [("--cpu-offload", "wire"), ("--cpu-offloading-num-layers", "recompute")])
def test_what_the_two_kinds_of_offloading_settle(flag, settles):
    assert not is_settled("wire", ["--zeropp-monitor-interval"])
    assert [
        question for question in ("wire", "layout", "recompute", "micro-batch") if is_settled(question, [flag, "2"])
    ] == [settles]
