"""The flags of ZeRO++ are the fields of its configs; a recipe is the flags that it stands for, and others win."""

import dataclasses
import re

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.settings.checks import SettingsError
from megatron_zpp.settings.flags import flags_of_fields
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.recipes import RECIPES
from tests.conftest import ROOT

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 100 "
    "--lr 1e-3 --bf16 --mock-data --vocab-size 100"
)


def parse(words: str, world_size: int | None = 4) -> tuple[ResolvedSettings, list[str]]:
    notes: list[str] = []
    return parse_settings(GPT, f"{RUN} {words}".split(), world_size, note=notes.append), notes


@pytest.mark.parametrize("more", ["", "--lr-warmup-iters 7", "--zero-stage 2", "--zeropp-scale-dtype bf16"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_flags_that_the_run_prints(name, more, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    words = "" if name == "zero3" and "scale" in more else more
    settings, (note,) = parse(f"--zeropp {name} {words}")
    printed = note.removeprefix(f"--zeropp {name} stands for ").removeprefix("no other flag")
    again, _ = parse(f"{printed} {'' if 'scale' in words else words}")
    assert settings.zeropp == again.zeropp and settings.precision == again.precision
    assert settings.zeropp.hpz_partition_size == (1 if name == "zero3" else 2)
    if bits := RECIPES[name].warmup_bits:
        assert settings.zeropp.gradient_bits_warmup == f"{7 if 'warmup' in more else 10}:{bits}"


def test_few_bits_under_muon_are_said_to_cost_loss(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    by_hand = "int8 --zeropp-gradient-bits 1"
    few_bits = {f"{name} --optimizer muon": name in ("int6", "ternary") for name in RECIPES}
    runs = few_bits | {f"{by_hand} --optimizer muon": True, by_hand: False}
    assert {words: any("under Muon" in note for note in parse(f"--zeropp {words}")[1]) for words in runs} == runs


def test_flags_override_the_recipe(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    name = [*RECIPES][-2]
    words = f"--zeropp {name} --zeropp-gradient-bits 4 --zeropp-loco-beta 0.5 --tensor-model-parallel-size 2"
    config = parse(words)[0].zeropp
    assert (config.gradient_bits, config.gradient_bits_warmup) == (4, None)
    assert config.weight_bits == RECIPES[name].fields["weight_bits"] != ZeroPPConfig.weight_bits
    assert config.loco == LoCoConfig(beta=0.5, exact_undo=False)
    assert config.hpz_partition_size == 2  # two of a node's four ranks have other data
    alone = parse("--zeropp int8 --zeropp-ranks-per-node 1 --zeropp-weight-copies card")[0].zeropp
    assert alone.weight_moves and alone.hpz_partition_size == 1


@pytest.mark.parametrize(
    "words, said",
    [
        ("--zeropp int8", "give --zeropp-ranks-per-node"),
        ("--zeropp int7", f"must be one of {', '.join(RECIPES)}, auto"),
        ("--zeropp auto --zero-quantized-weights", "--zeropp auto chooses --zero-quantized-weights: leave them out"),
        ("--zeropp int8 --num-distributed-optimizer-instances 2 --zeropp-ranks-per-node 2", "(HSDP) sends nothing"),
    ],
)
def test_what_no_recipe_can_be_is_refused(words, said, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(SettingsError) as refused:
        parse(words)
    assert len(refused.value.messages) == 1 and said in str(refused.value)


def test_local_ranks_know_their_nodes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # torchrun's, of the whole machine
    for words, size in (("", 4), ("--tensor-model-parallel-size 2", 2)):
        settings, _ = parse(f"--zeropp int8 --local-ranks 8 --local-nodes 2 {words}", world_size=None)
        assert settings.zeropp.hpz_partition_size == size


def test_every_field_is_a_flag_but_those_that_the_trainer_sets():
    fields = [*dataclasses.fields(ZeroPPConfig), *dataclasses.fields(LoCoConfig)]
    assert [field.name for field in fields if not field.metadata] == ["nf4_skip", "seed", "exact_undo"]


def test_the_page_names_fields_and_flags_that_belong_together():
    page = (ROOT / "docs/reference/recipes.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:3] for row in page.splitlines() if re.match(r"\| `\w+`.* \| `--", row)]
    of_field = flags_of_fields(ZeroPPConfig)
    assert len(rows) > 10
    for fields, flags in rows:
        assert [of_field[name] for name in re.findall(r"`(\w+)`", fields)] == re.findall(r"`(--[\w-]+)", flags)
