"""``megatron-zpp`` and ``python -m megatron_zpp``: every program of the package by name; env and doctor."""

import re
import resource
import sys
from pathlib import Path

import pytest
import torch

from megatron_zpp import __main__ as commands
from megatron_zpp.arguments.help import help_text
from megatron_zpp.commands import pretrain
from megatron_zpp.commands.diagnose import doctor
from megatron_zpp.families import find_architecture
from megatron_zpp.zeropp.wire import kernels
from tests.conftest import ROOT
from tests.tools import run


def call(monkeypatch, *words: str, launcher: str = "/usr/bin/megatron-zpp") -> int:
    """Status of ``LAUNCHER WORDS``, run in this process."""
    monkeypatch.setattr(sys, "argv", [launcher, *words])
    try:
        return commands.main()
    except SystemExit as exit_:
        return int(exit_.code or 0)


def test_help_lists_every_command_before_torch_is_imported():
    script = "import sys; from megatron_zpp.__main__ import main; main(); assert 'torch' not in sys.modules"
    ran = run(sys.executable, "-c", script, "--help")
    listed = dict(re.findall(r"^  (\S+)  +(\S.*)$", ran.stdout, re.MULTILINE))
    assert listed == commands.COMMANDS
    assert all(len(line) < 120 for line in ran.stdout.splitlines())


def module_of(command: str) -> str:
    return commands.find_program(command).__module__


def test_every_command_has_its_script_in_the_checkout_and_every_script_its_command():
    trainers = {path.stem.replace("_", "-") for path in ROOT.glob("pretrain_*.py")}
    assert trainers == commands.COMMANDS.keys() - commands.TOOLS.keys()
    scripts = {path.stem.replace("_", "-"): path.read_text() for path in (ROOT / "tools").glob("*.py")}
    programs = {name: module_of(name) for name in [*commands.TOOLS, *commands.ALIASES]}
    programs = {name: module for name, module in programs.items() if module.startswith("megatron_zpp.commands.")}
    assert scripts.keys() == programs.keys()
    for name, module in programs.items():
        imports, runs = f"from {module} import main", 'if __name__ == "__main__":\n    raise SystemExit(main())\n'
        assert scripts[name].startswith('"""`megatron-zpp ') and scripts[name].endswith(f"{imports}\n\n{runs}"), name
        assert scripts[name].count("\n") == 6, "a script only starts its command"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("pretrain-lama", "did you mean pretrain-llama?"),
        ("merge_datasets", "did you mean merge-datasets?"),
        ("xyz", ""),
    ],
)
def test_an_unknown_command_is_one_line_with_the_nearest_name(monkeypatch, capsys, typed, hint):
    assert call(monkeypatch, typed, "--help") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: unknown command {typed}; {hint or 'megatron-zpp --help'}")


def test_without_a_command_the_list_goes_to_stderr(monkeypatch, capsys):
    assert call(monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == "" and "pretrain-gpt" in err


@pytest.mark.parametrize("tool", commands.TOOLS)
@pytest.mark.parametrize(
    ("launcher", "program"),
    [("/venv/bin/megatron-zpp", "megatron-zpp"), ("/x/megatron_zpp/__main__.py", "python -m megatron_zpp")],
)
def test_usage_is_what_was_typed(monkeypatch, capsys, tool, launcher, program):
    assert call(monkeypatch, tool, "--help", launcher=launcher) == 0
    assert capsys.readouterr().out.startswith(f"usage: {program} {tool} [-h]")


@pytest.mark.parametrize("architecture", commands.architecture_names())
@pytest.mark.parametrize("program", ["pretrain_gpt.py", "megatron-zpp pretrain-gpt"])
def test_the_trainers_usage_is_what_was_typed_and_how_to_start_ranks(monkeypatch, architecture, program):
    monkeypatch.setattr(sys, "argv", [str(Path("somewhere") / program)])
    alone, ranks = help_text(find_architecture(architecture)).splitlines()[:2]
    assert alone == f"usage: {program} [flags]"
    assert ranks.strip().startswith(f"torchrun --nproc-per-node N -m megatron_zpp pretrain-{architecture} [flags] ")


@pytest.mark.parametrize("architecture", commands.architecture_names())
def test_a_trainers_command_trains_that_architecture(monkeypatch, architecture):
    started = []
    monkeypatch.setattr(pretrain, "main", started.append)
    call(monkeypatch, f"pretrain-{architecture}", "--num-layers", "2")
    assert started == [find_architecture(architecture)] and sys.argv[1:] == ["--num-layers", "2"]


@pytest.mark.parametrize("package", ["numpy", "rich"])
def test_a_missing_package_names_the_extra(package):
    # A process of its own: this one has imported what needs the package.
    script = f"import sys; sys.modules[{package!r}] = None; from megatron_zpp.__main__ import main; sys.exit(main())"
    assert run(sys.executable, "-c", script, "preprocess-data", "--help", status=2).stderr == (
        f"error: megatron-zpp preprocess-data needs the package {package}: pip install numpy rich sentencepiece, "
        "or megatron_zpp's extra train\n"
    )


def run_env(**environment):
    return run(sys.executable, "-m", "megatron_zpp.commands.env", **environment).stdout


def test_it_reports_versions_devices_and_the_path_of_each_operator():
    ours, torchs = run_env().split("\n\n", 1)
    lines = dict(line.split("  ", 1) for line in ours.splitlines())
    assert f"PyTorch version: {torch.__version__}" in torchs
    assert "lo" in lines["interfaces"].split()[0]
    assert all("compiled" in lines[f"{operator} on cpu"] for operator in kernels.OPERATORS)


@pytest.mark.long
def test_it_says_why_plain_torch_runs(tmp_path):
    assert re.search("encode on cpu +plain torch: switched off by ZEROPP_KERNELS=off", run_env(ZEROPP_KERNELS="off"))
    missing = tmp_path / "missing.so"
    assert f"there is no {missing}" in run_env(ZEROPP_KERNELS=str(missing))
    missing.write_bytes(b"not a library")
    assert "was built for another torch" in run_env(ZEROPP_KERNELS=str(missing))


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
def test_doctor_measures_links_under_torchrun():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(*torchrun, "-m", "megatron_zpp", "doctor").stdout
    found = re.search(r"ok +links within a node +([\d.]+) GB/s a rank, (\d+) microseconds", printed)
    assert found and float(found[1]) > 0 and int(found[2]) > 0
    assert printed.count("torch") == 1  # a node's checks appear once, however many ranks it has
