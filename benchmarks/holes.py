"""300 faults in ten places where faults once spread, hung, filled a disk or went unseen: 30 for each, drawn by seed.

    python benchmarks/holes.py list --seed 58     # writes the list: program, resource, fault and moment of each
    sudo .venv/bin/python benchmarks/holes.py run --only 1 2   # tries what the list says, and appends the outcomes

The list is written before anything runs. Each fault meets real programs, processes, files and signals, most of them by
the functions that the tests use. A fault is "mended" if the program went on and what it made is right, or if it ended
in time with one line that says why. All else is "bad", with the reason. Full disks and other users need root.
"""

import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROOT, append_row, new_parser, read_rows

sys.path.insert(0, str(ROOT))
from tests.commands import test_mistakes as mistakes
from tests.islands import test_unsound as unsound
from tests.publish import test_hostile as hostile
from tests.ranks import run_ranks
from tests.tools import run
from tests.training.small_run import NO_DROPOUT, RUN, SHAPE, write_text
from tests.training.test_stop import TERMINAL, at_a_terminal

NUMBER, LIST, OUTCOMES = 30, RESULTS / "holes_list.jsonl", RESULTS / "holes.jsonl"
TRAIN = f"pretrain-gpt {SHAPE} {RUN} {NO_DROPOUT} --num-workers 0 --tokenizer-type ByteTokenizer"
Row = dict[str, Any]


class Bad(Exception):  # noqa: N818 - what must not happen, and why
    pass


def expect(is_right: bool, why: object) -> None:
    if not is_right:
        raise Bad(str(why)[-600:])


def call(folder: Path, words: str, names: Iterable[str] = (), status: Iterable[int] = (0, 2)) -> tuple[int, str]:
    """Run a command in a folder; return its status and output. One that fails says why, with these words, in a line."""
    done = run("python", "-m", "megatron_zpp", *words.split(), status=None, timeout=120, folder=folder)
    said = done.stdout + done.stderr
    expect("Traceback" not in said and done.returncode in status, f"status {done.returncode}: {said}")
    if done.returncode:
        expect(done.stderr.splitlines()[-1].startswith("error: "), said)
        expect(all(name in said for name in names), f"{[*names]} not in {said}")
    return done.returncode, said


# 1. An island with numbers that are none, among three.


def nonfinite(folder: Path, row: Row) -> str:
    number, bad = int(row["resource"][-1]), row["fault"]
    steps, fragments = map(int, row["moment"].split(" in "))
    config = unsound.IslandConfig(steps, **unsound_settings(row["program"]), fragments=fragments)
    others = [island for island in range(3) if island != number]
    spoiled = run_ranks(3, unsound.train, config, [0, 1, 2], 1, number, float(bad))
    absent = run_ranks(2, unsound.train, config, others, 1)
    for island, (parameters, _) in zip(others, absent, strict=True):
        same = all(map(torch.equal, parameters, spoiled[island][0]))
        expect(same, f"island {island} is another than without island {number}")
    expect(any(f"island {number}" in said for _, said in spoiled), "nothing was said")
    return "the others are bit-identical, and it was said"


def unsound_settings(program: str) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "fp32": {},
        "SGD": {"outer_optimizer": "sgd"},
        "8 bits": {"bits": 8, "loco": True, "block_size": 16},
    }
    return settings[program]


# 2. A disk with little room: a failed write leaves nothing behind, and works once there is room.


def no_room(folder: Path, row: Row) -> str:
    program, flag = row["program"], row["resource"]
    place = folder / "place"
    place.mkdir()
    kilobytes = 4 * row["moment"]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=True)
    try:
        filler = place / "others"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        if row["fault"] == "full":
            with open(filler, "r+b") as file:
                file.truncate(filler.stat().st_size - 1024 * kilobytes)
        else:
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        done = mistakes.start(world(), program, {flag: place / "new"}, False)
        expect("Traceback" not in done.stderr, done.stderr)
        if done.returncode == 0 and flag not in ("--tensorboard-dir", "--data-cache-path"):
            return "there was room" if not done.stderr.strip() else "went on, and said why: " + done.stderr[-200:]
        expect(str(place) in done.stderr, f"status {done.returncode}, no name: {done.stderr}")
        kept = [path.name for path in place.iterdir() if path.name not in ("others", "new")]
        expect(not kept, f"left behind: {kept}")
        subprocess.run(["mount", "-o", "remount,rw,size=50m", place], check=True)
        again = mistakes.start(world(), program, {flag: place / "new"}, False)
        expect(again.returncode == 0, f"not even with room: {again.stderr}")
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    return "said, nothing was left, and works with room"


# 3. Published folders that somebody changed.


def changed_weights(folder: Path, row: Row) -> str:
    digests = run_ranks(2, hostile.publish, str(folder / "published"))[0]
    ((_, outcome),) = run_ranks(1, read_one, str(folder / "published"), digests, row["seed"], timeout=90)[0]
    expect(not outcome.startswith("BELIEVED"), outcome)
    return outcome


def read_one(published: str, digests: list[str], seed: int) -> list[tuple[str, str]]:
    """Read one changed folder, by the test's function, which does all seeds below a number."""
    changes, draw = hostile.CHANGES, random.Random
    hostile.CHANGES = [changes[seed % len(changes)]]
    hostile.random.Random = lambda _: draw(seed)  # type: ignore[assignment,misc]
    return hostile.read_each(published, digests, 1)


# 4. Parameters that are frozen or unfrozen where the next pass skips their unit: as plain FSDP2.


def frozen(folder: Path, row: Row) -> str:
    plain, ours = (run_ranks(2, train_with_freezing, row, zeropp)[0] for zeropp in (False, True))
    expect(len(plain) == len(ours) and all(map(torch.equal, plain, ours)), "other parameters than under plain FSDP2")
    return "as plain FSDP2, to the bit"


def train_with_freezing(row: Row, zeropp: bool) -> list[torch.Tensor]:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, skipped: int | None) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = x if number == skipped else layer(x).tanh()
            return x

    model = Skipping()
    for layer in (*layers, model):
        fully_shard(layer)
    if zeropp:
        apply_zeropp(model, ZeroPPConfig(ranks_per_node=1))
    optimizer, draw = torch.optim.SGD(model.parameters(), lr=0.1), random.Random(row["seed"])
    unit, begin = int(row["resource"][-1]), row["moment"]
    for step in range(6):
        if step == begin or (row["fault"] == "toggled" and step > begin):
            for name, parameter in layers[unit].named_parameters():
                if row["program"] in ("whole", name):
                    parameter.requires_grad_(row["fault"] == "unfrozen" or (step - begin) % 2 == 1)
        elif step == 0 and row["fault"] == "unfrozen":
            layers[unit].requires_grad_(False)
        skipped = unit if step == begin else draw.choice([None, 0, 1, 2, 3])
        model(torch.ones(2, 16), skipped).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


# 5. Chats with nothing to learn from, or with what is no text.


def chats(folder: Path, row: Row) -> str:
    answers = {
        "cut": "x" * 400, "whole": "yes", "list of text": [{"type": "text", "text": "yes"}],
        "list of an image": [{"type": "image"}], "missing": None, "a number": 5,
    }  # fmt: skip
    lines, draw, share = [], random.Random(row["seed"]), row["moment"]
    for i in range(40):
        answer = answers[row["fault"] if draw.random() < share else "whole"]
        message = {"role": row["resource"], "content": answer}
        good = {"role": "user" if row["resource"] == "assistant" else "assistant", "content": f"where is {i}?"}
        pair = [good, message] if row["resource"] == "assistant" else [message, good]
        lines.append(json.dumps({"messages": [{k: v for k, v in each.items() if v is not None} for each in pair]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    template = folder / "tokenizer"
    shutil.copytree(chat_tokenizer(), template)
    if row["program"] == "a template that divides by zero":
        jinja = template / "chat_template.jinja"
        jinja.write_text("{{ 1 / 0 }}" + jinja.read_text())
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {template}"
    words = f"preprocess-data --chat --skip-bad-lines --input chats.jsonl --output-prefix d {tokenizer}"
    status, said = call(folder, words, ["chats.jsonl"])
    if status:
        return f"refused: {said.splitlines()[-1][:150]}"
    train = (
        f"pretrain-gpt {SHAPE} {RUN} {NO_DROPOUT} --num-workers 0 --sft --train-iters 2 --split 1,0,0 --eval-iters 0"
    )
    status, said = call(folder, f"{train} --data-path d_messages_chat {tokenizer}", ["chat"])
    if status:
        return f"refused: {said.splitlines()[-1][:150]}"
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", said)]
    expect(len(losses) == 2 and min(losses) > 0, f"losses {losses}")
    is_cut = row["fault"] == "cut" and row["resource"] == "assistant"
    expect(not is_cut or "left out" in said or "skipped" in said, "nothing was said of chats that are cut")
    return f"trained, losses {losses}"


# 6. A fine-tuning that is not of what was given.


def finetuned(folder: Path, row: Row) -> str:
    data, other = write_text(folder), folder / "other"
    other.mkdir()
    base = f"{TRAIN} --train-iters 2 --save-interval 2 --data-path {data}"
    call(folder, f"{base} --save first", status=(0,))
    fault = row["fault"]
    load = {"mistyped": "frist", "an empty folder": "other", "a file": "text.idx"}.get(row["resource"], "first")
    words = f"{base} --load {load} --save second" + (" --finetune" if row["program"] == "--finetune" else "")
    if load == "first":
        words += f" {fault}"
    status, said = call(folder, f"{words} --train-iters {row['moment']}", [load if load != "first" else ""])
    if load != "first":
        expect(status == 2, f"it trained from scratch: {said}")
        return f"refused: {said.splitlines()[-1][:150]}"
    named = fault.split()[0].removeprefix("--").replace("-", "_")
    words = said.replace("-", "_")
    expect((status == 0 and named in words) or status == 2, f"{named} was not named: {said}")
    return "refused" if status else "noted"


# 7. A dry run and the run, of drawn flags.


def dry(folder: Path, row: Row) -> str:
    data = write_text(folder)
    words = f"{TRAIN} --train-iters 1 --data-path {data} {row['resource']} {row['fault']}"
    if row["moment"] == "with --save":
        words += " --save saved --save-interval 1"
    words = words.replace("pretrain-gpt", row["program"])
    planned, said = call(folder, f"{words} --dry-run")
    ran, meant = call(folder, words)
    expect(planned == ran, f"the dry run ends with {planned}, the run with {ran}: {said[-300:]} {meant[-300:]}")
    return f"both end with {ran}"


# 8. A path that is wrong.


def wrong_path(folder: Path, row: Row) -> str:
    mistakes.check(world(), row["program"], row["resource"], getattr(mistakes, row["fault"]))
    return "one line, status 2"


# 9. Little text, many epochs, long samples.


def small(folder: Path, row: Row) -> str:
    documents, (length, steps), split = row["resource"], row["fault"], row["moment"]
    lines = [json.dumps({"text": f"text number {i}, and no more of it"}) for i in range(documents)]
    (folder / "c.jsonl").write_text("\n".join(lines))
    call(folder, "preprocess-data --input c.jsonl --output-prefix d --tokenizer-type ByteTokenizer", status=(0,))
    words = f"{TRAIN} --data-path d_text_document --train-iters {steps} --seq-length {length} {split}"
    words += {"one": "", "two": " --exit-interval 1 --save s --save-interval 1"}[row["program"]]
    status, said = call(folder, words)
    if status:
        return f"refused: {said.splitlines()[-1][:150]}"
    expect("epoch" in said, f"nothing of epochs was said: {said[:300]}")
    if row["program"] == "two":
        status, said = call(folder, f"{words} --load s --train-iters {2 * steps}")
        expect(status == 0 or "--" in said.splitlines()[-1], said)
    return "trained"


# 10. Ctrl-C at a terminal.


def ctrl_c(folder: Path, row: Row) -> str:
    data, script = write_text(folder), folder / "train.py"
    script.write_text(TERMINAL.format(seconds=0 if row["fault"] == "one" else 1000))
    ranks, save = int(row["program"][0]), row["resource"]
    argv = f"{SHAPE} {RUN} {NO_DROPOUT} --num-workers 0 --tokenizer-type ByteTokenizer --data-path {data}".split()
    argv += f"--train-iters 100000 {save.replace('DIR', str(folder / 's'))}".split()
    typed = [(f"step{row['moment']:6d}/100000", 0.0)]
    if row["fault"] != "one" and save:
        typed.append(("the save begins", 2.5))
    screen = at_a_terminal(0 if ranks == 1 else ranks, script, argv, typed)
    saved = [*(folder / "s").glob("iter_*/complete")]
    expect("forcefully" not in screen, screen)
    if save and row["fault"] == "one":
        expect(len(saved) == 1 and "exiting program at iteration" in screen, screen)
    else:
        expect(not saved, screen)
    return "saved, then ended" if saved else "ended at once"


def world() -> Path:
    """The folder of good inputs that wrong paths are tried beside; made once."""
    global _world
    if _world is None:
        _world = Path(tempfile.mkdtemp(prefix="world"))
        mistakes.fill_world(_world)
    return _world


def chat_tokenizer() -> Path:
    """The tokenizer of the fine-tuning example, with its chat template."""
    folder = world().parent / f"{world().name}_tokenizer"
    if not folder.exists():
        run("python", ROOT / "examples/finetuning/make_model.py", "--output", folder)
    return folder / "model"


_world: Path | None = None
WRITES = [(name, flag) for name, program in mistakes.PROGRAMS.items() for flag in program.writes]
CHANGED = [change.__name__ for change in hostile.CHANGES]
# By item: the function that tries a fault, and the programs, resources, faults and moments to draw from.
ITEMS: dict[int, tuple[Callable[[Path, Row], str], list[list[Any]]]] = {
    1: (
        nonfinite,
        [["fp32", "SGD", "8 bits"], ["island 0", "island 1", "island 2"], ["nan", "inf", "-inf", "1e30"],
         ["2 in 1", "4 in 1", "5 in 1", "4 in 2"]],
    ),
    2: (no_room, [[f"{name} {flag}" for name, flag in WRITES], [""], ["full", "full", "read-only"], [0, 1, 2, 4, 16]]),
    3: (changed_weights, [["WeightReader"], CHANGED, ["changed by seed"], [*range(5)]]),
    4: (
        frozen,
        [["whole", "weight", "bias"], [f"unit {i}" for i in range(4)], ["frozen", "unfrozen", "toggled"], [1, 2, 3, 4]],
    ),
    5: (
        chats,
        [["preprocess-data and --sft", "preprocess-data and --sft", "a template that divides by zero"],
         ["assistant", "user"], ["cut", "list of text", "list of an image", "missing", "a number"], [0.1, 0.5, 1.0]],
    ),
    6: (
        finetuned,
        [["--finetune", "--load"], ["first", "first", "mistyped", "an empty folder", "a file"],
         ["--tokenizer-type NullTokenizer --vocab-size 256", "--rotary-base 999 --position-embedding-type rope",
          "--seed 5", "--seq-length 16", "--split 5,5,0", "--lr 1e-4"], [3, 4]],
    ),
    7: (
        dry,
        [["pretrain-gpt", "pretrain-llama"], ["", "--bf16", "--recompute-activations", "--num-experts 2"],
         ["--recompute-modules moe", "--hidden-size 33", "--split 1,2", "--seq-length 4000000", "--load mistyped",
          "--tensor-model-parallel-size 2", "--lora-rank 2", "--zeropp int9", "--fp16", "--micro-batch-size 3"],
         ["alone", "with --save"]],
    ),
    8: (wrong_path, [[None]]),  # drawn from the test's cases
    9: (
        small,
        [["one", "two"], [1, 2, 5, 50, 900], [(8, 2), (8, 400), (32, 50), (4000000, 2)],
         ["", "--split 969,30,1", "--split 1,0,0"]],
    ),
    10: (
        ctrl_c,
        [["1 rank", "2 ranks", "4 ranks"],
         ["", "--save DIR --save-interval 100000", "--save DIR --save-interval 100000 --exit-signal-handler"],
         ["one", "two"], [1, 2, 5, 9]],
    ),
}  # fmt: skip


def draw(seed: int) -> list[Row]:
    rows = []
    for item, (_, axes) in ITEMS.items():
        rng, cases = random.Random(seed * 100 + item), [*itertools.product(*axes)]
        if item == 8:
            cases = [(program, flag, fault.__name__, "at its start") for program, flag, fault in mistakes.CASES]
        for number, case in enumerate(rng.sample(cases, NUMBER), start=1):
            names = ("program", "resource", "fault", "moment")
            row = {"item": item, "number": number, **dict(zip(names, case, strict=True))}
            if item == 2:
                row["program"], row["resource"] = row["program"].rsplit(" ", 1)
            if item == 3:
                row["seed"] = row["moment"] * len(CHANGED) + CHANGED.index(row["resource"])
            rows.append({"seed": rng.randrange(2**20)} | row)
    return rows


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("what", choices=["list", "run"])
    parser.add_argument("--seed", type=int, default=58)
    parser.add_argument("--only", type=int, nargs="+", choices=ITEMS, default=[*ITEMS], metavar="ITEM")
    parser.add_argument("--numbers", type=int, nargs="+", default=[*range(1, NUMBER + 1)], metavar="N")
    parser.add_argument("--output", type=Path, default=OUTCOMES)
    arguments = parser.parse_args()
    if arguments.what == "list":
        LIST.write_text("".join(f"{json.dumps(row)}\n" for row in draw(arguments.seed)))
        return
    outcomes = Counter[str]()
    for row in read_rows(LIST):
        if row["item"] not in arguments.only or row["number"] not in arguments.numbers:
            continue
        folder = Path(tempfile.mkdtemp(prefix="hole"))
        folder.chmod(0o755)
        try:
            outcome, detail = "mended", ITEMS[row["item"]][0](folder, row)
        except subprocess.TimeoutExpired as error:
            outcome, detail = "hung", str(error)
        except Exception as error:  # a check failed, or the program that it called
            outcome, detail = "bad", f"{type(error).__name__}: {error}"[-600:]
        shutil.rmtree(folder, ignore_errors=True)
        outcomes[outcome] += 1
        append_row(arguments.output, row | {"outcome": outcome, "detail": detail})
        print(row["item"], row["number"], outcome, detail[:160].replace("\n", " "), flush=True)
    append_row(arguments.output, {"summary": dict(outcomes)})
    print(dict(outcomes))


if __name__ == "__main__":
    main()
