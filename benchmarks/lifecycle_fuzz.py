"""Sequences of what happens to a run in its life, drawn by hypothesis: after each, what is saved must be right.

    python benchmarks/lifecycle_fuzz.py --seed 1 --sequences 300 --output benchmarks/results/lifecycle_fuzz.jsonl

A sequence trains a small GPT in pieces: on 2 ranks, on 1 rank, on tensor-parallel
ranks and on stages of a pipeline, with flags that change speed or memory alone. In between it kills and stops ranks,
moves run and data, gives flags that a resume must refuse or note, swaps the data, damages a checkpoint, evaluates,
publishes, exports to transformers and imports again. Each saved state is compared with an undisturbed run's of the same
iteration: to the bit where layouts compute the same bits, else within rounding. One line of output for each sequence.
"""

import contextlib
import io
import os
import random
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import append_row, new_parser
from fault_runs import STEP, Result, Run, context, preload
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from megatron_zpp.checkpoint import candidates, iterate_tensors, problems, read_meta
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.publish import WeightReader

END = 8
SETTINGS = f"""
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --attention-dropout 0
    --hidden-dropout 0 --global-batch-size 4 --train-iters {END} --lr 0.03 --adam-eps 0.01 --log-interval 1
    --eval-interval 3 --eval-iters 2 --save-interval 2 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 99
    --make-vocab-size-divisible-by 4 --split 80,20,0 --exit-signal-handler --distributed-timeout-minutes 2
    --zeropp-ranks-per-node 1 --zero-quantized-gradients --zeropp-gradient-bits 8 --zeropp-gradient-block-size 32
    """.split()
SAME_BITS = {"2 ranks": (2, "--micro-batch-size 1")}
LAYOUTS = SAME_BITS | {
    "1 rank": (1, "--micro-batch-size 2"),
    "tensor": (2, "--micro-batch-size 1 --tensor-model-parallel-size 2"),
    "stages": (2, "--micro-batch-size 1 --pipeline-model-parallel-size 2"),
}
FREE = [
    "",
    "--no-async-save",
    "--recompute-granularity selective",
    "--num-workers 1",
    "--save-keep-last 2",
    "--no-mmap-bin-files",
    "--load-latest-good",
    "--zero-stage 2",
    "--seed 1234",
]
REFUSED = [
    "--seed 7",
    "--hidden-size 32",
    "--num-layers 4",
    "--optimizer sgd",
    "--lr 1e-4",
    "--decoupled-lr 1e-4",
    "--global-batch-size 8",
    "--seq-length 8",
    "--split 70,30,0",
    "--vocab-size 95",
    "--weight-decay 0.5",
    "--swiglu",
    "--curriculum-min-length 8 --curriculum-iters 4",
    "--eod-mask-loss",
    "--norm-epsilon 1e-6",
]
NOTED = ("--clip-grad 0.5", "--adam-beta1 0.8", "--adam-eps 1e-6", "--hidden-dropout 0.2", "--zeropp-gradient-bits 4")
WITHIN = 0.02  # share of a parameter's norm: 8-bit gradients make 0.007, other batches more than 1


def write_data(prefix: Path, number: int) -> None:
    draw = random.Random(number)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(str(prefix), "<u2") as writer:
        for _ in range(60):
            first = draw.randrange(90)
            writer.add_document([[(first + i * draw.choice((1, 1, 2))) % 99 for i in range(40)]])


def spoil(path: Path, how: str, rng: random.Random) -> None:
    if "missing" in how:
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "truncated":
        os.truncate(path, rng.randrange(len(content)))  # in place, under whoever has it open
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "garbage":
        path.write_bytes(rng.randbytes(len(content)))
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


class Oracle:
    """The undisturbed run, saved at every step, and its losses."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "text"
        for number, name in enumerate(("text", "other")):
            write_data(folder / name, number)
        self.folder, self.losses = folder / "run", dict[int, str]()
        run = start(self.folder, self.data, "2 ranks", "--save-interval 1").wait()
        assert run.well, run.output
        self.losses = losses_of(run)

    def compare(self, checkpoint: Path, is_exact: bool) -> None:
        theirs, meta = self.folder / checkpoint.name, read_meta(checkpoint)
        other = read_meta(theirs)
        for name in ("iteration", "consumed_train_samples", "scheduled_samples", "skipped_iterations"):
            assert meta["counters"][name] == other["counters"][name], f"{checkpoint.name}: {name}"
        ours, expected = (dict(iterate_tensors(path, read_meta(path), "model.")) for path in (checkpoint, theirs))
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            if is_exact:
                assert torch.equal(ours[name], tensor), f"{checkpoint.name}: {name} differs"
            distance = (ours[name].double() - tensor.double()).norm() / max(1e-3, tensor.double().norm())
            assert distance < WITHIN, f"{checkpoint.name}: {name} is off by {distance:.1%}"


def start(folder: Path, data: Path, layout: str, *more: str) -> Run:
    ranks, flags = LAYOUTS[layout]
    places = f"--save {folder} --load {folder} --data-path {data} --data-cache-path {folder / 'cache'}"
    return Run([*SETTINGS, *f"{flags} {places} {' '.join(more)}".split()], ranks=ranks)


def losses_of(run: Result) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"iteration +(\d+)/.* lm loss: (\S+) \|", run.output)}


def _convert(checkpoint: Path, folder: Path, said: Any) -> None:
    """Export to transformers, which checks the logits, and import again: in a process of its own."""
    load = ["--load", str(checkpoint.parent), "--ckpt-step", str(int(checkpoint.name[5:]))]
    exported = export_hf.parse_arguments([*load, "--output", str(folder / "hf"), "--no-tokenizer"])
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    words = ["--input", str(folder / "hf"), "--save", str(folder / "imported"), *tokenizer]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        text = export_hf.export(exported, None)
        import_hf.import_(import_hf.parse_arguments(words), import_hf.ARCHITECTURES)
    said.send(text)


class Life(RuleBasedStateMachine):
    """One run: its folder, its data, and which of its saved iterations equal the undisturbed run's to the bit."""

    oracle: Oracle
    record: Any

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="life"))
        self.folder, self.data = self.home / "run0", self.home / "data0" / "text"
        self.data.parent.mkdir()
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{self.oracle.data}{suffix}", f"{self.data}{suffix}")
        self.moves, self.exact, self.did, self.begun = 0, {0: True}, list[str](), time.monotonic()
        self.outcome = "broken off"

    @property
    def iteration(self) -> int:
        found = candidates(str(self.folder)) if self.folder.is_dir() else []
        return int(found[0].name[5:]) if found else 0

    def begin(self, what: str, layout: str, *more: str) -> Run:
        self.did.append(f"{what}: {layout} {' '.join(more)}".strip())
        return start(self.folder, self.data, layout, *more)

    def settle(self, before: int, layout: str, result: Result) -> None:
        """Compare what a run from iteration ``before`` on saved."""
        assert not result.hung, f"hung: {result.codes} {result.output[-1500:]}"
        assert "Traceback" not in result.output or set(result.codes) & {-9}, result.output[-1500:]
        is_exact = self.exact.get(before, False) and layout in SAME_BITS
        for checkpoint in candidates(str(self.folder)):
            if (step := int(checkpoint.name[5:])) > before:
                self.exact[step] = is_exact
                assert not problems(checkpoint), f"{checkpoint.name}: {problems(checkpoint)}"
                self.oracle.compare(checkpoint, is_exact)
        for step, loss in losses_of(result).items():
            expected = self.oracle.losses[step]
            assert loss == expected if is_exact else abs(float(loss) - float(expected)) < 0.05, (step, loss, expected)

    layouts = st.deferred(lambda: st.sampled_from(sorted(LAYOUTS)))
    free, steps = st.sampled_from(FREE), st.integers(1, 4)

    @initialize(layout=layouts, more=free, steps=steps)
    def train_first(self, layout: str, more: str, steps: int) -> None:
        self.train(layout, more, steps)

    @precondition(lambda self: self.iteration < END)
    @rule(layout=layouts, more=free, steps=steps)
    def train(self, layout: str, more: str, steps: int) -> None:
        before, end = self.iteration, min(END, self.iteration + steps)
        result = self.begin("train", layout, more, f"--exit-interval {end}").wait()
        assert result.well, result.output[-1500:]
        self.settle(before, layout, result)
        assert self.iteration == end

    @precondition(lambda self: self.iteration < END)
    @rule(layout=layouts, more=free, steps=steps, rank=st.integers(0, 1), kills=st.booleans(), after=st.floats(0, 0.1))
    def hit(self, layout: str, more: str, steps: int, rank: int, kills: bool, after: float) -> None:
        before, number = self.iteration, signal.SIGKILL if kills else signal.SIGTERM
        run = self.begin(f"{number.name} after {steps} steps and {after:.3f} s", layout, more)
        run.wait_for(STEP, steps + 1)
        was_hit = run.hit(rank % LAYOUTS[layout][0], number, after)
        result = run.wait()
        assert (kills and was_hit) or result.well, (result.codes, result.output[-1500:])
        self.settle(before, layout, result)

    @precondition(lambda self: self.did[-1:] != ["move"])
    @rule(with_data=st.booleans())
    def move(self, with_data: bool) -> None:
        self.moves += 1
        self.did.append("move")
        self.folder = self.folder.rename(self.home / f"run{self.moves}")
        if with_data:
            self.data = self.data.parent.rename(self.home / f"data{self.moves}") / "text"

    def refuse(self, what: str, layout: str, more: str, said: str = "") -> None:
        before = {path.name: read_meta(path) for path in candidates(str(self.folder)) if not problems(path)}
        result = self.begin(what, layout, more).wait()
        errors = re.findall("^error: .*", result.output, re.MULTILINE)
        assert set(result.codes) == {2} and len(errors) == 1 and said in errors[0], result.output[-1500:]
        assert before == {path.name: read_meta(path) for path in candidates(str(self.folder)) if not problems(path)}

    @precondition(lambda self: self.iteration > 0)
    @rule(layout=layouts, flags=st.sampled_from(REFUSED))
    def give_what_is_refused(self, layout: str, flags: str) -> None:
        self.refuse("refused", layout, flags)

    @precondition(lambda self: self.iteration > 0)
    @rule(layout=layouts, flags=st.sampled_from(NOTED))
    def give_what_is_noted(self, layout: str, flags: str) -> None:
        result = self.begin("noted", layout, flags, "--skip-train").wait()
        assert result.well and "note: changed since the checkpoint was saved" in result.output, result.output[-1500:]

    @precondition(lambda self: self.iteration > 0)
    @rule(layout=layouts)
    def swap_data(self, layout: str) -> None:
        tokens, other = Path(f"{self.data}.bin"), self.oracle.data.with_name("other.bin")
        kept = tokens.read_bytes()
        shutil.copy(other, tokens)
        self.refuse("other data", layout, "")
        tokens.write_bytes(kept)

    @precondition(lambda self: self.folder.is_dir() and len(candidates(str(self.folder))) > 1 and self.iteration < END)
    @rule(
        layout=layouts,
        draw=st.randoms(use_true_random=False),
        how=st.sampled_from(("truncated", "bit flipped", "missing")),
    )
    def damage(self, layout: str, draw: random.Random, how: str) -> None:
        newest, older = candidates(str(self.folder))[:2]
        victim = draw.choice(sorted(path for path in newest.iterdir() if path.name != "complete"))
        spoil(victim, how, draw)
        self.refuse(f"{victim.name} {how}", layout, "", newest.name)
        result = self.begin("latest good", layout, f"--load-latest-good --exit-interval {int(newest.name[5:])}").wait()
        assert result.well and f"passed over: {newest}" in result.output.replace(f"{newest}/", f"{newest} "), (
            result.output
        )
        self.settle(int(older.name[5:]), layout, result)

    @precondition(lambda self: self.iteration > 0 and not self.did[-1].startswith("evaluate"))
    @rule(layout=layouts)
    def evaluate(self, layout: str) -> None:
        result = self.begin("evaluate", layout, "--skip-train").wait()
        assert result.well, result.output[-1500:]
        (loss,) = re.findall(r"on validation set.* lm loss value: (\S+)", result.output)
        step = self.iteration
        key = f"evaluated {step}"
        if key not in self.oracle.__dict__:
            once = f"--load {self.oracle.folder} --ckpt-step {step} --skip-train --save {self.home / 'nothing'}"
            undisturbed = start(self.home / "nothing", self.data, "2 ranks", once).wait()
            (self.oracle.__dict__[key],) = re.findall(r"on validation set.* lm loss value: (\S+)", undisturbed.output)
        expected, is_exact = self.oracle.__dict__[key], self.exact[step] and layout in SAME_BITS
        assert loss == expected if is_exact else abs(float(loss) - float(expected)) < 0.05, (loss, expected)

    @precondition(lambda self: self.iteration < END)
    @rule(layout=layouts, steps=steps)
    def publish(self, layout: str, steps: int) -> None:
        before, end, folder = self.iteration, min(END, self.iteration + steps), self.home / f"published{len(self.did)}"
        result = self.begin("publish", layout, f"--publish {folder}", f"--exit-interval {end}").wait()
        assert result.well, result.output[-1500:]
        self.settle(before, layout, result)
        reader, newest = WeightReader(folder), candidates(str(self.folder))[0]
        assert reader.update() and reader.step == end == self.iteration
        saved = dict(iterate_tensors(newest, read_meta(newest), "model."))
        for name, tensor in reader.tensors():
            assert torch.equal(tensor, saved[name].to(tensor.dtype)), name

    @precondition(lambda self: self.iteration > 0 and "export, import" not in self.did)
    @rule()
    def export_and_import(self) -> None:
        newest, folder = candidates(str(self.folder))[0], self.home / f"converted{len(self.did)}"
        self.did.append("export, import")
        folder.mkdir()
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_convert, args=(newest, folder, sender))
        process.start()
        sender.close()
        assert "differ from ours" in receiver.recv()
        process.join()
        imported = candidates(str(folder / "imported"))[0]
        pair = [dict(iterate_tensors(path, read_meta(path), "model.")) for path in (newest, imported)]
        assert pair[0].keys() == pair[1].keys() and all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])

    def teardown(self) -> None:
        self.record(self)
        shutil.rmtree(self.home)


def fuzz(number: int, sequences: int, output: Path | None, steps: int = 4) -> list[dict[str, Any]]:
    """Run this number of sequences; return a row for each. Raises the first error, with its sequence printed."""
    rows: list[dict[str, Any]] = []

    def record(life: Life) -> None:
        row = {"seed": number, "number": len(rows), "did": life.did, "seconds": round(time.monotonic() - life.begun, 2)}
        rows.append(row)
        append_row(output, row)
        print(len(rows), row["seconds"], "; ".join(life.did), flush=True)

    with tempfile.TemporaryDirectory(prefix="lifecycle") as folder:
        Life.oracle, Life.record = Oracle(Path(folder)), staticmethod(record)
        options = settings(
            max_examples=sequences,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(seed(number)(Life), settings=options)
    return rows


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=300)
    parser.add_argument("--dropout", action="store_true", help="train with it, on layouts that draw the same masks")
    parser.add_argument("--output", type=Path, help="append one JSON line for each sequence, and a summary")
    args = parser.parse_args()
    preload("transformers", "hypothesis.stateful", "megatron_zpp.commands.convert.export_hf")
    if args.dropout:
        SETTINGS.extend(["--attention-dropout", "0.1", "--hidden-dropout", "0.1"])
        for name in LAYOUTS.keys() - SAME_BITS.keys():
            del LAYOUTS[name]
    begun = time.monotonic()
    rows = fuzz(args.seed, args.sequences, args.output)
    seconds = round(time.monotonic() - begun, 1)
    summary = {"sequences": len(rows), "steps": sum(len(row["did"]) for row in rows), "wrong": 0}
    append_row(args.output, {"summary": summary, "seed": args.seed, "seconds": seconds})


if __name__ == "__main__":
    main()
