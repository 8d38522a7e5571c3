"""Every flag given alone does something that a small run shows, or is noted, or refused: none is silently ignored."""

import contextlib
import io
import re

import pytest

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.parallel.distributed import FailedTogether
from megatron_zpp.settings.flags import Flag
from megatron_zpp.settings.groups import all_flags
from megatron_zpp.training.nonfinite import NotFiniteError
from tests.arguments.test_fuzz import OF_LLAMA
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, train_quietly

WORDS = ("2", "0.5", "4", "1", "16", "0.9", "0")
# What a small run on one rank does not show: speed and memory; how a run ends; NaN and spikes; what is divided among
# ranks; later epochs, blends and samples of unequal length; what is on already; and files.
NOT_SHOWN = """
    num_workers manual_gc deterministic_mode recompute_granularity
    cpu_offload cpu_offloading_num_layers no_mmap_bin_files data_cache_path
    dry_run print_config exit_duration_in_mins exit_signal_handler distributed_backend distributed_timeout_minutes
    no_check_for_nan_in_loss_and_grad max_nonfinite_steps loss_spike_factor
    zero_stage zero_quantized_weights zero_quantized_gradients zeropp_ranks_per_node
    local_ranks local_nodes
    num_virtual_stages_per_pipeline_rank
    data_order_stable pad_last_valid_sample mid_level_dataset_surplus calculate_per_token_loss
    accumulate_allreduce_grads_in_fp32 log_params_norm
    publish tensorboard_dir
"""


def candidates(flag: Flag, folder: str) -> list[list[str]]:
    """Words that may be sensible values of a flag, other than its default."""
    if flag.value_type is bool:
        return [[]]
    words = flag.choices or (WORDS if flag.value_type in (int, float) else (folder, "1", "2,1,1", "x"))
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    return [[word] * count for word in words if word != str(flag.default)]


def _shown(argvs: list[tuple[str, list[str]]]) -> list[object]:
    """What each run showed: all metrics but times, what it printed but times, and the errors that stopped it."""
    return [_show(architecture, argv) for architecture, argv in argvs]


def _show(architecture: str, argv: list[str]) -> object:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            run, metrics = start(argv, architecture)
            said = train_quietly(run)
        except (FailedTogether, NotFiniteError, ValueError, OSError, ImportError):
            return "refused"
        except Exception as error:  # to be told with the others
            return f"{architecture} {' '.join(argv)}: {error!r}"
    timed = (
        r"(time|written in|stopped for|tokens per second|ETA|TFLOP|throughput).*?\||[\d:]+(\.\d+)?\]|[\d.]+ (m?s|MB)\b"
    )
    said = re.sub(timed, "", re.sub("^MFU: .*\n", "", out.getvalue() + said, flags=re.MULTILINE))  # said once a process
    kept = {key: values for key, values in metrics.items() if not re.search("time|second|throughput|mfu|memory", key)}
    return kept, said, run.model.config, run.settings.checkpoint.save


@pytest.mark.long
def test_every_flag_alone_shows_is_noted_or_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = flags(data, "--global-batch-size 2 --eval-interval 2 --log-params-norm", length="--train-iters 3")
    plain_values = {
        architecture.name: parse_settings(architecture, base, note=lambda text: None).as_flat_dict()
        for architecture in (GPT, LLAMA)
    }
    runs: dict[str, list[tuple[str, list[str]]]] = {"": [("gpt", base), ("llama", base)]}
    for flag in all_flags().values():
        if flag.setting in NOT_SHOWN.split():
            continue
        for words in candidates(flag, str(tmp_path / "folder")):
            architecture = LLAMA if flag.setting in OF_LLAMA or flag.needs == "multi_latent_attention" else GPT
            argv, notes = [*base, flag.name, *words], list[str]()
            with contextlib.suppress(SettingsError):
                values = parse_settings(architecture, argv, note=notes.append).as_flat_dict()
                if values != plain_values[architecture.name] and not any(flag.name in note for note in notes):
                    runs.setdefault(flag.name, []).append((architecture.name, argv))
    every = [run for of_flag in runs.values() for run in of_flag[:2]]
    (shown,) = run_ranks(1, _shown, every, timeout=1200)
    results = dict(zip((f"{architecture} {' '.join(argv)}" for architecture, argv in every), shown, strict=True))
    plain = {architecture: results[f"{architecture} {' '.join(base)}"] for architecture in ("gpt", "llama")}
    silent = [
        name
        for name, of_flag in runs.items()
        if name and all(results[f"{a} {' '.join(argv)}"] == plain[a] for a, argv in of_flag[:2])
    ]
    assert silent == [] and [result for result in shown if isinstance(result, str) and result != "refused"] == []
