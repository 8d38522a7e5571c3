"""``--local-ranks``: start several ranks on this machine, as one node or as several."""

import os
import signal
import sys


def is_launched() -> bool:
    """Return whether torchrun, Slurm or another launcher has started this process as one of several ranks."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def start_local_ranks(ranks: int | None, nodes: int) -> None:
    """Replace this process by torchrun, which runs the same command on ``ranks`` ranks; on such a rank, set its node.

    Does nothing if ``ranks`` is None. Terminal, process id and signals stay; torchrun ends with status 0 or 1, as it
    does on a cluster. Raises ValueError where the command line cannot start the program again.
    """
    if ranks is None or (ranks == 1 and not is_launched()):
        return
    if not is_launched():
        # A notebook's kernel, and a script on stdin, cannot be started again.
        if not set(sys.argv[1:]) <= set(sys.orig_argv) or sys.orig_argv[1:2] == ["-"]:
            again = "--local-ranks starts this program again by its command line, which does not hold these flags"
            raise ValueError(f"{again}: put the program into a file, or start it with torchrun")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning
        torchrun = f"torch.distributed.run --standalone --no-python --nproc-per-node {ranks}".split()
        torchrun += ["--local-addr", "127.0.0.1"]  # not every machine resolves its own name
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # CtrlC blocks it, and torchrun would inherit that
        os.execv(sys.executable, [sys.executable, "-m", *torchrun, sys.executable, "-u", *sys.orig_argv[1:]])
    # Whatever asks for a rank's node reads these, which torchrun sets on every machine of a cluster.
    per_node = ranks // nodes
    os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // per_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
