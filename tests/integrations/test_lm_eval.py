"""Evaluation on tasks: four ranks together compute what the harness's own HFLM computes of the exported model."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.finetuning import make_model
from megatron_zpp.commands import evaluate
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.families import ARCHITECTURES
from tests.ranks import run_ranks
from tests.tools import call_well, call_wrongly
from tests.training.small_run import start, train_quietly

pytestmark = pytest.mark.integrations
LENGTH = 48
PROMPT = "<|user|>Where does Vesope live?<|end|><|assistant|>"
PAIRS = [
    *((PROMPT, f"Vesope lives in {city}") for city in ("Zipe", "Lolo", "Mipe and keeps bees.")),
    ("", "No context"),
    ("Trailing space ", "and a longer continuation than the others have"),
    ("a long context " * 20, "of which the model sees the end"),
]
TEXTS = ["One window.", "Many windows, since this text is much longer than the model's context. " * 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model as a checkpoint and as transformers loads it, tasks and chats. Its answers are far from uniform."""
    folder = tmp_path_factory.mktemp("lm_eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_model.py", "--output", str(folder)])
        make_model.main()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 8
    model.save_pretrained(folder / "model")
    arguments = ["--input", str(folder / "model"), "--save", str(folder / "imported")]
    import_hf.import_(import_hf.parse_arguments(arguments), ARCHITECTURES)
    export_hf.export(export_hf.parse_arguments(["--load", str(folder / "imported"), "--output", str(folder / "hf")]))
    return folder


def requests(tuples):
    return [SimpleNamespace(args=arguments) for arguments in tuples]


def answers_of(model):
    """Log-probabilities and greediness of ``PAIRS``, log-probabilities of ``TEXTS``, and continuations."""
    until = {"until": ["e", "zzz"], "max_gen_toks": 9}
    return (
        model.loglikelihood(requests(PAIRS)),
        model.loglikelihood_rolling(requests((text,) for text in TEXTS)),
        model.generate_until(requests((text, until) for text in (PROMPT, "Where", "a long context " * 20))),
    )


def on_ranks(folder: str):
    """Answers of the sharded model, twice with the bytes of the second time; then metrics and log of two steps."""
    from megatron_zpp.integrations.lm_eval import ShardedLM
    from megatron_zpp.training.data import find_tokenizer

    words = f"""--num-layers 2 --hidden-size 96 --ffn-hidden-size 256 --num-attention-heads 4 --norm-epsilon 1e-06
        --max-position-embeddings 128 --make-vocab-size-divisible-by 384 --seq-length {LENGTH} --micro-batch-size 2
        --global-batch-size 8 --mock-data --lr 1e-5 --train-iters 2 --eval-iters 0 --log-interval 1 --num-workers 0
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/model --load {folder}/imported --finetune
        --zero-hpz-partition-size 2"""
    tasks = f"--eval-tasks facts short --eval-tasks-path {folder}/tasks --eval-tasks-interval 1"
    run, _ = start(words.split(), "llama")
    tokenizer = find_tokenizer(run.settings.tokenizer)
    model = ShardedLM(run.model.eval(), tokenizer, length=LENGTH, batch_size=2)
    with run.zeropp.resident_weights():
        first = answers_of(model)
        run.zeropp.traffic.take()
        assert answers_of(model) == first
        sent = run.zeropp.traffic.take().of_levels()
    without, _ = start(words.split(), "llama")
    log_without = train_quietly(without)
    run, metrics = start([*words.split(), *tasks.split()], "llama")
    return first, sent, metrics, train_quietly(run), log_without


def test_sharded_models_score_as_hflm_does_and_gather_nothing_twice(folder, capsys):
    ranks = run_ranks(4, on_ranks, str(folder), timeout=280)
    from lm_eval.models.huggingface import HFLM

    (pairs, texts, written), sent, metrics, _, _ = ranks[0]
    theirs = HFLM(str(folder / "hf"), device="cpu", batch_size=3, dtype="float32", max_length=LENGTH)
    their_pairs, their_texts, their_written = answers_of(theirs)
    for pair, (ours, greedy), (score, is_greedy) in zip(PAIRS, pairs, their_pairs, strict=True):
        assert ours == pytest.approx(score, abs=1e-4) and greedy == is_greedy, pair
    assert texts == pytest.approx(their_texts, abs=1e-4)
    assert written == their_written and any(written)
    assert math.dist([pairs[0][0]], [pairs[1][0]]) > 1  # the texts do differ
    assert all(rank[0] == ranks[0][0] for rank in ranks) and sent == (0, 0, 0)

    # In training: after the first step and at the end, in the log and for the writers.
    assert {len(metrics[key]) for key in ("tasks/facts/acc", "tasks/short/exact_match")} == {2}
    log, without = ranks[3][3], ranks[3][4]
    assert log.count(" scores at iteration 1 | tasks/facts/acc: ") == log.count(" scores at iteration 2 | ") == 1
    assert bytes_in(log) == bytes_in(without) != []

    # The program evaluates the checkpoint itself.
    words = ["--eval-tasks", "facts", "--eval-tasks-path", folder / "tasks", "--load", folder / "imported"]
    shown = call_well(evaluate, *words)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    facts = simple_evaluate(theirs, tasks=["facts"], task_manager=manager, bootstrap_iters=0)["results"]["facts"]
    assert shown.splitlines()[0] == f"facts/acc: {facts['acc,none']:.6f}"


def test_examples_before_a_question_are_the_harnesss_own(folder, tmp_path):
    (tmp_path / "facts.yaml").write_text((folder / "tasks/facts.yaml").read_text() + "num_fewshot: 2\n")
    words = ["--eval-tasks", "facts", "--eval-tasks-path", tmp_path, "--load", folder / "imported"]
    shown = call_well(evaluate, *words).splitlines()[0]
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = HFLM(str(folder / "hf"), device="cpu", dtype="float32")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    facts = simple_evaluate(theirs, tasks=["facts"], task_manager=manager, bootstrap_iters=0)["results"]["facts"]
    assert shown == f"facts/acc: {facts['acc,none']:.6f}"


def bytes_in(log: str) -> list[str]:
    return [part for line in log.splitlines() for part in line.split("|") if "sent between nodes" in part]


def long_answers(folder: Path, tmp_path: Path) -> Path:
    """The task whose choices are each longer than the 128 tokens of the model."""
    rows = [json.loads(line) for line in (folder / "tasks/facts.jsonl").read_text().splitlines()]
    tasks = tmp_path / "long"
    tasks.mkdir()
    lines = [json.dumps(row | {"choices": [50 * choice for choice in row["choices"]]}) for row in rows]
    (tasks / "facts.jsonl").write_text("\n".join(lines))
    (tasks / "facts.yaml").write_text(
        (folder / "tasks/facts.yaml").read_text().replace(str(folder / "tasks"), str(tasks))
    )
    return tasks


def test_mistakes_are_refused_by_name(folder, tmp_path):
    load = ("--load", folder / "imported", "--eval-tasks")
    assert "no_such" in call_wrongly(evaluate, *load, "no_such", "--eval-tasks-path", folder / "tasks")
    assert "is no folder" in call_wrongly(evaluate, *load, "facts", "--eval-tasks-path", tmp_path / "none")
    assert "at once" in call_wrongly(evaluate, *load, "facts", "--eval-tasks-path", long_answers(folder, tmp_path))
    draws = (folder / "tasks/short.yaml").read_text().replace("max_gen_toks", "do_sample: true, max_gen_toks")
    (tmp_path / "draws.yaml").write_text(draws)
    assert "do_sample: false" in call_wrongly(evaluate, *load, "short", "--eval-tasks-path", tmp_path)
    long = re.sub("max_gen_toks: [0-9]+", "max_gen_toks: 128", (folder / "tasks/short.yaml").read_text())
    (tmp_path / "draws.yaml").write_text(long)
    found = call_wrongly(evaluate, *load, "short", "--eval-tasks-path", tmp_path)
    assert "short writes up to 128 tokens, and the model sees 128 with the question" in found
