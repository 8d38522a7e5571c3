"""``megatron-zpp doctor`` says what a node lacks, and under torchrun what its links carry."""

import re
import resource
import sys

import pytest

from megatron_zpp.commands.diagnose import doctor
from tests.tools import run


def test_a_node_that_lacks_nothing_and_one_that_does(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["doctor"])
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (doctor.OPEN_FILES, files[1]))
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch<2.14,>=2.11"])
    assert doctor.main() == 0
    assert "LOOK" not in capsys.readouterr().out
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, files[1]))
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch<1.14,>=1.11"])
    assert doctor.main() == 1
    looks = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "LOOK" in line]
    assert looks == ["torch", "open"]


@pytest.mark.long
def test_links_under_torchrun():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(*torchrun, "-m", "megatron_zpp", "doctor").stdout
    found = re.search(r"ok +links within a node +([\d.]+) GB/s a rank, (\d+) microseconds", printed)
    assert found and float(found[1]) > 0 and int(found[2]) > 0
    assert printed.count("torch") == 1  # a node's checks appear once, however many ranks it has
