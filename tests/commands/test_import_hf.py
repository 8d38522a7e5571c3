"""Import models that transformers saved: train from them, sample from them, and export them again bit for bit."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_zpp.commands import generate_text
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.convert.hf.tokenizer import write_tokenizer
from megatron_zpp.data.text.tokenizers import ByteTokenizer
from tests.convert.hf.small_models import CONFIGS, POSITIONS, mapping_of, to_hf_config
from tests.models.configs import llama_config
from tests.ranks import run_ranks
from tests.tools import call_well, call_wrongly, cut
from tests.training.small_run import start, train_quietly

NO_TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def import_(folder: Path, *more: object) -> str:
    """Import ``folder``/theirs as ``folder``/ours; return what the tool says."""
    return call_well(import_hf, "--input", folder / "theirs", "--save", folder / "ours", *more)


def save_theirs(folder: Path, config=CONFIGS["llama"], dtype: torch.dtype = torch.float32, **options) -> None:
    """Let transformers build and save a model, with random weights in every place."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(config))).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder, **options)


def tensors_of(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: (x.dtype, x.contiguous().view(torch.uint8).numpy().tobytes()) for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("gpt", "float32", {}),
        ("gpt-untied", "bfloat16", {"max_shard_size": "20KB"}),
        ("llama-grouped", "float32", {"max_shard_size": "20KB"}),
        ("llama-tied", "float16", {}),
        ("mistral", "bfloat16", {}),
        ("qwen2-window", "float32", {}),
        ("qwen3", "bfloat16", {}),
    ],
)
def test_imported_and_exported_again_the_tensors_are_the_same_bytes(tmp_path, name, dtype, options):
    save_theirs(tmp_path / "theirs", CONFIGS[name], getattr(torch, dtype), **options)
    import_(tmp_path, *NO_TOKENIZER)
    exported = ["--load", tmp_path / "ours", "--output", tmp_path / "back", "--dtype", dtype]
    call_well(export_hf, *exported, "--max-file-size", "30KB")
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "theirs")
    theirs, back = (AutoConfig.from_pretrained(tmp_path / folder).to_dict() for folder in ("theirs", "back"))
    differing = {key for key in theirs if theirs[key] != back[key]}
    assert differing <= {"_name_or_path", "bos_token_id", "eos_token_id"}  # NullTokenizer has another end of document


def test_weights_in_mxfp4_are_those_that_transformers_unpacks(tmp_path):
    config = dataclasses.replace(CONFIGS["gpt-oss"], ffn_hidden_size=64)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, ffn_hidden_size=64))
    save_theirs(tmp_path / "unpacked" / "theirs", config, torch.bfloat16)
    shutil.copytree(tmp_path / "unpacked", tmp_path / "packed")
    packed, unpacked, generator = {}, {}, torch.Generator().manual_seed(0)
    for name, tensor in load_file(tmp_path / "packed" / "theirs" / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, width, rows = tensor.shape
            shape = num_experts, rows, width // 32
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 124, shape, dtype=torch.uint8, generator=generator)  # up to 6 / 8
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            unpacked[name] = convert_moe_packed_tensors(blocks, scales)
        else:
            packed[name] = unpacked[name] = tensor
    assert len(packed) == len(unpacked) + 4
    edit_weights(tmp_path / "packed" / "theirs", lambda tensors: packed)
    edit_weights(tmp_path / "unpacked" / "theirs", lambda tensors: unpacked)
    edit_config(tmp_path / "packed" / "theirs", quantization_config={"quant_method": "mxfp4"})
    for folder in ("packed", "unpacked"):
        import_(tmp_path / folder, *NO_TOKENIZER)
        exported = ["--output", tmp_path / folder / "back", "--dtype", "bfloat16"]
        call_well(export_hf, "--load", tmp_path / folder / "ours", *exported)
    assert tensors_of(tmp_path / "packed" / "back") == tensors_of(tmp_path / "unpacked" / "back")
    edit_weights(tmp_path / "packed" / "theirs", lambda tensors: tensors | {"x_blocks": torch.ones(3).byte()})
    words = "--input", tmp_path / "packed" / "theirs", "--save", tmp_path / "again", *NO_TOKENIZER
    assert "has no place for: x_blocks" in call_wrongly(import_hf, *words)


def test_layers_of_multi_token_prediction_are_left_out_with_a_note(tmp_path):
    save_theirs(tmp_path / "theirs", CONFIGS["deepseek-v3"])
    name = f"model.layers.{CONFIGS['deepseek-v3'].num_layers}.eh_proj.weight"
    edit_weights(tmp_path / "theirs", lambda tensors: tensors | {name: torch.ones(32, 64)})
    edit_config(tmp_path / "theirs", num_nextn_predict_layers=0)
    words = "--input", tmp_path / "theirs", "--save", tmp_path / "ours", *NO_TOKENIZER
    assert f"has no place for: {name}" in call_wrongly(import_hf, *words)
    edit_config(tmp_path / "theirs", num_nextn_predict_layers=1)
    assert "Layers that predict further tokens (MTP) are left out" in import_(tmp_path, *NO_TOKENIZER)


def test_kimi_k2_is_read_as_what_its_code_is(tmp_path):
    """Its model_type is not known to transformers; code beside the weights is not run."""
    save_theirs(tmp_path / "theirs", CONFIGS["kimi-k2"])
    edit_config(tmp_path / "theirs", model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.Config"})
    assert "logits differ from transformers' by" in import_(tmp_path, *NO_TOKENIZER)


def check_parameters(argv: list[str], architecture: str, folder: str) -> tuple[list[str], float]:
    """Train a run; return the parameters that first differed from transformers' files, and the last loss."""
    run, metrics = start(argv, architecture)
    theirs = load_file(Path(folder) / "model.safetensors")
    differing = []
    parameters = dict(run.model.named_parameters())
    for weight in mapping_of(run.model.config).weights(run.model.config):
        expected = weight.join(*(theirs[name].float() for name in weight.theirs))
        pairs = zip(weight.ours, expected, strict=True)
        differing += [name for name, tensor in pairs if not torch.equal(parameters[name].full_tensor(), tensor)]
    train_quietly(run)
    return differing, metrics["lm loss"][-1]


def test_a_run_starts_from_the_import_and_text_is_generated(data, tmp_path):
    # As Llama 3.2 1B: grouped queries, tied embeddings, scaled rotary frequencies, in bfloat16, with its tokenizer.
    config = llama_config(
        2, 32, 4, 257, num_query_groups=2, rotary_base=500000, rope_scaling_factor=32.0, tie_embeddings=True
    )
    save_theirs(tmp_path / "theirs", config, torch.bfloat16)
    write_tokenizer({"tokenizer_type": "ByteTokenizer"}, ByteTokenizer(), tmp_path / "theirs")
    # As the Llama 3.1 models that follow instructions: several tokens end an answer.
    edit_config(tmp_path / "theirs", bos_token_id=1, eos_token_id=[5, 256], pad_token_id=7)
    generation = {"bos_token_id": 1, "eos_token_id": [5, 256], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(generation))
    out = import_(tmp_path)
    assert "logits differ from transformers' by" in out

    command = shlex.split(out.splitlines()[1])
    assert command[:2] == ["megatron-zpp", "pretrain-llama"]
    run = f"""--seq-length 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-2 --log-interval 1
        --eval-iters 0 --split 1,0,0 --num-workers 0 --data-path {data} --save {tmp_path}/trained --save-interval 20"""
    argv = [*command[2:], *run.split()]
    results = run_ranks(2, check_parameters, argv, "llama", str(tmp_path / "theirs"))
    assert [differing for differing, _ in results] == [[], []]
    assert results[0][1] < 4.5  # from 5.5 = log 257 or more

    for folder in ("ours", "trained"):
        text = call_well(generate_text, "--load", tmp_path / folder, "--prompt", "def ", "--num-tokens", "5")
        assert text.startswith("def ")
    call_well(export_hf, "--load", tmp_path / "trained", "--output", tmp_path / "back")
    norms = [load_file(tmp_path / f / "model.safetensors")["model.norm.weight"] for f in ("theirs", "back")]
    assert not torch.equal(*norms)
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == generation
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert [exported[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, [5, 256], 7]


def edit_weights(folder: Path, change) -> None:
    """Save the tensors of a folder again, as ``change`` returns them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def without_output_layer(tensors):
    """openai-community/gpt2: saved without the output layer, so without "transformer.", and with attention masks."""
    mask = {f"h.{layer}.attn.bias": torch.ones(1, 1, POSITIONS, POSITIONS) for layer in range(2)}
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | mask


def with_tied_output_layer(tensors):
    """A tied output layer that was saved all the same, and rotary frequencies."""
    output = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    return tensors | output | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}


@pytest.mark.parametrize(("name", "change"), [("gpt", without_output_layer), ("llama-tied", with_tied_output_layer)])
def test_names_and_constants_of_older_files_are_read(tmp_path, name, change):
    save_theirs(tmp_path / "theirs", CONFIGS[name])
    edit_weights(tmp_path / "theirs", change)
    import_(tmp_path, *NO_TOKENIZER)


def edit_config(folder: Path, **change: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


NORM = "model.layers.0.input_layernorm.weight"
MISTAKES = {
    "no config": (lambda f: (f / "config.json").unlink(), "is not a model of transformers: it has no config.json"),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "wrong value": (lambda f: edit_config(f, num_hidden_layers="two"), "two"),
    "other model": (lambda f: edit_config(f, model_type="mamba"), "model_type is mamba; gpt2, llama, mistral,"),
    "inexpressible": (lambda f: edit_config(f, hidden_act="relu"), "hidden_act is relu, supported: silu or swish"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights: neither model.safetensors nor"),
    "pickled": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "has its weights pickled (pytorch_model.bin), and unpickling runs what is in the file",
    ),
    "damaged weights": (lambda f: cut(f / "model.safetensors"), "model.safetensors is damaged"),
    "missing": (lambda f: edit_weights(f, lambda t: {k: v for k, v in t.items() if k != NORM}), f"{NORM} is missing"),
    "other shape": (lambda f: edit_config(f, vocab_size=102), "is [101, 32], where config.json says [102, 32]"),
    "left over": (lambda f: edit_weights(f, lambda t: t | {"a.bias": t[NORM].clone()}), "no place for: a.bias"),
    "other output": (lambda f: edit_config(f, tie_word_embeddings=True), "but lm_head.weight is another matrix"),
    "NaN": (lambda f: edit_weights(f, lambda t: t | {NORM: t[NORM] / 0}), f"{NORM} of"),
    "integers": (lambda f: edit_weights(f, lambda t: t | {NORM: t[NORM].to(torch.int8)}), f"{NORM} in"),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    save_theirs(folder)
    return folder


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(theirs, tmp_path, mistake, message):
    shutil.copytree(theirs, tmp_path / "theirs")
    mistake(tmp_path / "theirs")
    argv = ["--input", tmp_path / "theirs", "--save", tmp_path / "ours", *NO_TOKENIZER]
    assert message in call_wrongly(import_hf, *argv)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_wrong_folders_and_tokenizers_are_one_line(theirs, tmp_path):
    (tmp_path / "file").touch()
    for argv, message in {
        ("meta-llama/Llama-3.2-1B", "--save", tmp_path / "a"): "meta-llama/Llama-3.2-1B is not a folder",
        (theirs, "--save", tmp_path, *NO_TOKENIZER): "exists already: give a new folder",
        (theirs, "--save", tmp_path / "a"): "has no tokenizer (tokenizer.json, tokenizer.model, or",
        (theirs, "--save", tmp_path / "a", "--tokenizer-type", "ByteTokenizer"): "has 257 ids, but the model only 101",
    }.items():
        assert message in call_wrongly(import_hf, "--input", *argv)


def test_an_index_that_leads_astray_is_refused(tmp_path):
    save_theirs(tmp_path / "theirs", max_shard_size="20KB")
    file = tmp_path / "theirs" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    first = next(iter(index["weight_map"]))
    for change, message in {
        "../model.safetensors": "index.json is damaged",
        "model-9.safetensors": "is not complete: model-9.safetensors",
        next(name for name in index["weight_map"].values() if name != index["weight_map"][first]): f"lacks {first}",
    }.items():
        file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {first: change}}))
        argv = ["--input", tmp_path / "theirs", "--save", tmp_path / "ours", *NO_TOKENIZER]
        assert message in call_wrongly(import_hf, *argv)
