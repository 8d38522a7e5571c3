"""A small cluster on one Linux machine: nodes with their own network interface, joined by links of a chosen rate.

    sudo .venv/bin/python benchmarks/cluster_in_a_box.py --nodes 2 --ranks-per-node 2 --rate 1gbit -- \\
        pretrain_gpt.py --preset gpt-125m ... --log-interval 1

Each node is a network namespace; ``torchrun`` starts in every one of them, and gloo's traffic between nodes crosses
their interfaces, whose rate ``tc tbf`` limits in both directions; ``--delay-ms`` adds a latency. Reported per node and
optimizer step: bytes that left its interface, with all transport overhead, beside those that the program counted
itself; tokens/s; loss.

Needs Linux, root, and the commands ``ip`` and ``tc`` (Debian package iproute2). Ends by itself after ``--timeout``
seconds, and removes what it made, also after Ctrl-C; what a killed run left over is removed by the next one.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PREFIX = "mzpp"
SUBNET = "10.213.77"
BETWEEN, BETWEEN_ISLANDS = "sent between nodes per step (MB)", "sent between islands per step (MB)"


@dataclass(frozen=True)
class Measurement:
    """Means over the steady-state steps of a run."""

    nodes: int
    ranks_per_node: int
    rate: str | None
    delay_ms: float
    steps: int
    bytes_per_node_and_step: float  # left a node's interface
    counted_bytes_per_node_and_step: float  # by the program's own counters
    tokens_per_second: float
    seconds_per_step: float
    loss: float  # the last step's
    peak_memory_mb: float | None = None  # the largest rank's, if the program logs it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rate", help="of each node's link, as tc takes it: 100mbit, 1gbit; default unlimited")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from one node to another, in each direction")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps left out of the means")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which the run is ended")
    parser.add_argument("command", nargs="+", metavar="-- PROGRAM ARGS", help="a training program that logs often")
    try:
        print(json.dumps(asdict(run(**vars(parser.parse_args())))))
    except (RuntimeError, TimeoutError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the cluster is removed")


def run(
    command: Sequence[str],
    nodes: int,
    ranks_per_node: int,
    rate: str | None = None,
    warmup_steps: int = 2,
    timeout: float = 600.0,
    echo: bool = True,
    delay_ms: float = 0.0,
) -> Measurement:
    """Run ``command``, a training program and its arguments, on a fresh cluster; raises RuntimeError if it fails."""
    check_requirements()
    with cluster(nodes, rate, delay_ms) as namespaces, programs(command, namespaces, ranks_per_node) as processes:
        samples = read_samples(processes, namespaces, time.monotonic() + timeout, echo)
    samples = [sample for sample in samples if sample[1]["iteration"] > warmup_steps]
    if len(samples) < 2:
        raise RuntimeError(f"no whole interval was logged after step {warmup_steps}: train longer, or log more often")
    (first, first_fields), (last, last_fields) = samples[0], samples[-1]
    steps = round(last_fields["iteration"] - first_fields["iteration"])

    def mean(value: Callable[[dict[str, float]], float]) -> float:
        """Per step. Each line is a mean over the steps since the one before."""
        pairs = itertools.pairwise(fields for _, fields in samples)
        return sum((fields["iteration"] - before["iteration"]) * value(fields) for before, fields in pairs) / steps

    seconds = mean(lambda fields: fields["elapsed time per iteration (ms)"]) / 1000
    tokens = mean(lambda fields: fields["tokens per second"] * fields["elapsed time per iteration (ms)"]) / 1000
    counted = mean(lambda fields: fields.get(BETWEEN, 0.0) + fields.get(BETWEEN_ISLANDS, 0.0))
    return Measurement(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        rate=rate,
        delay_ms=delay_ms,
        steps=steps,
        bytes_per_node_and_step=(sum(last) - sum(first)) / steps / nodes,
        counted_bytes_per_node_and_step=counted * 1e6 / nodes,
        tokens_per_second=tokens / seconds,
        seconds_per_step=seconds,
        loss=last_fields["lm loss"],
        peak_memory_mb=last_fields.get("peak memory (MB)"),
    )


def parse_line(line: str) -> dict[str, float] | None:
    """Return the numbers of a training line by name, as Megatron and other programs print it; None for other lines."""
    start = re.search(r"iteration +(\d+)/ *(\d+) \|", line)
    if start is None:
        return None
    fields = {"iteration": float(start[1]), "train iterations": float(start[2])}
    for name, value in re.findall(r"([^|:]+): +([-+.\deE]+|nan|inf) \|", line[start.end() - 1 :]):
        fields[name.strip(" |")] = float(value)
    return fields


def check_requirements() -> None:
    """Raise RuntimeError that says what is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise RuntimeError("network namespaces need Linux and root: run it with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)")


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Deliver a Ctrl-C at the end only: a ``Popen`` that it interrupts leaves a child behind that nobody waits for."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def cluster(nodes: int, rate: str | None, delay_ms: float = 0.0) -> Iterator[list[str]]:
    """Namespaces with an interface eth0 each, at SUBNET.1, .2, ..., joined by a bridge; removed at the end.

    With a delay, a program of ours passes their frames on instead: Linux's netem is not everywhere.
    """
    remove_leftovers()
    bridge = f"{PREFIX}br{os.getpid()}"
    namespaces = [f"{PREFIX}-{os.getpid()}-{node}" for node in range(nodes)]
    outsides = [f"{PREFIX}{os.getpid()}v{node}" for node in range(nodes)]
    switch = None
    try:
        with hold_interrupts():
            sh(f"ip link add {bridge} type bridge")
            sh(f"ip link set {bridge} up")
            for node, (namespace, outside) in enumerate(zip(namespaces, outsides, strict=True)):
                sh(f"ip netns add {namespace}")
                sh(f"ip link add {outside} type veth peer name eth0 netns {namespace}")
                sh(f"ip link set {outside} {'' if delay_ms else f'master {bridge}'} up")
                sh(f"ip -n {namespace} addr add {SUBNET}.{node + 1}/24 dev eth0")
                sh(f"ip -n {namespace} link set eth0 up")
                sh(f"ip -n {namespace} link set lo up")
                if rate is not None:
                    shape = f"root tbf rate {rate} burst 256kb latency 200ms"
                    sh(f"tc -n {namespace} qdisc add dev eth0 {shape}")  # what the node sends
                    sh(f"tc qdisc add dev {outside} {shape}")  # what it receives
            if delay_ms:
                switch = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("delay.py")), str(delay_ms), *outsides]
                )
        yield namespaces
    finally:
        with hold_interrupts():
            if switch is not None:
                switch.kill()
                switch.wait()
            remove(os.getpid())


def remove(pid: int) -> None:
    """Remove the cluster that the process ``pid`` made."""
    for name in re.findall(rf"{PREFIX}-{pid}-\d+", sh("ip netns list")):
        subprocess.run(f"ip netns pids {name} | xargs -r kill -9", shell=True, check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    # A namespace goes, and takes its end of the link along, only when its last process has; its name goes at once.
    for link in re.findall(rf"{PREFIX}{pid}v\d+|{PREFIX}br{pid}", sh("ip -o link")):
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def remove_leftovers() -> None:
    """Remove clusters whose maker was killed."""
    makers = {int(found) for found in re.findall(rf"{PREFIX}-(\d+)-\d+", sh("ip netns list"))}
    makers |= {int(found) for found in re.findall(rf"{PREFIX}br(\d+)", sh("ip -o link"))}
    for pid in makers:
        if not Path(f"/proc/{pid}").exists():
            remove(pid)


@contextmanager
def programs(
    command: Sequence[str], namespaces: list[str], ranks_per_node: int, master: str = f"{SUBNET}.1"
) -> Iterator[list[subprocess.Popen]]:
    """``torchrun`` on every node; all output goes to its stdout. Killed at the end. master: address of the first."""
    threads = max(1, (os.cpu_count() or 1) // (len(namespaces) * ranks_per_node))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes = []
    try:
        for node, namespace in enumerate(namespaces):
            torchrun = f"-m torch.distributed.run --nnodes {len(namespaces)} --node-rank {node} --nproc-per-node "
            torchrun += f"{ranks_per_node} --master-addr {master} --master-port 29500"
            launched = ["ip", "netns", "exec", namespace, sys.executable, *torchrun.split(), *command]
            with hold_interrupts():
                processes.append(subprocess.Popen(launched, env=environment, start_new_session=True, **pipes))
        yield processes
    finally:
        with hold_interrupts():
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def measure_box(path: Path, nodes: int, ranks_per_node: int, width: int, tokens: int) -> None:
    """Measure a cluster for the planner, with unlimited links, and write its file."""
    tool = [str(Path(__file__).parents[1] / "tools" / "measure_cluster.py"), "--output", str(path)]
    tool += ["--hidden-size", str(width), "--tokens", str(tokens)]
    with cluster(nodes, None) as namespaces, programs(tool, namespaces, ranks_per_node) as processes:
        said = [process.communicate(timeout=900)[0] for process in processes]
    if not path.exists():
        raise RuntimeError(f"the cluster was not measured:\n{said[0]}")


def read_samples(
    processes: list[subprocess.Popen], namespaces: list[str], deadline: float, echo: bool
) -> list[tuple[list[int], dict[str, float]]]:
    """The fields of each log line, which the last rank prints, and the bytes that each node had sent by then."""
    samples = []
    output = processes[-1].stdout
    assert output is not None
    os.set_blocking(output.fileno(), False)
    lines: list[str] = []
    while True:
        if line := output.readline():
            lines.append(line)
            if echo:
                print(line, end="", file=sys.stderr)
            fields = parse_line(line)
            if fields is not None:
                samples.append(([sent_bytes(namespace) for namespace in namespaces], fields))
            continue
        if any(process.poll() not in (None, 0) for process in processes):
            time.sleep(2)  # for the last words
            os.set_blocking(output.fileno(), True)
            ended = [process for process in processes if process.poll() is not None]
            tails = [process.stdout.read() for process in ended if process.stdout is not None]
            raise RuntimeError(f"the program failed:\n{''.join(lines[-20:])}{''.join(tails)[-3000:]}")
        if processes[-1].poll() == 0:
            return samples
        if time.monotonic() > deadline:
            raise TimeoutError("the run took longer than --timeout")
        time.sleep(0.01)


def sent_bytes(namespace: str) -> int:
    """Bytes that left the node's interface since it was made."""
    statistics = json.loads(sh(f"ip -n {namespace} -s -j link show dev eth0"))
    return int(statistics[0]["stats64"]["tx"]["bytes"])


def sh(command: str) -> str:
    """Run a command, and return what it prints; raises RuntimeError with its words if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
