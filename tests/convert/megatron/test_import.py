"""Import checkpoints that Megatron-LM and Megatron-DeepSpeed would write of our parameters, and get the same bits."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_zpp.checkpoint import find_checkpoint, iterate_parameters, iterate_tensors, read_meta
from megatron_zpp.checkpoint.meta import Counters, saved_model
from megatron_zpp.commands.convert import export_megatron, import_megatron
from megatron_zpp.commands.convert.import_hf import tokenizer_words
from megatron_zpp.convert.megatron.config import args_of
from megatron_zpp.models.moe import MoEConfig
from tests.convert.hf.test_tokenizer import KINDS
from tests.convert.megatron import layouts
from tests.convert.megatron.layouts import CONFIGS, FORMATS, IDS, State, random_model, save, write_universal
from tests.data.small_data import train_sentencepiece
from tests.models.configs import gpt_config, llama_config
from tests.tools import call_well, call_wrongly, cut


def import_(folder: Path, *more: object) -> str:
    return call_well(import_megatron, "--input", folder / "theirs", "--save", folder / "ours", *more)


def refuse(theirs: Path, *more: object) -> str:
    return call_wrongly(import_megatron, "--input", theirs, "--save", theirs.parent / "ours", *more)


def assert_imported(folder: Path, expected: State, rows: int | None = None) -> dict[str, Any]:
    """Compare an import's parameters to the bit; return its meta.json. rows: of the vocabulary that are not padding."""
    checkpoint = find_checkpoint(str(folder))
    assert checkpoint is not None
    meta = read_meta(checkpoint)
    assert_same(dict(iterate_parameters(checkpoint, meta)), expected, rows)
    return meta


def assert_same(found: State, expected: State, rows: int | None = None) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if rows is not None and ("word_embeddings" in name or "output_layer" in name):
            assert not found[name][rows:].any(), name
            tensor, found[name] = tensor[:rows], found[name][:rows]
        assert torch.equal(found[name], tensor), name


def moments_in(checkpoint: Path) -> dict[str, State]:
    """Return Adam's "exp_avg", "exp_avg_sq" and "step", each by parameter."""
    saved: dict[str, State] = {}
    for name, tensor in iterate_tensors(checkpoint, read_meta(checkpoint), "optimizer."):
        parameter, _, kind = name.rpartition(".")
        saved.setdefault(kind, {})[parameter] = tensor
    return saved


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("layout", FORMATS)
def test_every_layout_is_the_same_model_again(tmp_path, model, layout):
    config, ours = CONFIGS[model], random_model(CONFIGS[model])
    FORMATS[layout](tmp_path / "theirs", ours, config)
    out = import_(tmp_path)
    assert f"pretrain-{model} --load {tmp_path}/ours" in out
    assert ("--no-load-optim" in out) == (layout != "universal")
    meta = assert_imported(tmp_path / "ours", ours, IDS if layout == "universal" else None)
    assert saved_model(meta)[1] == config
    expected = Counters(iteration=5, consumed_train_samples=40, consumed_valid_samples=16, scheduled_samples=32)
    assert Counters.from_meta(meta) == expected


def test_moments_of_a_universal_checkpoint_are_kept(tmp_path):
    config, ours = CONFIGS["llama"], random_model(CONFIGS["llama"])
    moments = {kind: {n: x * factor for n, x in ours.items()} for kind, factor in (("exp_avg", 2), ("exp_avg_sq", 3))}
    write_universal(tmp_path / "theirs", ours, config, moments)
    import_(tmp_path)
    saved = moments_in(tmp_path / "ours" / "iter_0000005")
    assert {float(step) for step in saved.pop("step").values()} == {5.0}
    for kind, expected in moments.items():
        assert_same(saved[kind], expected, IDS)


def test_fp32_masters_of_a_distributed_checkpoint_are_the_weights(tmp_path):
    config, ours = CONFIGS["gpt"], random_model(CONFIGS["gpt"])
    weights = layouts.megatron_core(ours)
    state = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for kind, factor in (("fp32_param", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
        state |= {f"optimizer.state.{kind}.{name}": tensor * factor for name, tensor in weights.items()}
    folder = tmp_path / "theirs" / "iter_0000005"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    save(folder / "common.pt", layouts.common(layouts.args_of(config)))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("5")
    import_(tmp_path)
    assert_imported(tmp_path / "ours", ours)
    moments = moments_in(tmp_path / "ours" / "iter_0000005")
    assert_same(moments["exp_avg"], {name: 2 * tensor for name, tensor in ours.items()})


@pytest.mark.parametrize("model", CONFIGS)
def test_what_is_exported_is_imported_as_the_same_bits(tmp_path, model):
    ours = random_model(CONFIGS[model])
    FORMATS["legacy"](tmp_path / "theirs", ours, CONFIGS[model])
    import_(tmp_path)
    out = call_well(export_megatron, "--load", tmp_path / "ours", "--output", tmp_path / "exported")
    assert "iteration 5, 40 samples" in out
    call_well(import_megatron, "--input", tmp_path / "exported", "--save", tmp_path / "again")
    meta = assert_imported(tmp_path / "again", ours)
    assert saved_model(meta)[1] == CONFIGS[model]


def test_a_model_of_no_iteration_is_a_release_to_megatron(tmp_path):
    """Megatron takes no tracker of iteration 0, where models of Hugging Face begin."""
    ours = random_model(CONFIGS["gpt"])
    FORMATS["legacy"](tmp_path / "theirs", ours, CONFIGS["gpt"])
    import_(tmp_path)
    with mock.patch.object(Counters, "from_meta", return_value=Counters()):
        call_well(export_megatron, "--load", tmp_path / "ours", "--output", tmp_path / "exported")
    assert (tmp_path / "exported/latest_checkpointed_iteration.txt").read_text() == "release\n"
    call_well(import_megatron, "--input", tmp_path / "exported", "--save", tmp_path / "again")
    assert_imported(tmp_path / "again", ours)


def test_weights_in_the_order_of_old_versions_are_refused_not_misread(tmp_path):
    FORMATS["legacy"](tmp_path / "theirs", random_model(CONFIGS["gpt"]), CONFIGS["gpt"], 1.0)
    refused = refuse(tmp_path / "theirs")
    assert "of Megatron-LM before 2021 (checkpoint_version 1.0): load and save it with Megatron-LM" in refused


def test_another_tokenizer_is_refused_or_noted(tmp_path):
    FORMATS["legacy"](tmp_path / "theirs", random_model(CONFIGS["gpt"]), CONFIGS["gpt"])
    given = ("--input", tmp_path / "theirs", "--tokenizer-type", "NullTokenizer", "--vocab-size")
    refused = call_wrongly(import_megatron, *given, 50_000, "--save", tmp_path / "many")
    assert "rows, fewer than the tokenizer's 50,001 ids: give the run's own tokenizer" in refused
    noted = call_well(import_megatron, *given, 20, "--save", tmp_path / "few")
    assert "ids of the tokenizer" in noted and "is this the run's own tokenizer?" in noted


def test_a_gelu_that_megatron_does_not_have_is_not_exported():
    """Without biases Megatron's GELU is the exact one, whatever its flags say."""
    config = gpt_config(2, 32, 4, 64, 16, add_bias_linear=False)
    with pytest.raises(ValueError, match="GELU without biases"):
        args_of(config, 16)
    assert not args_of(dataclasses.replace(config, exact_gelu=True), 16).bias_gelu_fusion


def test_layers_with_experts_from_another_layer_on_are_a_pattern_for_megatron():
    experts = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=16)
    config = llama_config(4, 32, 4, 64, ffn_hidden_size=48, moe=experts, moe_layer_freq="2", moe_first_layer=2)
    assert args_of(config, 16).moe_layer_freq == [int(layer in config.layers_with_experts) for layer in range(4)]


FILE = "iter_0000005/mp_rank_00_000/model_optim_rng.pt"


def narrow(state: dict[str, Any]) -> None:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    state["model0"][name] = state["model0"][name][:, 1:].clone()


WRONG_FLAGS = [
    ({"tensor_model_parallel_size": 3}, "mp_rank_02_000/model_optim_rng.pt"),
    ({"multi_latent_attention": True}, "position_embedding_type is 'learned_absolute'"),
    ({"softmax_type": "off-by-one"}, "softmax_type is 'off-by-one'"),
    ({"no_rope_freq": [1, 0]}, "no_rope_freq is '[1, 0]'; give k for every k-th block"),
    ({"logit_softcap": 30.0}, "logit_softcap is 30.0, which is not known here"),
    ({"num_experts": 4, "moe_router_load_balancing_type": "dice"}, "moe_router_load_balancing_type is 'dice'"),
    ({"num_experts": 4, "moe_token_drop_policy": "position"}, "moe_token_drop_policy is 'position'"),
    ({"hybrid_override_pattern": "M*-", "mamba_state_dim": 128}, "hybrid_override_pattern is 'M*-'"),
    ({"linear_attention_freq": 4}, "linear_attention_freq is 4"),
    ({"heterogeneous_layers_config_encoded_json": "{}"}, "heterogeneous_layers_config_encoded_json is '{}'"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
    ({"hidden_size": "32"}, "hidden_size is '32', not a size"),
    ({"ffn_hidden_size": -1}, "ffn_hidden_size must be at least 1, got -1"),
    ({"num_layers": 5}, "it lacks decoder.layers.4."),
]
WRONG_STATE = [
    (narrow, "decoder.layers.0.mlp.linear_fc2.weight is [32, 127], where its flags make it [32, 128]"),
    (lambda state: state["model0"].update({"adapter.weight": torch.zeros(1)}), "adapter.weight"),
    (lambda state: state["model0"]["embedding.word_embeddings.weight"].fill_(torch.nan), "has NaN or Inf"),
    (lambda state: state.pop("args"), "does not hold the flags of its run"),
    (lambda state: state.update(iteration="7"), "its iteration is '7'"),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wrong") / "theirs"
    FORMATS["torch"](folder, random_model(CONFIGS["gpt"]), CONFIGS["gpt"])
    return folder


def test_a_wrong_flag_or_tensor_is_one_line(theirs):
    content = (theirs / FILE).read_bytes()
    changes = [(lambda state, change=change: vars(state["args"]).update(change), said) for change, said in WRONG_FLAGS]
    for change, expected in [*changes, *WRONG_STATE]:
        state = torch.load(theirs / FILE, weights_only=False)
        change(state)
        save(theirs / FILE, state)
        assert expected in refuse(theirs)
        (theirs / FILE).write_bytes(content)
    assert not (theirs.parent / "ours").exists()


def test_a_damaged_or_missing_file_is_one_line(tmp_path):
    theirs = tmp_path / "theirs"
    FORMATS["torch"](theirs, random_model(CONFIGS["gpt"]), CONFIGS["gpt"])
    (theirs / "iter_0000005/mp_rank_01_001/model_optim_rng.pt").unlink()
    assert "is not complete: mp_rank_01_001/model_optim_rng.pt missing, files of its" in refuse(theirs)
    cut(theirs / FILE, 1000)
    assert "is damaged" in refuse(theirs)


def test_folders_without_a_checkpoint_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is not a folder" in refuse(tmp_path / "absent")
    assert "holds no checkpoint of Megatron-LM" in refuse(tmp_path / "empty")
    save(tmp_path / "zero/global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt", {})
    (tmp_path / "zero" / "latest").write_text("global_step5")
    error = refuse(tmp_path / "zero")
    assert "divided by ZeRO-3" in error and "ds_to_universal.py" in error


def test_a_tokenizer_that_is_not_here_is_asked_for(tmp_path):
    config = CONFIGS["gpt"]
    gone = dict(tokenizer_type="GPT2BPETokenizer", vocab_file="/nowhere/vocab.json", merge_file="/nowhere/merges.txt")
    write_universal(tmp_path / "theirs", random_model(config), config, **gone)
    error = refuse(tmp_path / "theirs")
    assert "/nowhere/vocab.json, is not opened" in error and "--tokenizer-type" in error
    import_(tmp_path, "--tokenizer-type", "NullTokenizer", "--vocab-size", IDS - 1)


def test_megatrons_older_sentencepiece_tokenizer_is_asked_for_by_its_name(tmp_path):
    """Read with today's, such a checkpoint would lose its row for <EOD>. These have too few rows for any."""
    texts = ["a text", "of words"] * 50
    model = train_sentencepiece(tmp_path / "t.model", texts, vocab_size=280, hard_vocab_limit=False)
    today, wrapper = ({"tokenizer_sentencepiece_legacy": value} for value in (False, True))
    cases = {"older": {}, "today": today, "legacy": today | {"legacy_tokenizer": True}, "wrapper": wrapper}
    for name, flags in cases.items():
        flags = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/nowhere"} | flags
        write_universal(tmp_path / name, random_model(CONFIGS["gpt"]), CONFIGS["gpt"], **flags)
        given = ("--tokenizer-model", model, "--tokenizer-type")
        plain = refuse(tmp_path / name, *given, "SentencePieceTokenizer")
        asked = "added <EOD> and others to the model's ids: give --tokenizer-type MegatronSentencePieceTokenizer"
        assert (asked in plain) == (name != "today"), plain
        assert asked not in refuse(tmp_path / name, *given, "MegatronSentencePieceTokenizer")


def import_with(tmp_path: Path, tokenizer: dict[str, Any], **flags: Any) -> str:
    """Import a run of Megatron-LM whose tokenizer ``flags`` name, and return its files."""
    config = dataclasses.replace(CONFIGS["gpt"], vocab_size=608)
    write_universal(tmp_path / "theirs", random_model(config), config, rows=608, **flags)
    return import_(tmp_path, *tokenizer_words(tokenizer))


def test_what_is_exported_with_a_sentencepiece_model_is_imported_with_it_again(tmp_path):
    tokenizer = KINDS["bpe"](tmp_path)
    import_with(tmp_path, tokenizer, tokenizer_type="SentencePieceTokenizer", tokenizer_sentencepiece_legacy=False)
    call_well(export_megatron, "--load", tmp_path / "ours", "--output", tmp_path / "exported")
    words = tokenizer_words(tokenizer)
    call_well(import_megatron, "--input", tmp_path / "exported", "--save", tmp_path / "again", *words)
    before, after = (read_meta(tmp_path / name / "iter_0000005") for name in ("ours", "again"))
    assert before["tokenizer"] == after["tokenizer"] and before["model_config"] == after["model_config"]


def test_a_run_without_bos_in_front_of_its_texts_is_imported_without_it(tmp_path):
    bare = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_hf_no_include_special_tokens": True}
    out = import_with(tmp_path, KINDS["huggingface-bos"](tmp_path), **bare)
    assert "--tokenizer-hf-no-include-special-tokens" in out
    assert read_meta(tmp_path / "ours" / "iter_0000005")["tokenizer"]["prefix"] == []
