"""The files of examples/launch do what they say; what a cluster alone has (ssh, srun) is stood in for."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.ranks import free_port
from tests.tools import run

TINY = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 --train-iters 3
    --lr 1e-3 --mock-data --vocab-size 100 --eval-iters 1 --log-interval 1 --num-workers 0 --bf16
    --zeropp int8 --zeropp-ranks-per-node 2"""
TOKENIZER = ["--append-eod", "--tokenizer-type", "ByteTokenizer"]


def assert_same_bytes(one: Path, merged: Path) -> None:
    """Compare the two datasets that these prefixes stand for."""
    for kind in ("bin", "idx"):
        (ours,), (theirs,) = (prefix.parent.glob(f"{prefix.name}*.{kind}") for prefix in (one, merged))
        assert ours.read_bytes() == theirs.read_bytes()


def test_scripts_say_how_to_start_them():
    for script, said in (
        ("slurm.sh", "sbatch examples/launch/slurm.sh"),
        ("ssh.sh", "HOST"),
        ("preprocess_slurm.sh", "FOLDER"),
    ):
        array = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1"}
        assert said in run(ROOT / "examples/launch" / script, status=2, **array).stderr


def test_slurm_starts_ranks_that_resume_and_requeues_a_crash(put, tmp_path):
    saves = 'mkdir -p "$OUT/checkpoints"; echo 5 >"$OUT/checkpoints/latest_checkpointed_iteration.txt"'
    put("srun", f'printf "%s " "$@" >"$OUT/srun"; {saves}; exit 137')
    path = put("scontrol", '[ "$1" = show ] && echo localhost || echo "$2" >"$OUT/requeued"')
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "4", "OUT": str(tmp_path / "run")}
    job |= {"SLURM_SUBMIT_DIR": str(ROOT), "PATH": path}
    run(ROOT / "examples/launch/slurm.sh", "pretrain_gpt.py", *TINY.split(), **job)
    started = (tmp_path / "run/srun").read_text()
    assert (
        "pretrain_gpt.py" in started
        and f"--load {tmp_path}/run/checkpoints" in started
        and "--exit-signal-handler" in started
    )
    assert (tmp_path / "run/requeued").read_text() == "7\n"


@pytest.mark.long
def test_ssh_starts_a_torchrun_on_each_machine(put):
    path = put("ssh", 'shift 2; exec bash -c "$1"')  # -tt HOST COMMAND
    script = ROOT / "examples/launch/ssh.sh"
    where = {"RANKS_PER_NODE": "2", "PORT": str(free_port()), "PATH": path}
    printed = run(script, "localhost localhost", "pretrain_gpt.py", *TINY.split(), **where).stdout
    assert "on 4 ranks" in printed and "iteration        3/       3" in printed
    done = run(script, "localhost localhost", "pretrain_gpt.py", "--num-layers", "0", status=None, **where)
    assert done.returncode != 0


@pytest.mark.long
def test_parts_that_slurm_tokenizes_make_the_bytes_of_one_machine(tmp_path):
    text = tmp_path / "text"
    for i, name in enumerate(("a/x", "a-b/x", "B", "b", "a/y")):  # shells sort them otherwise
        (text / name).parent.mkdir(parents=True, exist_ok=True)
        (text / f"{name}.txt").write_text(f"document {i} " * (i + 1))
    (text / "SHA256SUMS").write_text("no text\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/part.dat").write_text("text")
    odd = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1"}
    given = (tmp_path / "odd", tmp_path / "odd/part", *TOKENIZER, "--input-format=text")
    run(ROOT / "examples/launch/preprocess_slurm.sh", *given, **odd)
    for i in range(3):
        array = {"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_COUNT": "3"}
        run(ROOT / "examples/launch/preprocess_slurm.sh", text, tmp_path / "parts/part", *TOKENIZER, **array)
    run("python", "tools/merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "merged")
    run("python", "tools/preprocess_data.py", "--input", text, "--output-prefix", tmp_path / "one", *TOKENIZER)
    assert_same_bytes(tmp_path / "one", tmp_path / "merged")
