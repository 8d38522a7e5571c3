"""The cluster in a box: bytes read from real interfaces agree with the program's counters, and nothing is left over."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.cluster_in_a_box import cluster, programs, sh

PROGRAM = "benchmarks/cluster_in_a_box.py"
TRAINING = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--mock-data --vocab-size 512 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --bf16 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 "
    "--zeropp-loco --global-batch-size 8 --train-iters"
)


def leftovers(pid):
    """Whether anything of the cluster that the process ``pid`` made is there."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return any(f"mzpp{mark}{pid}" in names + links for mark in ("-", "br", ""))


@pytest.mark.long
@pytest.mark.usefixtures("namespaces_allowed")
def test_counters_agree_with_the_interfaces():
    command = [sys.executable, PROGRAM, "--rate", "1gbit", "--timeout", "100", "--", *TRAINING.split(), "23"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    measured = json.loads(out)
    # The norm's and the log's small all-reduces and TCP headers weigh more here than under a model of real size.
    assert measured["counted_bytes_per_node_and_step"] == pytest.approx(measured["bytes_per_node_and_step"], rel=0.15)
    assert measured["steps"] == 20 and measured["nodes"] == 2
    assert not leftovers(process.pid)


@pytest.mark.usefixtures("namespaces_allowed")
def test_ctrl_c_removes_the_cluster():
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "--", *TRAINING.split(), "100000"],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where tests run in the background it is off
    )
    while not leftovers(process.pid):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert not leftovers(process.pid)


@pytest.mark.usefixtures("namespaces_allowed")
def test_ctrl_c_while_a_namespace_is_made_leaves_nothing(monkeypatch):
    class Interrupted(subprocess.Popen):
        def __init__(self, command, **more):
            makes = command[:3] == ["ip", "netns", "add"]
            super().__init__(["sh", "-c", f"sleep 0.3; {' '.join(command)}"] if makes else command, **more)
            if makes:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), cluster(2, None):
        pass
    time.sleep(0.5)  # by then a child that nobody waited for has made it
    assert not leftovers(os.getpid())


def test_without_root_it_says_so(tmp_path):
    if sys.platform == "linux" and os.geteuid() != 0:
        command = [sys.executable, PROGRAM, "--", "pretrain_gpt.py"]
    else:  # as root, take the tools away instead
        command = ["env", f"PATH={tmp_path}", sys.executable, PROGRAM, "--", "pretrain_gpt.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.evidence
@pytest.mark.usefixtures("namespaces_allowed")
def test_a_node_is_named_whose_link_becomes_slow():
    """A tenth of the rate, one way, within 20 steps; and before that nobody is named."""
    flags = TRAINING.replace("--zero-hpz-partition-size 2", "--zero-hpz-partition-size 1 --zeropp-ranks-per-node 1")
    command = [*flags.replace("--global-batch-size 8", "--global-batch-size 3").split(), "1000", "--log-straggler"]
    with cluster(3, "200mbit") as namespaces, programs(command, namespaces, 1) as processes:
        steps, named = [0], []

        def follow(process):
            for line in process.stdout:
                if found := re.search(r"iteration +(\d+)/", line):
                    steps.append(int(found[1]))
                if line.startswith("straggler: "):
                    named.append((steps[-1], line))

        for process in processes:
            threading.Thread(target=follow, args=(process,), daemon=True).start()

        def wait(is_over):
            deadline = time.monotonic() + 100
            while not is_over() and time.monotonic() < deadline:
                time.sleep(0.02)

        wait(lambda: steps[-1] >= 18)
        assert not named
        begin = steps[-1]
        sh(f"tc -n {namespaces[1]} qdisc change dev eth0 root tbf rate 20mbit burst 256kb latency 200ms")
        wait(lambda: named)
        ((end, line),) = named
    assert line.startswith("straggler: the link from node 1 (") and 0.01 < float(line.split()[-9]) < 0.03, line
    assert begin < int(re.search(r"since step (\d+)$", line)[1]) + 5 and end <= begin + 40
