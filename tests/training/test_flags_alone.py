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
    calculate_per_token_loss
    accumulate_allreduce_grads_in_fp32 log_params_norm
    publish tensorboard_dir metrics_dir
"""


def candidates(flag: Flag, folder: str) -> list[list[str]]:
    """Words that may be sensible values of a flag, other than its default."""
    if flag.value_type is bool:
        return [[]]
    words = flag.choices or (WORDS if flag.value_type in (int, float) else (folder, "1", "2,1,1", "x"))
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    return [[word] * count for word in words if word != str(flag.default)]


def _unseen(base: list[str], runs: dict[str, list[tuple[str, list[str]]]]) -> tuple[list[str], list[str]]:
    """Return the flags none of whose runs shows anything, and the runs that failed as none should."""
    plain = {architecture: _show(architecture, base) for architecture in ("gpt", "llama")}
    silent, failed = [], []
    for name, of_flag in runs.items():
        for architecture, argv in of_flag:
            shown = _show(architecture, argv)
            if isinstance(shown, str) and shown != "refused":
                failed.append(shown)
            if shown != plain[architecture]:
                break
        else:
            silent.append(name)
    return silent, failed


def _show(architecture: str, argv: list[str]) -> object:
    """What a run showed: all metrics but times, what it printed but times, or the error that stopped it."""
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
    runs: dict[str, list[tuple[str, list[str]]]] = {}
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
    two_values = {name: of_flag[:2] for name, of_flag in runs.items()}
    assert run_ranks(1, _unseen, base, two_values, timeout=1200) == [([], [])]
