"""Whatever the checks of flags let pass runs, or is refused later: a few lines, and never a traceback."""

import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import GPT, LLAMA
from tests.arguments.fuzzing import cases
from tests.training.small_run import torchrun

SMALL = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
    "--eval-iters 1 --tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 1 --data-path {data}"
)
ENDED = {0: "", 2: "error: ", 3: "error: "}  # status: what is said


@pytest.mark.long
def test_what_passes_the_checks_runs(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some words become folders
    runs = []
    for i, (flag, _, argv) in enumerate(cases(str(tmp_path / "folder"))):
        run = [word.format(data=data) for word in SMALL]
        if not {"--train-samples", "--train-iters"} & {*argv}:
            run += ["--train-iters", "2"]
        if "--num-workers" not in argv:
            run += ["--num-workers", "0"]
        run += [str(tmp_path / f"folder{i}") if word == str(tmp_path / "folder") else word for word in argv]
        name = "pretrain_llama.py" if flag.setting in ("num_query_groups", "rope_scaling_factor") else "pretrain_gpt.py"
        try:
            parse_settings(LLAMA if "llama" in name else GPT, run, note=lambda text: None)
        except SettingsError:
            continue
        runs.append((name, run))
    wrong = []
    some = runs[::16]  # a start takes seconds; test_fuzz of the arguments parses all of them

    def start(run: tuple[str, list[str]]) -> None:
        name, argv = run
        process = torchrun(0, argv, name)
        out, err = process.communicate(timeout=300)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        expected = ENDED.get(process.returncode)
        if expected is None or expected not in err or "Traceback" in out + err or len(set(errors)) < len(errors):
            wrong.append((process.returncode, argv[len(SMALL) :], err[-500:]))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, some))
    assert len(runs) > 100
    assert not wrong, f"{len(wrong)} of {len(runs)} runs: {wrong}"
