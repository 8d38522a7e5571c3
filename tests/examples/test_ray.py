"""Ray Train starts ranks, and Ray's tasks tokenize as one machine does; Kubeflow's API knows the job. make test-ray"""

import sys

import pytest

from tests.conftest import ROOT
from tests.examples.test_launch import TINY, TOKENIZER, assert_same_bytes
from tests.tools import run

pytestmark = pytest.mark.ray


def call(*command) -> str:
    done = run(sys.executable, *command, timeout=580)
    return done.stdout + done.stderr


def test_four_workers_train():
    options = ["--workers", 4, "--cpus-per-worker", 0.25]
    said = call("examples/launch/ray_train.py", *options, "--", "pretrain_gpt.py", *TINY.split())
    assert "on 4 ranks" in said and "iteration        3/       3" in said


def test_parts_make_the_bytes_of_one_machine(tmp_path):
    for i in range(5):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    both = ["--input", tmp_path / "text", "--output-prefix"]
    parts = ["--parts", 3, "--cpus-per-part", 1, "--"]
    call("examples/launch/preprocess_ray.py", *both, tmp_path / "merged", *parts, *TOKENIZER)
    call("tools/preprocess_data.py", *both, tmp_path / "one", *TOKENIZER)
    assert_same_bytes(tmp_path / "one", tmp_path / "merged")


def test_kubeflow_knows_every_field_of_the_job():
    import yaml
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    job = yaml.safe_load((ROOT / "examples/launch/kubernetes.yaml").read_text())
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
