"""An architecture that the package knows nothing of trains, is estimated, exported, imported and sampled."""

import contextlib
import io
from pathlib import Path

import pytest
import torch

from megatron_zpp.commands import estimate, generate_text, inspect_checkpoint
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.families import load_architecture
from tests.arguments.parsing import SMALL, mistakes, parse, refusal
from tests.families.toy import TOY, Toy, ToyConfig
from tests.ranks import run_ranks
from tests.tools import call
from tests.training.small_run import SHAPE, Metrics, flags, start, train_quietly, write_text

ZEROPP = (
    "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
    "--zeropp-weight-moves"
)
GIVEN, BARE_GIVEN = "tests.families.toy:TOY", "tests.families.toy:BARE"


def train_toy(argv: list[str]) -> tuple[Metrics, str]:
    """For ``run_ranks``: metrics, and what was printed."""
    run, metrics = start(argv, TOY)
    return metrics, train_quietly(run)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[tuple[Metrics, str]]]:
    """A folder with data and checkpoints, and the results of the run that wrote them."""
    folder = tmp_path_factory.mktemp("toy")
    argv = flags(write_text(folder), ZEROPP, f"--save {folder}/run --save-interval 4")
    return folder, run_ranks(4, train_toy, argv)


def test_it_trains_and_its_auxiliary_loss_is_logged(trained):
    metrics, text = trained[1][-1]
    assert metrics["lm loss"][-1] < metrics["lm loss"][0] - 0.1
    assert len(metrics["square loss"]) == 8 and all(loss > 0 for loss in metrics["square loss"])
    assert "square loss validation" not in metrics and "lm loss validation" in metrics
    lines = [line for line in text.splitlines() if "lm loss:" in line]
    assert len(lines) == 8
    for line, loss in zip(lines, metrics["square loss"], strict=True):
        assert f"| square loss: {loss:.6E} |" in line


def test_it_starts_from_its_own_standard_deviations(trained):
    torch.manual_seed(0)
    config = ToyConfig(1, 64, 2, 512)
    stds = {name: TOY.initial_std(name, config) for name in ("output_layer.weight", "word_embeddings.weight")}
    assert stds == {"output_layer.weight": 0.04, "word_embeddings.weight": 0.02}
    argv = flags(f"{trained[0]}/text", "--hidden-size 64 --train-iters 1 --lr 0")
    assert run_ranks(1, std_of_output, argv)[0] == pytest.approx(0.04, rel=0.05)


def std_of_output(argv: list[str]) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        run, _ = start(argv, TOY)
    assert isinstance(run.model, Toy)
    return float(run.model.output_layer.weight.full_tensor().std())


def test_a_checkpoint_of_another_architecture_is_refused(trained):
    argv = flags(f"{trained[0]}/text", f"--load {trained[0]}/run")
    (message,) = run_ranks(1, refused_start, argv)
    assert "is of the architecture toy, not gpt" in message and message.count("\n") == 1


def refused_start(argv: list[str]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        with contextlib.suppress(Exception):
            start(argv, "gpt")
    return err.getvalue()


@pytest.mark.parametrize("kind", ["tensor-model-parallel", "pipeline-model-parallel", "context-parallel"])
def test_parallelism_that_it_does_not_describe_is_refused(kind):
    message = refusal(f"{SMALL} --{kind}-size 2", TOY, 2)
    assert f"--{kind}-size 2: the architecture toy does not support it" in message


def test_presets_are_the_records():
    rest = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 9"
    assert parse(f"--preset toy-1 {rest}", TOY)[0].model.hidden_size == 16
    assert "--preset gpt-125m is for pretrain_gpt.py" in mistakes(f"--preset gpt-125m {rest}", TOY)
    assert mistakes(f"--preset toy-1 {rest}")[0].startswith("--preset toy-1 does not exist; choose from gpt-125m")


ESTIMATED = f"--ranks-per-node 4 --vocabulary 257 pretrain_toy.py {SHAPE} --mock-data --vocab-size 256"
ESTIMATED = f"{ESTIMATED} --micro-batch-size 2 --train-iters 10 --lr 1 --bf16".split()


def test_an_estimate_knows_the_users_architecture():
    found = estimate.run(estimate.parse_arguments(["--architecture", GIVEN, *ESTIMATED])).needs
    config = ToyConfig(2, 32, 4, vocab_size=288)
    assert found.parameters == TOY.num_parameters(config)
    assert found.largest.working["activations"] == 2 * 32 * 2 * 11 * 2 * 32  # B S, blocks, 11 H of 2 bytes
    assert found.flops_per_token == TOY.flops_per_token(config, 32)
    with pytest.raises(SystemExit):  # nobody says what pretrain_toy.py trains
        estimate.parse_arguments(ESTIMATED)
    with pytest.raises(ValueError, match="the architecture toy does not say what memory its activations take"):
        estimate.run(estimate.parse_arguments(["--architecture", BARE_GIVEN, *ESTIMATED]))


def test_it_is_exported_imported_and_sampled(trained, tmp_path):
    run = trained[0] / "run"
    architecture = ("--architecture", GIVEN)
    # The tool itself compares the logits with transformers' GPT-NeoX.
    code, out, err = call(export_hf, "--load", run, "--output", tmp_path / "hf", *architecture)
    assert code == 0 and "GPTNeoXForCausalLM" in out, err
    code, out, err = call(import_hf, "--input", tmp_path / "hf", "--save", tmp_path / "imported", *architecture)
    assert code == 0 and "pretrain_toy.py --load" in out, err
    code, out, err = call(generate_text, "--load", tmp_path / "imported", "--num-tokens", 5, *architecture)
    assert code == 0, err
    code, out, err = call(inspect_checkpoint, "list", run)
    assert code == 0 and "toy, 4 ranks" in out, err

    # What a checkpoint says is never imported: the user says it.
    for tool, argv in {export_hf: ("--output", tmp_path / "again"), generate_text: ()}.items():
        code, _, err = call(tool, "--load", run, *argv)
        assert code == 2 and err.count("\n") == 1
        assert "the architecture toy, which is not one of ours" in err and "--architecture package.module:NAME" in err
        code, _, err = call(tool, "--load", run, *argv, "--architecture", "llama")
        assert code == 2 and "is of the architecture toy, not llama" in err
    code, _, err = call(import_hf, "--input", tmp_path / "hf", "--save", tmp_path / "other")
    assert code == 2 and "hidden_act is relu, supported: gelu\n" in err
    code, _, err = call(export_hf, "--load", run, "--output", tmp_path / "again", "--architecture", BARE_GIVEN)
    assert code == 2 and "the architecture toy has no mapping to a model of Hugging Face transformers" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixtral", "there is no architecture mixtral; choose from gpt, llama"),
        ("tests.families.none:TOY", "cannot be imported .*PYTHONPATH"),
        ("tests.families.toy:NONE", "cannot be imported"),
        ("tests.families.toy:Toy", "is no Architecture but type"),
    ],
)
def test_what_is_no_architecture_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load_architecture(text)
