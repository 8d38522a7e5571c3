"""Save and resume: the same curve, also on other ranks; damage is reported, and failed saves are survived."""

import contextlib
import io
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer

from megatron_zpp.checkpoint import iterate_tensors, read_meta
from megatron_zpp.checkpoint.saver import CheckpointSaver
from megatron_zpp.parallel.distributed import FailedTogether
from megatron_zpp.training.pretrain import train
from tests.checkpoint.saved import iterations, rewrite
from tests.data.small_data import write_tokenizer_of_bytes
from tests.ranks import run_in_turn, run_ranks
from tests.tools import cut, flip
from tests.training.small_run import NO_DROPOUT, Metrics, call_pretrain, flags, start, train_each

META = "meta.json"
SMALL = f"{NO_DROPOUT} --global-batch-size 4 --train-iters 6"
CURVES = ("lm loss", "grad-norm", "learning-rate", "lm loss validation", "batch-size")


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Path:
    """Saved by 4 ranks after 3 and after 4 of 6 steps."""
    folder = tmp_path_factory.mktemp("checkpoint")
    argv = flags(data, SMALL, f"--save {folder} --save-interval 3 --exit-interval 4")
    run_ranks(4, train_each, {"": argv})
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data) -> Metrics:
    return _metrics(1, flags(data, SMALL))


def _metrics(world_size: int, argv: list[str]) -> Metrics:
    """Train; return the first rank's metrics."""
    return run_ranks(world_size, train_each, {"": argv})[0][""]


def _train(*argvs: list[str]) -> list[tuple[str, Metrics]]:
    """Return what each run printed, and its metrics."""
    results = []
    for argv in argvs:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            run, metrics = start(argv)
            train(run, time.monotonic())
        results.append((out.getvalue(), metrics))
    return results


OVERFLOWS = "--fp16 --initial-loss-scale 2e6 --hysteresis 1 --loss-scale-window 2"
LOCO = "--zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1"
EVERYTHING = (
    "--zero-hpz-partition-size 2 --zero-quantized-weights --zeropp-weight-moves "
    "--zero-quantized-gradients --zeropp-gradient-rounding stochastic --zeropp-loco --zeropp-loco-hops both "
    "--zeropp-gradient-bits-warmup 2:8"
)


@pytest.mark.parametrize(
    "world_size, more",
    [
        (4, EVERYTHING),
        pytest.param(2, "--zero-stage 1 --rampup-batch-size 2 2 24", marks=pytest.mark.long),
        (2, f"--zero-stage 2 --optimizer sgd {OVERFLOWS} {LOCO}"),
        pytest.param(2, "--bf16 --no-async-save --zero-stage 0", marks=pytest.mark.long),
    ],
)
def test_resumes_bit_for_bit_and_again(data, tmp_path, world_size, more):
    argv = flags(data, more, "--eval-interval 3 --train-iters 5")  # with dropout and accumulation
    part = [*argv, *f"--save {tmp_path} --load {tmp_path} --save-interval 2 --exit-interval 2".split()]
    parts = dict.fromkeys(("steps 1 and 2", "3 and 4", "5"), part)
    if more == EVERYTHING:  # a checkpoint of weights kept between micro-batches goes on where they are not, and back
        parts["3 and 4"] = [*part, "--zero-stage", "2"]
    for metrics in run_ranks(world_size, train_each, parts | {"whole": argv}):
        for curve in CURVES:
            joined = [value for name in parts for value in metrics[name].get(curve, [])]
            assert repr(joined) == repr(metrics["whole"][curve]), curve  # repr: NaN is NaN


@pytest.mark.parametrize("world_size, stage", [(1, 3), (2, 1), (2, 0)])
def test_resumes_on_other_ranks_and_stages(data, checkpoint, uninterrupted, world_size, stage):
    argv = flags(data, SMALL, f"--load {checkpoint} --zero-stage {stage}")
    ((out, metrics),) = run_ranks(world_size, _train, argv)[0]
    assert metrics["lm loss"] == pytest.approx(uninterrupted["lm loss"][4:], rel=1e-5)
    assert metrics["lm loss validation"] == pytest.approx(uninterrupted["lm loss validation"], rel=1e-5)
    assert f"note: random states start over: 4 ranks saved, {world_size} load" in out


def test_locos_errors_outlive_settings_that_only_change_how_gradients_are_sent(data, tmp_path):
    more = f"{LOCO} --zeropp-gradient-bits 2 --train-iters 4 --eval-iters 0"
    save = f"--save {tmp_path} --save-interval 2 --exit-interval 2"
    runs = {"whole": flags(data, more), "begun": flags(data, more, save)}
    expected = run_ranks(2, train_each, runs)[0]["whole"]["lm loss"]
    changes = "--zeropp-offload errors", "--zeropp-scale-dtype bf16"
    (out, metrics), (changed_out, _) = run_ranks(
        2, _train, *(flags(data, more, f"--load {tmp_path}", c) for c in changes)
    )[0]
    assert "start over" not in out and metrics["lm loss"] == expected[2:]
    assert "LoCo's errors, scales of elements and weight copies start over" in changed_out


def test_loads_less_and_changes_the_plan(data, checkpoint, uninterrupted):
    load = f"--load {checkpoint} --override-opt_param-scheduler"
    kinds = (
        "--finetune --train-iters 2",
        "--no-load-optim",
        # More samples than the first plan had, and more evaluations.
        "--global-batch-size 8 --train-iters 7 --eval-interval 1 --eval-iters 2 --clip-grad 0.5",
    )
    results = run_ranks(1, _train, *(flags(data, SMALL, load, kind) for kind in kinds))[0]
    outs, (finetuned, fresh_optimizer, _) = zip(*results, strict=True)
    assert "iteration        1/       2 | consumed samples:            4 |" in outs[0]
    assert finetuned["lm loss"][0] < uninterrupted["lm loss"][0] - 0.2
    assert "iteration        5/       6 | consumed samples:           20 |" in outs[1]
    assert fresh_optimizer["lm loss"][0] == pytest.approx(uninterrupted["lm loss"][4], rel=1e-5)
    assert fresh_optimizer["lm loss"][1] != pytest.approx(uninterrupted["lm loss"][5], rel=1e-5)
    assert "iteration        7/       7 | consumed samples:           40 |" in outs[2]
    assert "note: changed since the checkpoint was saved: clip_grad 1.0 there, 0.5 here\n" in outs[2]
    assert "changed since" not in outs[0] + outs[1]


def test_fine_tuning_may_change_how_texts_are_read_and_says_so(data, tmp_path):
    rope = f"{SMALL} --position-embedding-type rope --num-experts 2 --save-interval 9 --save {tmp_path}"
    run_ranks(1, train_each, {"": flags(data, rope, "--moe-aux-loss-coeff 0.01")})
    other = f"{rope}/other --load {tmp_path} --rotary-base 500000 --moe-aux-loss-coeff 0 --train-iters 2"
    yarn = f"{rope}/yarn --load {tmp_path} --finetune --train-iters 2 --moe-aux-loss-coeff 0.01"
    yarn += " --position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32"
    cases = [flags(data, words) for words in (other, f"{other} --finetune", yarn)]
    refused, (code, out, err), longer = run_ranks(1, call_pretrain, *cases)[0]
    to_yarn = "note: fine-tuning changes the model: position_embedding_type rope there, yarn here; yarn_scaling_factor"
    assert longer[0] == 0 and to_yarn in longer[1], longer
    changed = "rotary_base 10000.0 there, 500000.0 here; moe.aux_loss_coeff 0.01 there, 0.0 here"
    assert refused[0] == 2 and f"is of another model: {changed}" in refused[2]
    assert code == 0 and f"note: fine-tuning changes the model: {changed}\n" in out, err


def test_a_resume_takes_another_rotary_base_and_keeps_the_optimizer(data, tmp_path):
    """Continued pretraining on longer texts: what may change is named, and said in one line."""
    rope = f"{SMALL} --position-embedding-type rope --save-interval 4 --train-iters 4 --lr-decay-iters 9"
    longer = f"{rope} --load {tmp_path} --train-iters 6 --rotary-base 500000"
    scaled = "--use-rope-scaling --override-model rotary_base rope_scaling_factor --seq-length 64 --override-data"
    cases = [longer, f"{longer} --override-model hidden_size", f"{longer} {scaled} --max-position-embeddings 64"]
    argvs = [flags(data, words) for words in (f"{rope} --save {tmp_path}", *cases)]
    begun, refused, unknown, went_on = run_ranks(1, call_pretrain, *argvs)[0]
    assert begun[0] == 0, begun
    assert refused[0] == 2 and "or --override-model rotary_base\n" in refused[2], refused
    assert unknown[0] == 2 and "--override-model hidden_size: a resume may change only" in unknown[2]
    note = (
        "--override-model changes the model: rotary_base 10000.0 there, 500000.0 here; rope_scaling_factor None there"
    )
    assert went_on[0] == 0 and note in went_on[1], went_on
    assert "iteration        5/       6" in went_on[1] and "start over" not in went_on[1]


@pytest.mark.parametrize("untied", [pytest.param("--untie-embeddings-and-output-weights", marks=pytest.mark.long), ""])
def test_fine_tuning_adds_tokens_whose_rows_begin_as_the_mean_of_the_others(untied, data, tmp_path):
    """transformers' resize_token_embeddings does so; its noise around the mean is left out."""
    for name, added in ("base", []), ("more", [f"<tool_{i}>" for i in range(60)]):
        (tmp_path / name).mkdir()
        write_tokenizer_of_bytes(tmp_path / name)
        library = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        library.add_special_tokens(added)
        library.save(str(tmp_path / name / "tokenizer.json"))
    small = (
        f"{SMALL} {untied} --train-iters 1 --save-interval 1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    )
    tuned = f"{small} {tmp_path}/more --load {tmp_path}/run --finetune --lr 0 --save {tmp_path}"
    cases = {
        f"{tuned}/a": 320,
        f"{tuned}/b --tensor-model-parallel-size 2": 320,
        f"{tuned}/c --padded-vocab-size 512": 512,
    }
    runs = [f"{small} {tmp_path}/base --save {tmp_path}/run", *cases]
    run_ranks(2, train_each, {words: flags(data, words) for words in runs})
    for folder, rows in zip("abc", cases.values(), strict=True):
        there, here = (
            dict(iterate_tensors(path, read_meta(path), "model."))
            for path in (tmp_path / "run/iter_0000001", tmp_path / folder / "iter_0000001")
        )
        ends = {"word_embeddings.weight", "output_layer.weight"} & there.keys()
        assert len(ends) == (2 if untied else 1)
        for name in ends:
            assert here[name].shape == (rows, 32) and there[name].shape == (288, 32)
            assert torch.equal(here[name][:257], there[name][:257])
            assert torch.equal(here[name][257:], there[name][:257].mean(0).expand(rows - 257, 32))
        assert all(torch.equal(here[name], there[name]) for name in there.keys() - ends)


def test_fine_tuning_with_another_tokenizer_is_refused_though_the_sizes_fit(data, tmp_path):
    """Ids would mean other words. Further tokens and another end of text are no other tokenizer."""
    files = {name: tmp_path / name for name in ("base", "same", "other")}
    for name, folder in files.items():
        folder.mkdir()
        write_tokenizer_of_bytes(folder, first_id=int(name == "other"))
    library = Tokenizer.from_file(str(files["same"] / "tokenizer.json"))
    library.add_special_tokens(["<answer>"])
    library.save(str(files["same"] / "tokenizer.json"))
    (files["same"] / "tokenizer_config.json").write_text('{"eos_token": "<answer>"}')
    tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    small = f"{SMALL} --make-vocab-size-divisible-by 512"
    begun = f"{small} {tokenizer} {files['base']} --save {tmp_path}/run --save-interval 9 --train-iters 1"
    tuned = f"{small} --load {tmp_path}/run --finetune --train-iters 1 --lr 1e-4 --seed 5 {tokenizer}"
    cases = [
        begun,
        f"{tuned} {files['other']}",
        f"{small} --load {tmp_path}/run --finetune --train-iters 1",
        f"{tuned} {files['same']}",
        f"{tuned} {files['other']} --override-data",
    ]
    first, *refused, same, overridden = run_ranks(1, call_pretrain, *(flags(data, case) for case in cases))[0]
    assert first[0] == same[0] == overridden[0] == 0, (first, same, overridden)
    assert [code for code, _, _ in refused] == [2, 2]
    for _, _, err in refused:
        assert err.startswith("error: this is not the tokenizer of ") and "or with --finetune --override-data" in err
    assert "note: fine-tuning changes the run: seed 1234 there, 5 here; lr 0.003 there, 0.0001 here\n" in same[1]


def test_trains_as_many_samples_whatever_the_batch_size_was(data, tmp_path):
    save = f"--save {tmp_path} --load {tmp_path} --save-interval 2 --override-opt_param-scheduler --eval-iters 0"
    sizes = {f"{save} --exit-interval 2": [8] * 2, f"{save} --global-batch-size 4": [4] * 4}  # 16 samples were left
    runs = {part: flags(data, NO_DROPOUT, part, length="--train-samples 32") for part in sizes}
    assert {part: metrics["batch-size"] for part, metrics in run_ranks(1, train_each, runs)[0].items()} == sizes


DAMAGE = {  # test_hostile.py has more, without the program
    "missing": (lambda c: (c / "rank_00002.safetensors").unlink(), "rank_00002.safetensors is missing"),
    "cut": (lambda c: cut(c / "rank_00001.safetensors"), "rank_00001.safetensors has"),
    "bit": (lambda c: flip(c / "rank_00003.safetensors"), "rank_00003.safetensors is not what was written"),
    "index bit": (lambda c: flip(c / "index.json"), "index.json is damaged (its digest is not the one in meta.json)"),
    "meta bit": (lambda c: flip(c / "meta.json"), "meta.json is damaged (its digest is not the one in complete)"),
    "another format": (
        lambda c: rewrite(c, META, lambda m: m.update(format=1)),
        "meta.json has the format 1, and this version reads 2: load it with the version of megatron_zpp that saved it",
    ),
    "no meta": (lambda c: (c / "meta.json").unlink(), "meta.json is damaged"),
    "no marker": (lambda c: (c / "complete").unlink(), "is not a complete checkpoint"),
    "counter": (lambda c: rewrite(c, META, lambda m: m["counters"].update(iteration=-1)), "iteration is -1"),
}


def test_damage_is_reported_by_file_and_the_newest_good_one_is_used(data, checkpoint, tmp_path):
    cases = []
    for number, (change, _) in enumerate(DAMAGE.values()):
        copy = shutil.copytree(checkpoint, tmp_path / str(number))  # a good iteration 3 before 4's
        change(copy / "iter_0000004")
        load = f"--load {copy} --train-iters 3 --use-checkpoint-opt_param-scheduler --eval-iters 0"
        cases += [flags(data, SMALL, load), flags(data, SMALL, load, "--load-latest-good")]
    results = run_ranks(1, call_pretrain, *cases)[0]
    for (name, (_, expected)), refused, passed in zip(DAMAGE.items(), results[::2], results[1::2], strict=True):
        code, _, err = refused
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and expected in err, f"{name}: {err}"
        code, out, err = passed
        assert code == 0, f"{name}: {err}"
        assert "note: passed over:" in out and "iter_0000003 at iteration 3" in out, name


def test_what_is_no_checkpoint_is_one_clear_error(data, checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    for iteration in (3, 4):
        flip(damaged / f"iter_000000{iteration}" / "rank_00000.safetensors")
    tracker = shutil.copytree(checkpoint, tmp_path / "tracker")
    (tracker / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\0")
    cases = {
        f"--load {tmp_path / 'file'}": "is a file, not a folder of checkpoints",
        f"--load {checkpoint} --ckpt-step 2": "complete ones: ",
        f"--load {checkpoint} --hidden-size 64": "is of another model: hidden_size 32 there, 64 here",
        # Sizes come first, and before other data.
        f"--load {checkpoint} --num-layers 3 --hidden-size 64 --seq-length 16 --seed 7 --norm-epsilon 1e-6": (
            "is of another model: num_layers 2 there, 3 here; hidden_size 32 there, 64 here; max_position"
        ),
        f"--load {checkpoint} --optimizer sgd": "optimizer adam there, sgd here",
        f"--load {damaged} --load-latest-good": "holds no good checkpoint",
        f"--load {tracker}": "should hold an iteration",
        f"--save {tmp_path / 'file'} --save-interval 1": "is no folder that this user may change",
        f"--load {tmp_path / 'mistyped'}": "mistyped holds no checkpoint: correct the path; to start from scratch",
        f"--load {tmp_path / 'none'} --load-latest-good --save {tmp_path / 'new'} --save-interval 1": "correct the",
        f"--load {tmp_path / 'new'} --finetune --save {tmp_path / 'new'} --save-interval 1": "holds no checkpoint",
    }
    results = run_ranks(1, call_pretrain, *(flags(data, SMALL, case) for case in cases))[0]
    for (case, expected), (code, _, err) in zip(cases.items(), results, strict=True):
        assert code == 2, case
        assert err.startswith("error: ") and err.count("\n") == 1 and expected in err, f"{case}: {err}"


RETENTION = {
    "": [1, 2, 3, 4, 5],
    "--save-keep-last 3 --no-async-save": [3, 4, 5],
    "--save-retain-interval 2": [2, 4, 5],
    "--save-retain-interval 3 --save-keep-last 1": [3, 5],
}


def test_the_newest_checkpoints_are_kept_and_older_ones_deleted(data, tmp_path):
    small = "--num-layers 1 --global-batch-size 1 --train-iters 5 --eval-iters 0 --save-interval 1"
    folders = {more: tmp_path / str(number) for number, more in enumerate(RETENTION)}
    run_ranks(1, train_each, {more: flags(data, small, f"--save {folders[more]}", more) for more in RETENTION})
    assert {more: iterations(folder) for more, folder in folders.items()} == RETENTION


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_note(data, tmp_path):
    save = f"--train-iters 3 --save {tmp_path} --save-interval 1 --save-keep-last 1"
    (tmp_path / "iter_0000001.deleted").write_text("")  # in the way
    ((out, _),) = run_ranks(1, _train, flags(data, save))[0]
    assert {path.name for path in tmp_path.glob("iter_*/")} == {"iter_0000001", "iter_0000003"}
    assert f"note: old checkpoints in {tmp_path} stay, deleting them failed: " in out


def _train_with_little_room(argv: list[str], comes_room: bool) -> tuple[str, int]:
    """Return stderr, and the number of steps. No file may grow large until, if ever, the first save has failed."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    settle = CheckpointSaver._settle

    def settle_and_make_room(saver: CheckpointSaver) -> None:
        settle(saver)
        if comes_room:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        run, metrics = start(argv)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        with mock.patch.object(CheckpointSaver, "_settle", settle_and_make_room), contextlib.suppress(FailedTogether):
            train(run, time.monotonic())
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return err.getvalue(), len(metrics["lm loss"])


def test_a_failed_save_is_loud_and_training_goes_on(data, tmp_path):
    calls: dict[tuple[str, bool], Callable] = {}
    for mode in ("", "--no-async-save"):
        argv = flags(data, f"--save {tmp_path / mode} --save-interval 2 --train-iters 6 --global-batch-size 2", mode)
        calls[mode, True] = partial(_train_with_little_room, argv, True)
        calls[mode, False] = partial(_train_with_little_room, [*argv, "--overwrite-save", "--train-iters", "2"], False)
    for (mode, comes_room), ((err, steps), _) in run_in_turn(2, calls).items():
        assert iterations(tmp_path / mode) == [4, 6]  # also after the second run
        file = tmp_path / mode / "iter_0000002.incomplete" / "rank_00000.safetensors"
        assert err.count(f"NOT SAVED: rank 0: cannot write {file}: File too large") == 1
        assert steps == (6 if comes_room else 2)
        assert ("error: the checkpoint of the last iteration, 2, was not saved" in err) != comes_room


def test_nothing_is_pickled_and_pytorchs_own_loader_reads_every_tensor(checkpoint):
    """Four ranks' shards become whole tensors, without our reader, index or meta.json."""
    folder = checkpoint / "iter_0000004"
    meta = read_meta(folder)
    assert meta["tokens"] == 4 * 4 * 32 and meta["loss"] > 0
    ranks = {f"rank_{rank:05d}.safetensors" for rank in range(4)}
    assert {path.name for path in folder.iterdir()} == {*ranks, "index.json", "shards.bin", "meta.json", "complete"}
    expected = dict(iterate_tensors(folder, meta))
    loaded = {name: torch.full_like(tensor, 77) for name, tensor in expected.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    assert {name.partition(".")[0] for name in loaded} == {"model", "optimizer", "rng"}
    assert [name for name, tensor in expected.items() if not loaded[name].equal(tensor)] == []


def test_an_empty_or_absent_folder_that_is_also_saved_in_starts_from_scratch(data, tmp_path):
    (tmp_path / "empty" / "tensorboard").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("")  # as in Megatron, which warns
    expected = {
        "empty": "no checkpoint in {} yet: starting from scratch",
        "absent": "no checkpoint in {} yet: starting from scratch",
        "other": "WARNING: {} has files, but no latest_checkpointed_iteration.txt and no checkpoint: starting from",
    }
    shutil.copytree(tmp_path / "other", tmp_path / "another")
    names = [*expected, "another"]
    each = "--load {0} --save {0} --save-interval 9 --train-iters 1 --eval-iters 0"
    loads = [each.format(tmp_path / name) for name in names]
    loads[-1] += " --load-latest-good"
    *results, (_, ended, _) = run_ranks(1, call_pretrain, *(flags(data, load) for load in [*loads, loads[0]]))[0]
    assert "note: nothing is left to train after iteration 1" in ended
    expected["another"] = expected["other"]
    for name, (code, out, err) in zip(names, results, strict=True):
        assert code == 0, err
        assert expected[name].format(tmp_path / name) in out
