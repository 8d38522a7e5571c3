"""Every flag of the trainer with words that are no sensible value of it."""

from collections.abc import Iterator

from megatron_zpp.islands import IslandConfig
from megatron_zpp.settings.flags import PATHS, Flag, iterate_flags
from megatron_zpp.settings.groups import all_flags

WORDS = ("0", "-1", "nan", "inf", "1e300", "", "9" * 20, "ünï🙂", "1e-300", "0.5", "1")
TEXTS = ("", "1", "ünï🙂")  # for flags that take no number
# Without these, a run only notes that a flag has no effect. Each needs no more than is here.
EXPERTS = "--disable-bias-linear --num-experts 2"
FLOAT8 = "--bf16 --seq-length 16 --num-layers 4"
ISLANDS = "--local-ranks 2 --islands 2"
NEEDED = {
    "num_experts": "--disable-bias-linear",
    **{flag.setting: EXPERTS for flag in all_flags().values() if flag.needs == "num_experts"},
    "expert_model_parallel_size": EXPERTS,
    "expert_tensor_parallel_size": EXPERTS,
    "moe_token_bits": f"{EXPERTS} --expert-model-parallel-size 2",
    "moe_router_bias_update_rate": f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "lora_rank": "--pretrained-checkpoint {folder}",
    "lora_alpha": "--lora-rank 2 --pretrained-checkpoint {folder}",
    "pretrained_checkpoint": "--lora-rank 2",
    "curriculum_min_length": "--curriculum-iters 2",
    "curriculum_iters": "--curriculum-min-length 8",
    "window_attn_skip_freq": "--window-size 2,0",
    "fp8_format": FLOAT8,
    "save": "--save-interval 2",
    "save_retain_interval": "--save {folder} --save-interval 1",
    "save_keep_last": "--save {folder} --save-interval 1",
    "recompute_num_layers": "--recompute-granularity full",
    "lr_wsd_decay_iters": "--lr-decay-style WSD",
    "islands": "--local-ranks 2",
    **{flag.setting: ISLANDS for flag in iterate_flags(IslandConfig)},
    "island_loco": f"{ISLANDS} --island-bits 4",
    "lr_decay_samples": "--train-samples 4",
    "lr_warmup_samples": "--train-samples 4",
    **dict.fromkeys(("lr_warmup_style", "lr_warmup_init"), "--lr-warmup-iters 1"),
    "train_samples": "--train-samples 4",
}


def words_needed(flag: Flag) -> str:
    """Return the flags that make ``flag`` meaningful, of ``NEEDED`` or those that it declares."""
    condition = flag.needs or flag.effective_with.partition(" ")[0]
    if not condition or flag.setting in NEEDED:
        return NEEDED.get(flag.setting, "")
    setting, _, value = condition.partition("=")
    switch = all_flags()[setting]
    if switch.value_type is not bool and not value:
        value = "{folder}" if switch.metavar in PATHS else (switch.choices or ["2"])[0]
    return f"{words_needed(switch)} {switch.name} {value}"


def cases(folder: str) -> Iterator[tuple[Flag, str, list[str]]]:
    """Each flag, a word, and the command line of the two. Switches get the word they do not take."""
    for flag in all_flags().values():
        needed = words_needed(flag).format(folder=folder).split()
        for word in WORDS if flag.value_type in (int, float) else TEXTS:
            count = flag.nargs if isinstance(flag.nargs, int) else 1
            yield flag, word, [*needed, flag.name, *[word] * count]
