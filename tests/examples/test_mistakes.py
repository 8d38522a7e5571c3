"""Scripts of examples/ with a mistake: one line that says what to do, status 2."""

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment
from tests.tools import run

PUBLISHED = sorted(
    str(path.relative_to(ROOT))
    for path in (*(ROOT / "examples/zeropp").glob("*.sh"), *(ROOT / "examples/loco").glob("*.sh"))
)


def error_of(*words: object, **more: str) -> str:
    """Return the one line of stderr of a script that ends with status 2."""
    err = run(*words, status=2, **more).stderr
    assert err.count("\n") == 1 and "error: " in err, err
    return err


@pytest.mark.parametrize("script", PUBLISHED)
def test_a_machine_without_a_gpu_is_named(script, tmp_path):
    path = environment()["PATH"].split(":")[0] + f":{Path(sys.executable).parent}:/usr/bin:/bin"  # no nvidia-smi
    said = error_of(ROOT / script, SCALE="gpu", OUT=str(tmp_path / "out"), PATH=path)
    assert "nvidia-smi shows none; SCALE=laptop" in said or "choose one of: laptop full" in said


@pytest.mark.parametrize(
    "words",
    [
        "quickstart/make_corpus.py --max-megabytes 0.01 --output FILE",
        "quickstart/summary.py a=LOOP --data-path x",
        "finetuning/make_model.py --output FILE",
        "launch/preprocess_slurm.sh LOOP x --tokenizer-type ByteTokenizer",
        "launch/ssh.sh localhost FILE --lr",
        "zeropp/rlhf_table.py LOOP",
    ],
)
def test_a_wrong_path_is_named(words, tmp_path):
    (tmp_path / "FILE").touch()
    (tmp_path / "LOOP").symlink_to("LOOP")
    script, *more = re.sub("FILE|LOOP", rf"{tmp_path}/\g<0>/below", words).split()
    python = ["python"] if script.endswith(".py") else []
    slurm = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1"}
    assert re.search(rf"{tmp_path}/(FILE|LOOP)", error_of(*python, ROOT / "examples" / script, *more, **slurm))


def test_the_quickstart_names_the_folder_that_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    done = run(ROOT / "examples/quickstart/run.sh", status=2, OUT=str(tmp_path / "file" / "below"), MEGABYTES="0.01")
    assert done.stderr.count("\n") == 1 and f"{tmp_path}/file" in done.stderr, done.stderr


@pytest.mark.integrations
@pytest.mark.parametrize(
    "script, words",
    [
        ("library/fabric_llama.py", ""),
        ("library/huggingface_trainer.py", ""),
        ("library/trl_trainers.py", "sft"),
        ("finetuning/align.py", "sft --model MODEL --data DATA"),
    ],
)
def test_an_output_that_cannot_be_a_folder_is_named_before_a_model_is_made(script, words, tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"
    err = run("python", ROOT / "examples" / script, *words.split(), "--output", place, status=2).stderr
    assert f"argument --output: cannot access {place}: Not a directory" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.integrations
@pytest.mark.parametrize("script", ["fabric_llama.py", "huggingface_trainer.py"])
def test_a_step_to_resume_from_that_was_not_saved_is_named(script, tmp_path):
    words = ("--output", tmp_path, "--resume", "7")
    assert "error: --resume 7" in run("python", ROOT / "examples/library" / script, *words, status=2).stderr


@pytest.mark.ray
def test_ray_names_a_program_that_is_not_there():
    words = ("--workers", "1", "--", "no_program.py")
    assert "no program no_program.py" in run("python", ROOT / "examples/launch/ray_train.py", *words, status=2).stderr
