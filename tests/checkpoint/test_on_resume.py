"""What a resume does with settings that changed: every setting has one class, and each class does what it says."""

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import CheckpointError, Trained
from megatron_zpp.checkpoint.resume import check_settings
from megatron_zpp.checkpoint.trained import plan_resume
from megatron_zpp.families import GPT
from megatron_zpp.families.decoder_only import EXPERT_FLAGS, FLAGS
from megatron_zpp.fields import flag
from megatron_zpp.settings.flags import iterate_flags
from megatron_zpp.settings.groups import all_flags
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.setup import _check_same_model
from tests.checkpoint.saved import FLAGS_OF_RUN, meta_of


def parse(*flags: str) -> ResolvedSettings:
    return parse_settings(GPT, f"{FLAGS_OF_RUN} {' '.join(flags)}".split(), note=lambda text: None)


def saved(flags: str = "") -> dict[str, Any]:
    """The settings of a run with these flags, as a checkpoint has them."""
    return json.loads(json.dumps(parse(flags).as_flat_dict()))


def resume(*more: str, begun_with: str = "", finetunes: bool = False) -> list[str]:
    """The notes of a run with ``more`` flags that goes on from one that was begun with others."""
    return check_settings(parse(*more), {"settings": saved(begun_with)}, finetunes=finetunes)


def test_every_flag_says_what_a_resume_does_in_words_that_are_checked():
    """A misspelled class would let a run go on with another value without a word."""
    overrides = {"--override-data", "--override-opt_param-scheduler", "--no-load-optim"}
    assert {flag.resume for flag in all_flags().values()} == {"free", "noted", "model", "compared", *overrides}


def test_a_flag_that_says_nothing_about_a_resume_is_noted_there():
    """Such a flag may change the training: a resume that went on with another value would not say so."""

    @dataclass(frozen=True)
    class Group:
        another: int = flag(1, "a number")

    assert [flag.resume for flag in iterate_flags(Group)] == ["noted"]


def test_settings_of_the_model_are_compared_as_its_config():
    """What the config holds, but what a resume may change: the dropouts, and how weights began."""
    in_config = {*FLAGS.values(), *EXPERT_FLAGS.values()}
    may_change = {"attention_dropout", "hidden_dropout", "init_method_std"}
    assert {name for name in in_config if all_flags()[name].resume != "model"} == may_change


YARN = (
    "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8 "
    "--max-position-embeddings 64"
)
MUON = "--optimizer muon"
ISLANDS = "--islands 2 --local-ranks 2"
LOCO = "--zero-quantized-gradients --zeropp-loco"


@pytest.mark.parametrize(
    "begun_with, more, note",
    [
        ("", "--clip-grad 0.5", "clip_grad 1.0 there, 0.5 here"),
        ("", "--adam-beta1 0.8 --adam-beta2 0.95", "adam_beta1 0.9 there, 0.8 here; adam_beta2 0.999 there, 0.95 here"),
        ("", "--adam-eps 1e-6", "adam_eps 1e-08 there, 1e-06 here"),
        ("", "--hidden-dropout 0.2", "hidden_dropout 0.1 there, 0.2 here"),
        ("--bf16", "", "bf16 True there, False here; accumulate_allreduce_grads_in_fp32 True there, False here"),
        ("", "--calculate-per-token-loss", "calculate_per_token_loss False there, True here"),
        (MUON, f"{MUON} --muon-momentum 0.9", "muon_momentum 0.95 there, 0.9 here"),
        (ISLANDS, f"{ISLANDS} --island-outer-lr 0.5", "island_outer_lr 0.7 there, 0.5 here"),
        (LOCO, "--zero-quantized-gradients", "zeropp_loco True there, False here"),
    ],
)
def test_what_changes_the_training_is_said(begun_with, more, note):
    assert resume(more, begun_with=begun_with) == [f"changed since the checkpoint was saved: {note}"]


@pytest.mark.parametrize(
    "begun_with, more, differs, override",
    [
        ("--optimizer sgd", "", "optimizer sgd there, adam here", "--no-load-optim"),
        ("", "--global-batch-size 4", "global_batch_size 1 there, 4 here", "--override-opt_param-scheduler"),
        ("", "--decoupled-lr 1e-4", "decoupled_lr None there, 0.0001 here", "--override-opt_param-scheduler"),
        ("", "--curriculum-min-length 8 --curriculum-iters 4", "curriculum_min_length None there", "--override-data"),
        ("", "--seed 1", "seed 1234 there, 1 here", "--override-data"),
        ("", "--split 90,10,0", "split None there, 90,10,0 here", "--override-data"),
        ("", "--eod-mask-loss", "eod_mask_loss False there, True here", "--override-data"),
    ],
)
def test_what_must_be_equal_is_refused_or_with_its_override_said(begun_with, more, differs, override):
    with pytest.raises(CheckpointError, match=f"{differs}.*. Give the same, or {override}"):
        resume(more, "--load x", begun_with=begun_with)
    (note,) = resume(more, "--load x", override, begun_with=begun_with)
    assert note.startswith(f"{override} changes the run: {differs}")


def same_model(begun_with: str, more: str) -> list[str]:
    """The notes of a run with ``more`` flags on the model of a checkpoint that was begun with others."""
    begun, run = (parse("--load x", flags) for flags in (begun_with, more))
    theirs, ours = (GPT.build_config(each.model, 16) for each in (begun, run))
    meta = {"settings": begun.as_flat_dict(), "model_config": dataclasses.asdict(theirs)}
    return _check_same_model(GPT, run, Path("x"), json.loads(json.dumps(meta)), ours, finetunes=False)


@pytest.mark.parametrize(
    "changed, spellings",
    [
        ("--rotary-base 500000", ("rotary_base", "rotary-base", "--rotary-base")),
        (
            "--yarn-original-max-position-embeddings 16",
            ("yarn_original_context", "--yarn-original-max-position-embeddings"),
        ),
        ("--moe-router-load-balancing-type seq_aux_loss", ("moe.load_balancing", "moe-router-load-balancing-type")),
    ],
)
def test_what_an_override_changes_may_be_named_as_its_flag(changed, spellings):
    begun = f"{YARN} --num-experts 2 --moe-aux-loss-coeff 0.01"
    for spelling in spellings:
        (note,) = same_model(begun, f"{begun} {changed} --override-model={spelling}")
        assert note.startswith("--override-model changes the model: ")
    with pytest.raises(CheckpointError, match="--override-model hidden_size: a resume may change only"):
        same_model(begun, f"{begun} --override-model hidden-size")


def test_fine_tuning_may_change_every_setting_and_lists_it():
    notes = partial(resume, finetunes=True)
    assert notes("") == notes("--log-interval 3 --num-layers 3") == []
    changes = "--global-batch-size 4 --optimizer sgd --lr 1e-4 --clip-grad 0.5 --split 9,1,0"
    (note,) = notes(changes)
    said = ("global_batch_size 1 there, 4 here", "split None there, 9,1,0 here", "optimizer adam there, sgd here")
    assert note.startswith("fine-tuning changes the run: ") and all(text in note for text in said)
    assert "lr 0.001 there, 0.0001 here" in note and "clip_grad 1.0 there, 0.5 here" in note
    (note,) = notes("--tokenizer-type ByteTokenizer")  # checked by its ids
    assert note.endswith("run: tokenizer_type NullTokenizer there, ByteTokenizer here")


def test_nothing_is_said_of_what_is_free_or_unknown_to_an_older_checkpoint():
    assert resume("--log-interval 3 --recompute-activations --num-workers 0 --train-iters 20") == []
    known = {"architecture": "gpt", "seq_length": 8}
    assert check_settings(parse("--clip-grad 0.5 --optimizer sgd"), meta_of(1) | {"settings": known}) == []


def test_a_checkpoint_without_random_states_is_said():
    trained = Trained(model=torch.nn.Linear(1, 1), optimizer=torch.optim.SGD([torch.zeros(1)]))
    meta = meta_of(1) | {"has_rng": False, "world_size": 1, "zeropp": None}
    for load_rng, notes in (True, ("random states start over: the checkpoint has none",)), (False, ()):
        assert plan_resume(meta, trained, {}, trains=False, load_rng=load_rng, has_zeropp_state=False).notes == notes
