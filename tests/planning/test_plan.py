"""Plans: what is tried, ranked and refused, and that the command lines are those that were predicted."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.commands import plan as tool
from megatron_zpp.commands.plan import plot, reasons, suggested, table
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.planning.cluster import parse_cluster
from megatron_zpp.planning.predict import estimate_on, predict
from megatron_zpp.planning.search.plan import Outcome, Plan, complete, make_plan
from megatron_zpp.settings.checks import SettingsError

MODEL = "--preset llama-8b --num-layers 8 --seq-length 2048"  # of eight layers, for speed
VOCABULARY = 32000


def planned(word: str, flags: str = "--global-batch-size 64", **more: float) -> Plan:
    return make_plan(LLAMA, f"{MODEL} {flags}".split(), VOCABULARY, parse_cluster(word), **more)


def data_alone(plan: Plan) -> list[Outcome]:
    """The outcomes whose ranks divide data alone, fastest first."""
    return [outcome for outcome in plan.outcomes if outcome.candidate.layout.name == "data"]


@pytest.fixture(scope="module")
def slow() -> Plan:
    return planned("4x8xH100@10")


def test_over_slow_links_few_bits_win(slow):
    seconds = [outcome.prediction.time.seconds for outcome in slow.outcomes]
    assert seconds == sorted(seconds)
    presets = {o.candidate.wire.name: o.prediction.time.seconds for o in data_alone(slow)}
    first, *_, a, b, c = presets
    assert first == "all flags, 2 bits" and {a, b, c} == {"ZeRO-3", "hpZ", "HSDP"}
    assert presets["ZeRO-3"] > 3 * presets["all flags, 2 bits"]


def test_layouts_keep_to_nodes(slow):
    sizes = [outcome.candidate.layout for outcome in slow.outcomes]
    assert {layout.tensor for layout in sizes} == {1, 2, 4, 8}  # of 8 groups of queries, on nodes of 8
    assert {layout.pipeline for layout in sizes} == {1, 2, 4}  # of 8 layers, on 4 nodes
    assert {layout.context for layout in sizes} == {1}  # sequences of 2048
    long = make_plan(LLAMA, f"{MODEL} --seq-length 32768 --global-batch-size 32".split(), VOCABULARY, slow.cluster)
    assert {outcome.candidate.layout.context for outcome in long.outcomes} == {1, 2, 4}


def test_a_pipeline_idles_and_tensor_parallelism_waits_within_the_node(slow):
    times = {o.candidate.layout.name: o.prediction.time for o in slow.outcomes if o.candidate.wire.name == "ZeRO-3"}
    assert times["PP2"].bubble > 0 == times["TP8"].bubble
    assert times["TP8"].exposed_within > times["TP2"].exposed_within > times["data"].exposed_within


def test_on_one_node_there_is_nothing_to_choose():
    assert {o.candidate.wire.name for o in data_alone(planned("1x8xH100@10"))} == {"ZeRO-3"}


def test_over_fast_links_what_rounds_nothing_is_suggested():
    plan = planned("4x8xH100@3200", "--global-batch-size 512")
    assert suggested(plan).candidate.wire.name == "ZeRO-3"
    fastest = plan.outcomes[0].prediction.time.seconds
    assert suggested(plan).prediction.time.seconds <= 1.02 * fastest


def test_the_command_line_is_what_was_predicted(slow):
    cluster = slow.cluster
    for outcome in slow.outcomes:
        completed, added = complete([*MODEL.split(), "--global-batch-size", "64"], cluster, VOCABULARY)
        assert added == ["--bf16"] and outcome.flags.startswith("--bf16 ")
        words = [*completed, *outcome.flags.split()[1:]]
        settings = parse_settings(LLAMA, words, cluster.world_size, note=lambda _: None)
        again = predict(cluster, estimate_on(cluster, LLAMA, settings, VOCABULARY))
        assert (again.needs, again.time) == (outcome.prediction.needs, outcome.prediction.time)


def test_what_does_not_fit_says_what_it_needs():
    plan = planned("2x2xT4@100", "--global-batch-size 4", usable=0.25)
    assert not plan.outcomes
    assert all(re.fullmatch(r"needs \d+ GB of a GPU's 4 that can be used", r.reason) for r in plan.refused)
    more = planned("2x2xA100@100", "--global-batch-size 4")
    assert more.outcomes and len(reasons(more)) == len(more.outcomes) - 1 + len(more.refused)


def test_flags_settle_what_they_say():
    flags = "--global-batch-size 64 --micro-batch-size 2 --recompute-activations --zero-hpz-partition-size 8 "
    flags += "--tensor-model-parallel-size 1"
    plan = planned("4x8xH100@10", flags)
    (outcome,) = plan.outcomes
    assert outcome.candidate.wire.name == "as given" and outcome.flags == "--bf16"
    settings = outcome.prediction.needs.settings
    assert settings.training.micro_batch_size == 2 and settings.activation.recompute_granularity == "selective"
    assert settings.zeropp.hpz_partition_size == 8


def test_larger_micro_batches_are_tried_as_far_as_they_fit(slow):
    sizes = {o.prediction.needs.settings.training.micro_batch_size for o in data_alone(slow)}
    assert sizes <= {1, 2} and slow.outcomes[0].prediction.needs.memory < 0.9 * 80e9  # 64 samples on 32 ranks


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--global-batch-size 31",
            "global batch size 31 is not divisible by micro-batch size 1 * data-parallel size 32",
        ),
        ("--num-layer 3", "did you mean --num-layers?"),
    ],
)
def test_what_cannot_be_is_one_line(flags, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        planned("4x8xH100@10", flags)


def test_every_experts_layout_divides_them():
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --num-experts 4 "
    flags += "--disable-bias-linear --global-batch-size 16"
    plan = make_plan(GPT, flags.split(), 500, parse_cluster("2x8xH100@1"))
    layouts = {outcome.candidate.layout.name for outcome in plan.outcomes}
    with_experts = {"EP2", "EP4", "TP2 EP2", "PP2 EP2", "PP2 EP4"}
    assert layouts == {"data", "TP2", "TP4", "PP2", "TP2 PP2", "TP4 PP2"} | with_experts


def test_experts_are_divided_over_whole_nodes():
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --num-experts 12 "
    flags += "--disable-bias-linear --global-batch-size 12"
    plan = make_plan(GPT, flags.split(), 500, parse_cluster("3x4xH100@1"))
    layouts = {outcome.candidate.layout.name for outcome in plan.outcomes}
    assert {name for name in layouts if "EP" in name} == {"EP2", "EP4", "EP12", "TP2 EP2", "TP2 EP6", "TP4 EP3"}


def test_the_price_of_tokens(slow):
    prediction = slow.outcomes[0].prediction
    priced = dataclasses.replace(prediction, cluster=dataclasses.replace(slow.cluster, dollars_per_gpu_hour=2.0))
    dollars_per_second = 32 * 2.0 / 3600
    assert priced.dollars_per_million_tokens == pytest.approx(dollars_per_second / prediction.tokens_per_second * 1e6)
    assert "$/M tokens" not in table(slow, 3)[0]


def test_the_tool_prints_ranking_reasons_and_a_command(capsys, monkeypatch, tmp_path):
    words = f"--cluster 4x8xH100@10 --vocabulary {VOCABULARY} --dollars-per-gpu-hour 2 --plot {tmp_path / 'plan.png'}"
    monkeypatch.setattr("sys.argv", ["plan.py", *words.split(), "pretrain_llama.py", *MODEL.split()])
    pytest.importorskip("matplotlib")
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert "$/M tokens" in out and "suggested: all flags" in out and "waits for links between nodes for" in out
    (command,) = re.findall(r"torchrun .*", out)
    words = shlex.split(command)
    assert words[1:6] == ["--nnodes", "4", "--nproc-per-node", "8", "pretrain_llama.py"]
    assert words[words.index("--global-batch-size") + 1] == "32"  # one sample for each GPU
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_the_model_may_come_from_transformers(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    argv = ["plan.py", "--cluster", "2x2xA100@10", "--huggingface", str(tmp_path), "--", "--global-batch-size", "8"]
    monkeypatch.setattr("sys.argv", argv)
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert "--hidden-size 64" in out and "--seq-length 256" in out and "2,048 tokens in a step" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cluster 2x2xA100@10", "which model?"),
        ("--cluster 2x2xA100@10 --vocabulary 9 pretrain_bert.py", "pretrain-bert is not pretrain-gpt"),
        ("--cluster 2x2xA100@10 pretrain_gpt.py", "give --vocabulary"),
        ("pretrain_gpt.py", "--cluster"),
    ],
)
def test_words_of_the_tool(words, said, capsys):
    with pytest.raises(SystemExit):
        tool.parse_arguments(words.split())
    assert said in capsys.readouterr().err


def test_nothing_to_plot(tmp_path):
    with pytest.raises(ValueError, match="nothing fits"):
        plot(Plan(parse_cluster("1x1xT4@1"), [], []), tmp_path / "plan.png")
