"""--config: files of settings in place of flags, --print-config, and the file beside a run's checkpoints."""

import builtins
import shlex

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.arguments.settings_file import format_settings
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.zeropp.recipes import RECIPES
from tests.arguments.parsing import YARN, flat, mistakes, parse, refusal
from tests.training.small_run import ended, torchrun

TOML = """\
num-layers = 4
hidden_size = 64
num-attention-heads = 4
lr = 1e-3
mock-data = true
sft = false
[batches]
seq-length = 32
micro-batch-size = 2
"""
YAML = """\
# the same, as Megatron's --yaml-cfg groups it
language_model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, kv_channels: null}
lr: 1e-3
mock-data: true
sft: false
seq_length: 32
micro_batch_size: 2
"""
REST = "--vocab-size 100 --train-iters 10"
TYPED = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --lr 1e-3 --mock-data --seq-length 32"
TYPED += f" --micro-batch-size 2 {REST}"


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def without_files(settings: dict) -> dict:
    return settings | {"config": None}


@pytest.mark.parametrize(("name", "text"), [("run.toml", TOML), ("run.yaml", YAML)])
@pytest.mark.parametrize("flag", ["--config", "--yaml-cfg"])
def test_a_file_says_what_flags_say(write, name, text, flag):
    assert without_files(flat(f"{flag} {write(name, text)} {REST}")) == flat(TYPED)


def test_a_later_file_and_the_command_line_win(write):
    base = write("base.toml", TOML + "[logs]\nlog-params-norm = true\nseed = 1\n")
    later = write("later.yaml", "log-params-norm: false\nseed: 2\nlr: 0.5\neval-tasks: [a, b]\n")
    settings = parse(f"--seed 3 --config {base} {later} {REST}")[0]
    assert (settings.optimizer.lr, settings.training.seed, settings.logging.log_params_norm) == (0.5, 3, False)
    assert settings.training.eval_tasks == ("a", "b")
    assert flat(f"--config {base} --config {later} {REST}")["lr"] == 0.5


def test_the_command_line_wins_by_another_programs_name_for_a_flag_too(write):
    """Such a command line was refused, because it contradicts the file."""
    ours, theirs = (
        write("ours.toml", TOML),
        write("theirs.toml", TOML.replace("micro-batch-size = 2", "batch-size = 2")),
    )
    assert flat(f"--config {ours} {REST} --batch-size 8")["micro_batch_size"] == 8
    assert flat(f"--config {theirs} {REST} --micro-batch-size 8")["micro_batch_size"] == 8
    assert "--batch-size 8" in refusal(f"--config {ours} {REST} --batch-size 8 --micro-batch-size 4")


def test_wrong_keys_are_named_all_at_once_with_their_file_and_the_nearest(write):
    text = TOML + "num-layer = 3\nsave = ''\ndry-run = true\nnum_layers = 3\nrope-typo = false\n"
    path = write("run.toml", text)
    assert mistakes(f"--config {path} {REST}") == [
        f"num-layer in {path} is no setting; did you mean num-layers? (CHANGELOG.md lists flags that went)",
        f"dry-run in {path} says what to do, not how to train: give --dry-run on the command line",
        f"num_layers is in {path} twice; leave one out",
        f"rope-typo in {path} is no setting; did you mean rope-type? (CHANGELOG.md lists flags that went)",
        "--save must not be empty, got nothing",
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.toml", "num-layers 4", "run.toml cannot be read: "),
        ("run.yaml", "lr: 1\nlr: 2", "run.yaml cannot be read: the key lr is there twice"),
        ("run.yaml", "a: [", "run.yaml cannot be read: "),
        ("run.yaml", "- lr", "must hold settings"),
        ("run.json", "{}", "is neither .toml nor .yaml: rename it"),
        ("run.yaml", "[1]: 2", "run.yaml cannot be read: "),
        ("run.yaml", "yaml-cfg: other.yaml", "yaml-cfg in "),
        ("run.yaml", "clip-grad: no", "is false, but takes a value"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(write, name, text, said):
    assert any(said in message for message in mistakes(f"--config {write(name, text)} {TYPED}"))


def test_a_value_cannot_be_a_flag(write):
    path = write("run.yaml", "save: --sft\nsave-interval: 5\n")
    assert flat(f"{TYPED} --config {path}")["save"] == "--sft"
    assert refusal(f"{TYPED} --config nowhere.toml").startswith("--config: nowhere.toml does not exist; give")


def test_yaml_without_its_package_names_it(write, monkeypatch):
    def no_yaml(name, *args, real=builtins.__import__):
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args)

    path = write("run.yaml", YAML)
    monkeypatch.setattr(builtins, "__import__", no_yaml)
    assert refusal(f"{TYPED} --config {path}").endswith("needs the package PyYAML: pip install pyyaml, or write TOML")


@pytest.mark.parametrize(
    ("more", "architecture"),
    [
        ("", GPT),
        (
            f"--zeropp {[*RECIPES][-2]} --zeropp-ranks-per-node 2 --bf16 --save 'a \"b\\ü' --save-interval 5 --lr 1e-5",
            GPT,
        ),
        ("--zero-quantized-gradients --zeropp-loco --zeropp-loco-reset-interval 0 --zeropp-gradient-intra-bits 0", GPT),
        (f"{YARN} --normalization RMSNorm --lr-decay-style WSD --lr-wsd-decay-iters 2 --fp16", LLAMA),
        ("--num-experts 4 --disable-bias-linear --moe-layer-freq [0]*2+[1]*2 --recompute-activations", GPT),
        ("--preset qwen3-0.6b --num-query-groups 2 --norm-epsilon 1e-5 --rotary-base 10000", LLAMA),
        (f"--zeropp {[*RECIPES][-1]} --zeropp-gradient-bits 4 --zeropp-ranks-per-node 2", GPT),
        ("--tensor-model-parallel-size 2 --sequence-parallel --rampup-batch-size 4 4 8 --global-batch-size 8", GPT),
    ],
)
def test_a_run_s_settings_come_back_from_what_it_prints(write, more, architecture):
    def read(words: list[str]):
        return parse_settings(architecture, words, 4, note=lambda _: None)

    settings = read(shlex.split(f"{TYPED} {more}"))
    again = read(["--config", write("printed.toml", format_settings(settings))])
    assert without_files(again.as_flat_dict()) == settings.as_flat_dict()


def test_a_run_saves_its_settings_beside_its_checkpoints_and_goes_on_from_them(tmp_path):
    save = f"{tmp_path}/run"
    words = f"{TYPED} --eval-iters 0 --num-workers 0 --save {save} --save-interval 5 --exit-interval 5".split()
    printed, _ = ended(torchrun(2, [*words, "--print-config"]))
    assert "num-layers = 4\n" in printed and not (tmp_path / "run").exists()
    ended(torchrun(2, words))
    assert (tmp_path / "run/settings.toml").read_text() == printed
    out, _ = ended(torchrun(2, ["--config", f"{save}/settings.toml", "--load", save, "--exit-interval", "10"]))
    assert "iter_0000005 at iteration 5" in out and "saved checkpoint from iteration      10" in out
