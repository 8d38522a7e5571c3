"""Export checkpoints that ranks saved: transformers computes our logits, and generates our text."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_zpp.checkpoint import find_checkpoint, read_meta
from megatron_zpp.commands import generate_text
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.convert.hf.checkpoint import save_imported, settings_of_import
from megatron_zpp.data.text.tokenizers import ByteTokenizer
from tests.convert.hf.small_models import CONFIGS, build
from tests.families.find import architecture_of
from tests.models.configs import llama_config
from tests.ranks import run_ranks
from tests.tools import call_well, call_wrongly, flip
from tests.training.small_run import flags, train_each

RUNS = {  # test_import_hf.py has all families
    "gpt": "--untie-embeddings-and-output-weights --ffn-hidden-size 48 --norm-epsilon 1e-3 "
    "--make-vocab-size-divisible-by 288",  # one multiple is all of the vocabulary
    "llama": "--group-query-attention --num-query-groups 2 --kv-channels 16 --use-rope-scaling "
    "--tie-embeddings-and-output-weights --rotary-base 500000",
}


def train_all(data: str, folder: str) -> None:
    """A few steps of each run, at a rate that moves every weight. For ``run_ranks``."""
    for name, more in RUNS.items():
        argv = flags(data, f"--lr 2e-2 --save {folder}/{name} --save-interval 4 {more}", length="--train-iters 4")
        train_each({"": argv}, name)


@pytest.fixture(scope="module")
def checkpoints(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    run_ranks(2, train_all, data, str(folder))
    return folder


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    checkpoint = find_checkpoint(str(folder))
    model = generate_text.load_model(checkpoint, read_meta(checkpoint), torch.device("cpu"))
    with torch.no_grad():
        return model(tokens)


def their_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, problems = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(problems.values())
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("name", RUNS)
def test_transformers_computes_our_logits(checkpoints, tmp_path, name):
    argv = ["--load", checkpoints / name, "--output", tmp_path / "hf", "--max-file-size", "30KB", "--keep-padded-vocab"]
    out = call_well(export_hf, *argv)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1 and f"{len(files)} files of float32 weights and the tokenizer" in out
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()

    tokens = torch.randint(257, (3, 32), generator=torch.Generator().manual_seed(5))
    ours, theirs = our_logits(checkpoints / name, tokens), their_logits(tmp_path / "hf", tokens)
    assert ours.shape == theirs.shape == (3, 32, 288)  # the vocabulary of 257 padded to a multiple of 32
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer("def f", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    generated = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256
    args = ["--load", str(checkpoints / name), "--prompt", "def f", "--num-tokens", "8", "--temperature", "0"]
    expected = "".join(generate_text.run(generate_text.parse_arguments(args)))
    assert tokenizer.decode(generated[0], skip_special_tokens=True) == expected


def test_trimmed_to_the_tokenizer_and_rounded(checkpoints, tmp_path):
    argv = ["--load", checkpoints / "gpt", "--output", tmp_path / "hf", "--dtype", "bfloat16"]
    shown = call_well(export_hf, *argv)
    assert "1 file of bfloat16 weights" in shown and "31 rows that padded the vocabulary to 288 were cut" in shown
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == 257
    tokens = torch.arange(32).unsqueeze(0)
    ours = our_logits(checkpoints / "gpt", tokens)[..., :257]
    torch.testing.assert_close(model.float()(tokens).logits, ours, rtol=0, atol=0.05)


def train_one(data: str, more: str) -> None:
    train_each({"": flags(data, f"{RUNS['gpt']} {more}", length="--train-iters 1")}, "gpt")


def test_a_run_from_an_imported_model_keeps_the_rows_that_its_tokenizer_lacks(data, checkpoints, tmp_path):
    call_well(export_hf, "--load", checkpoints / "gpt", "--output", tmp_path / "theirs", "--keep-padded-vocab")
    given = ["--tokenizer-type", "ByteTokenizer"]
    call_well(import_hf, "--input", tmp_path / "theirs", "--save", tmp_path / "imported", *given)
    trained = f"--load {tmp_path}/imported --finetune --save {tmp_path}/trained --save-interval 1"
    run_ranks(1, train_one, data, trained)
    for name in ("imported", "trained"):
        shown = call_well(export_hf, "--load", tmp_path / name, "--output", tmp_path / f"{name}-hf")
        assert "were cut" not in shown
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-hf").config.vocab_size == 288


def save_untrained(folder: Path, config, value: float | None = None) -> None:
    """Save a checkpoint of random weights, one of them set to ``value``."""
    parameters = {name: parameter.detach() for name, parameter in build(config).named_parameters()}
    if value is not None:
        parameters["layers.1.mlp.linear_fc2.weight"][3, 5] = value
    architecture = architecture_of(config)
    argv = [*architecture.flags(config, 64), "--tokenizer-type", "ByteTokenizer"]
    settings = settings_of_import(architecture, config, argv, 64, ByteTokenizer())
    save_imported(folder, architecture, config, settings, lambda name, state: parameters[name], ByteTokenizer())


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o007, 0o660)])
def test_a_colleague_can_read_what_is_exported(tmp_path, mask, mode):
    save_untrained(tmp_path / "run", dataclasses.replace(CONFIGS["gpt"], vocab_size=257))
    before = os.umask(mask)
    try:
        call_well(export_hf, "--load", tmp_path / "run", "--output", tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {mode}


def test_no_text_comes_from_a_checkpoint_with_nan(tmp_path):
    save_untrained(tmp_path / "run", dataclasses.replace(CONFIGS["llama"], vocab_size=257), torch.nan)
    error = call_wrongly(generate_text, "--load", tmp_path / "run", "--prompt", "a")
    assert "is not finite: it was saved with NaN or Inf in model.layers.1.mlp.linear_fc2.weight: give an" in error


def test_mistakes_are_one_line_and_leave_nothing(checkpoints, tmp_path):
    llama = dataclasses.replace(CONFIGS["llama"], vocab_size=257)
    damaged = shutil.copytree(checkpoints / "llama", tmp_path / "damaged")
    file = next(damaged.glob("iter_*/*.safetensors"))
    flip(file)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").touch()
    odd = llama_config(1, 32, 3, 257, ffn_hidden_size=64, num_query_groups=3, kv_channels=8)
    save_untrained(tmp_path / "nan", llama, torch.nan)
    save_untrained(tmp_path / "large", llama, 1e6)
    save_untrained(tmp_path / "odd", odd)
    gpt = f"--load {checkpoints}/gpt"
    cases = {
        f"--load {tmp_path}/nowhere": "nowhere holds no checkpoint",
        f"--load {tmp_path}/other": "other holds no checkpoint",
        f"{gpt} --ckpt-step 3": "iter_0000003 is not a complete checkpoint",
        f"{gpt} --output {tmp_path}/other": "other exists already: give a new folder",
        f"{gpt} --tokenizer-type HuggingFaceTokenizer --tokenizer-model gone.json": "gone.json does not exist: say",
        f"{gpt} --tokenizer-type NullTokenizer --vocab-size 999": "the tokenizer has 1000 ids, but the model only 288",
        f"--load {damaged}": "is not what was written: its SHA-256 differs. Give another",
        f"--load {tmp_path}/nan": "has NaN or Inf: export an earlier one with --ckpt-step",
        f"--load {tmp_path}/large --dtype float16": "linear_fc2.weight has values beyond the range of float16",
        f"--load {tmp_path}/odd": "its number of heads must divide hidden_size",
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    for case, message in cases.items():
        assert message in call_wrongly(export_hf, "--output", tmp_path / "hf", *case.split())
        assert sorted(path.name for path in tmp_path.iterdir()) == before, case


def test_a_run_whose_tokenizer_is_gone_is_exported_without(tmp_path):
    config = dataclasses.replace(CONFIGS["gpt"], vocab_size=257)
    save_untrained(tmp_path / "run", config)
    out = call_well(export_hf, "--load", tmp_path / "run", "--output", tmp_path / "hf", "--no-tokenizer")
    assert "weights, no tokenizer; transformers' logits differ" in out
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] is None
