"""Any flag with any word is refused in lines that name it, or becomes settings; all mistakes are told at once."""

import dataclasses
import json
import shlex

import pytest

from megatron_zpp.arguments.parse import SettingsError
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.fields import Bounds
from megatron_zpp.settings.flags import flat_values, group_from, iterate_flags
from megatron_zpp.settings.groups import ModelSettings, all_flags
from tests.arguments.fuzzing import NEEDED, cases
from tests.arguments.parsing import mistakes, parse

SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--mock-data --vocab-size 100 --num-workers 0"
)
OF_LLAMA = ("multi_latent_attention", "num_query_groups", "rope_scaling_factor")
RUN = f"{SMALL} --train-iters 2"


def test_every_flag_with_every_word(tmp_path):
    refused = accepted = 0
    for flag, word, argv in cases(str(tmp_path)):
        command = SMALL if "--train-samples" in argv else RUN
        architecture = LLAMA if flag.setting in OF_LLAMA or flag.needs == "multi_latent_attention" else GPT
        try:
            settings, _ = parse(f"{command} {shlex.join(argv)}", architecture, None)
        except SettingsError as error:
            refused += 1
            assert len(set(error.messages)) == len(error.messages), argv
            assert any(flag.name in message for message in error.messages), (argv, error.messages)
            assert not any("\n" in message for message in error.messages)
        else:
            accepted += 1
            assert flag.value_type is not bool, argv
            if flat_values(settings.model).get(flag.setting) is not None:
                assert architecture.num_parameters(architecture.build_config(settings.model, 128)) > 0
            assert word not in ("nan", "inf", "") or flag.value_type is str, argv
            assert word != "9" * 20 or flag.value_type is not int, argv
            json.dumps(settings.as_flat_dict(), allow_nan=False)
    assert refused > accepted > 0


def test_a_flag_that_needs_others_is_refused_or_noted_alone():
    """Skips ``num_experts``, for which NEEDED only turns biases off, and files that choose their own tokenizer."""
    for flag in all_flags().values():
        if flag.setting in ("num_experts", "vocab_file", "merge_file") or not (
            flag.needs or flag.effective_with or flag.setting in NEEDED
        ):
            continue
        architecture = LLAMA if flag.setting in OF_LLAMA or flag.needs == "multi_latent_attention" else GPT
        numbers = [[word] * (flag.nargs if isinstance(flag.nargs, int) else 1) for word in ("2", "0.5", "4")]
        for words in [[]] if flag.value_type is bool else [[c] for c in flag.choices] if flag.choices else numbers:
            try:
                _, notes = parse(f"{RUN} {shlex.join([flag.name, *words])}", architecture, 1)
            except SettingsError:
                continue
            assert any(flag.name in note for note in notes), (flag.name, words)


@pytest.mark.parametrize("alone", ["--zeropp-scale-dtype bf16", "--zeropp-monitor-interval 2"])
def test_what_quantization_needs_is_noted_without_it(alone):
    (note,) = parse(f"{RUN} {alone}", GPT, 1)[1]
    flags = "--zero-quantized-weights or --zero-quantized-gradients or --zeropp-secondary-dtype int8"
    assert note == f"{alone.split()[0]} has no effect without {flags} or --zeropp-frozen-dtype"
    assert not any(alone.split()[0] in note for note in parse(f"{RUN} {alone} --zero-quantized-weights", GPT, 1)[1])


def test_every_number_has_a_smallest_value():
    for flag in all_flags().values():
        if flag.value_type in (int, float):
            named = flag.setting.endswith(("_bits", "_block_size"))  # whose values ZeroPPConfig lists
            assert named or {flag.bounds.at_least, flag.bounds.above} != {None}, flag.name


def test_the_ends_of_bounds():
    inside = {Bounds(at_least=1): 1, Bounds(above=0): 1e-300, Bounds(at_most=5): 5, Bounds(below=1): 0.999}
    outside = {Bounds(at_least=1): 0, Bounds(above=0): 0, Bounds(at_most=5): 6, Bounds(below=1): 1}
    for bounds, number in inside.items():
        bounds.check(number)
    for bounds, number in outside.items():
        with pytest.raises(ValueError, match=f"^must be {bounds}$"):
            bounds.check(number)
    for number in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="must be a finite number"):
            Bounds().check(number)
    assert str(Bounds(at_least=0, below=1)) == "at least 0, below 1"


def test_the_largest_model_that_is_accepted_has_sizes_that_64_bits_hold():
    largest = {flag.setting: flag.bounds.at_most for flag in iterate_flags(ModelSettings) if flag.bounds.at_most}
    without_biases = {"num_layers": 1, "disable_bias_linear": True}  # as experts are
    model = group_from(ModelSettings, largest | without_biases)
    model = GPT.resolve(dataclasses.replace(model, num_attention_heads=2**16, kv_channels=2**16), 8)
    assert GPT.num_parameters(GPT.build_config(model, 2**31 - 1)) > 2**54


def test_one_start_reports_all_mistakes():
    argv = "--seed x --zero_stage 3 --bf16 yes --log-interval 0 --lr nan --save= --warmup 1 --adam-beta1 1"
    assert mistakes(f"{RUN} {argv} --fp16 --finetune --zeropp-loco", GPT, 1) == [
        "--seed must be a whole number, got x",
        "unknown flag --zero_stage; did you mean --zero-stage? (CHANGELOG.md lists flags that went)",
        "--bf16 takes no value, got yes",
        "--log-interval must be at least 1, got 0",
        "--lr must be a finite number, got nan",
        "--save must not be empty, got nothing",
        "--adam-beta1 must be below 1, got 1",
        "--warmup is not supported: use --lr-warmup-fraction",
        "--zeropp-loco needs --zero-quantized-gradients",
        "--finetune needs --load",
    ]


def test_a_consequence_is_no_mistake_of_its_own():
    words = RUN.split()
    for flag in ("--num-layers", "--seq-length", "--train-iters", "--micro-batch-size", "--preset"):
        argv = [*words]
        if flag in argv:
            argv[argv.index(flag) + 1] = "0"
        else:
            argv = [*argv[6:], flag, "x"]
        (message,) = mistakes(" ".join(argv), GPT, 1)
        assert flag in message
