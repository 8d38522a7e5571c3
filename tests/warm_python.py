"""`python` and `torchrun` that start at once: what they run is forked from a process that has imported torch already.

Importing torch and megatron_zpp takes 5 seconds of a processor, in every rank of every program that a test starts.
``programs()`` is a folder with two programs that take the same words as the real ones and do the same: on the PATH of a
script, they are what it starts. Each is a client: it hands its words, folder, environment and open streams to a server,
passes signals on to the program, and ends as the program ends. When it is killed, so is the program.

Not the same: variables that Python or torch read when they are loaded, but OMP_NUM_THREADS and PYTHONPATH, have no
effect, files beyond the three streams stay closed, and a stopped client (SIGSTOP) does not stop the program. What tests
these, or torchrun itself, starts ``sys.executable``.
"""

import array
import atexit
import contextlib
import functools
import gc
import itertools
import json
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
request = dict(words={words!r} + sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))
text = json.dumps(request).encode()
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
server.sendmsg([len(text).to_bytes(8, "big")], streams)
server.sendall(text)
program = int(server.recv(16))
def pass_on(number, frame):
    try:
        os.kill(program, number)
    except ProcessLookupError:  # it has just ended
        pass
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
status = int(server.recv(16))
if status < 0:
    status != -signal.SIGKILL and signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def programs() -> Path:
    """The folder of ``python`` and ``torchrun``, whose server is there until this process ends."""
    from tests.ranks import FORKSERVER  # has imported torch

    folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(folder / "server")
    for name, words in {"python": [], "torchrun": ["-m", "torch.distributed.run"]}.items():
        (folder / name).write_text(CLIENT.format(python=sys.executable, words=words, address=address))
        (folder / name).chmod(0o755)
    ready, server_ready = FORKSERVER.Pipe(duplex=False)
    # Not a daemon in the sense of multiprocessing: what it forks has children. It ends when this process's pipe closes.
    server_alive, alive = FORKSERVER.Pipe(duplex=False)
    server = FORKSERVER.Process(target=_serve, args=(address, server_ready, server_alive))
    server.start()
    atexit.register(server.join)
    atexit.register(alive.close)  # before that: the last registered comes first
    assert ready.recv()
    return folder


def _serve(address: str, ready: Connection, alive: Connection) -> None:
    python = str(Path(address).with_name("python"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(100)
        ready.send(True)
        while alive not in select.select([listener, alive], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _guard(connection, alive, python)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass  # forks that ended since the last one


def _guard(connection: socket.socket, alive: Connection, python: str) -> NoReturn:
    """Start what the client asks for, and tell it how that ended; end it if the client or the tests are gone."""
    header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12))
    streams = array.array("i", ancillary[0][2][:12])
    text = connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
    program = os.fork()
    if program == 0:
        connection.close()
        alive.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(python, **json.loads(text))
    for stream in streams:
        os.close(stream)  # or a reader would wait for this process, too
    connection.sendall(str(program).rjust(16).encode())  # all that a late client reads at first, not the status, too
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, connection, alive], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(python: str, words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """As ``python WORDS`` would, in this process."""
    gc.freeze()  # or each collection would look at, and so copy, all that the server has imported
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    streams = (open(i, mode, buffering=1, closefd=False) for i, mode in enumerate("rww"))  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    multiprocessing.set_start_method(None, force=True)  # Python's own default, not the server's
    sys.executable = python  # the programs that it starts start at once, too
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    options = list(itertools.takewhile(lambda word: word in ("-u", "-m", "-c"), words))
    program, *arguments = words[len(options) :]
    is_file = options in ([], ["-u"])
    first = str(Path(program).resolve().parent) if is_file else os.getcwd()
    installed = [path for path in sys.path if "site-packages" in path or path.startswith(sys.base_prefix)]
    sys.path[:] = [first, *environment.get("PYTHONPATH", "").split(os.pathsep), *installed]
    sys.argv[:], sys.orig_argv[:] = [program, *arguments], [python, *words]
    status: Any = None
    try:
        if is_file:
            runpy.run_path(program, run_name="__main__")
        elif "-m" in options:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(program, {"__name__": "__main__"})
    except SystemExit as exit_:
        status = exit_.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # as Python does when it ends: wait for threads, then call what was registered
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status or 0)
