"""DeepSpeed's JSON files: what they set, and what they are refused for."""

import json

import pytest

from megatron_zpp.arguments.deepspeed_config import read_deepspeed_config
from megatron_zpp.arguments.parse import SettingsError
from megatron_zpp.zeropp import ZeroPPConfig
from tests.arguments.parsing import SHAPE, assert_words, mistakes
from tests.arguments.parsing import parse as parse_command

# The file of DeepSpeed's ZeRO++ tutorial, whose command line is test_tutorial's.
TUTORIAL = {
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 10000000, "reduce_scatter": True, "zero_quantized_weights": True,
        "zero_hpz_partition_size": 16, "zero_quantized_gradients": True, "contiguous_gradients": True,
        "overlap_comm": True,
    }
}  # fmt: skip
MODEL = f"{SHAPE} --micro-batch-size 1 --train-iters 60 "
SIZES = f"{SHAPE} --train-iters 1 --lr 1 "
RUN = f"{SHAPE} --micro-batch-size 2 --train-iters 100 --lr 1e-3 "


@pytest.fixture
def write(tmp_path):
    def write(content) -> str:
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def parse(command: str, path: str, world_size: int = 4):
    return parse_with_notes(command, path, world_size)[0]


def parse_with_notes(command: str, path: str, world_size: int = 4):
    return parse_command(f"{command} --deepspeed_config {path}", "gpt", world_size)


def refusal(command: str, path: str) -> str:
    return "\n".join(mistakes(f"{command} --deepspeed_config {path}"))


def refused_file(path: str) -> str:
    with pytest.raises(SettingsError) as error:
        read_deepspeed_config(path)
    assert not any("\n" in message for message in error.value.messages)
    return str(error.value)


@pytest.mark.parametrize("reduce_scatter", [True, False])  # both have been printed
def test_the_flags_and_file_of_the_zeropp_tutorial_work_as_printed(write, reduce_scatter):
    printed = (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 40 --hidden-size 6144 "
        "--seq-length 512 --num-attention-heads 32 --batch-size 1 --zero-stage 3 "
        "--deepspeed-activation-checkpointing --fp16 --checkpoint-activations "
    )
    command = f"{printed} --train-iters 10 --lr 1e-4 --mock-data --vocab-size 50000"
    path = write({"zero_optimization": TUTORIAL["zero_optimization"] | {"reduce_scatter": reduce_scatter}})
    settings, notes = parse_with_notes(command, path, 64)
    assert settings.zero.zero_stage == 3
    expected = ZeroPPConfig(quantized_weights=True, hpz_partition_size=16, quantized_gradients=True, seed=1234)
    assert settings.zeropp == expected
    assert settings.precision.fp16 and settings.activation.recompute_granularity == "full"
    assert settings.training.global_batch_size == 64
    # Each key that changes nothing is named in a note.
    for key in ("reduce_bucket_size", "contiguous_gradients", "overlap_comm"):
        assert any(f"zero_optimization.{key}" in note for note in notes)
    assert "--batch-size 1 is --micro-batch-size 1 here" in notes


def test_every_key_becomes_its_setting_or_a_note(write):
    config = {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_gradients": True,
            "zeropp_loco_param": {"err_beta": 0.7, "reset_T": 1e3},
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4},
        },
        "fp16": {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500, "hysteresis": 3,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": False},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 6e-4, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 1e-6, "warmup_max_lr": 6e-4, "warmup_num_steps": 10, "total_num_steps": 90,
                "warmup_type": "linear",
            },
        },
        "steps_per_print": 10, "wall_clock_breakdown": False,
        "tensorboard": {"enabled": False, "output_path": "x"},
    }  # fmt: skip
    flat = parse(f"{SHAPE} --train-iters 100", write(config)).as_flat_dict()
    expected = dict(
        global_batch_size=32, micro_batch_size=4, clip_grad=0.5, zero_stage=3, zero_quantized_gradients=True,
        zeropp_loco=True, zeropp_loco_beta=0.7, zeropp_loco_reset_interval=1000, fp16=True, bf16=False,
        loss_scale=None, initial_loss_scale=65536, loss_scale_window=500, hysteresis=3,
        optimizer="adam", lr=6e-4, adam_beta1=0.8, adam_beta2=0.99, adam_eps=1e-6, weight_decay=0.1,
        lr_decay_style="linear", lr_warmup_init=1e-6, min_lr=1e-6, lr_warmup_iters=10, lr_decay_iters=90,
        cpu_offload=True,
    )  # fmt: skip
    assert {name: flat[name] for name in expected} == expected


ADAM = {"type": "Adam", "params": {"lr": 1e-3}}
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 20}
RUNNING_CYCLE = CYCLE | {"cycle_momentum": False, "decay_lr_rate": 0}
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}
WARMUP = {"warmup_num_steps": 5, "warmup_max_lr": 2e-3}
COSINE = {"warmup_type": "linear", "warmup_num_steps": 5, "total_num_steps": 50, "warmup_min_ratio": 0.01,
          "cos_min_ratio": 0.1}  # fmt: skip


def scheduler(kind, params):
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimization": {"zero_quantized_gradients": True, "zeropp_loco_param": {}}},
         dict(zeropp_loco=True, zeropp_loco_beta=0.8, zeropp_loco_reset_interval=1024)),
        # The scheduler comes first: the order of keys must not matter.
        (scheduler("WarmupCosineLR", COSINE) | {"optimizer": ADAM},
         dict(lr_decay_style="cosine", lr_warmup_init=pytest.approx(1e-5), min_lr=pytest.approx(1e-4))),
        (scheduler("WarmupLR", WARMUP | {"warmup_type": "linear"}),
         dict(lr_decay_style="constant", lr_warmup_iters=5, lr=2e-3, lr_warmup_style="linear")),
        (scheduler("WarmupLR", WARMUP), dict(lr_warmup_style="log")),
        (scheduler("WarmupLR", WARMUP | {"warmup_type": "log"}), dict(lr_warmup_style="log")),
        (scheduler("OneCycle", RUNNING_CYCLE),
         dict(lr_decay_style="linear", lr_warmup_iters=20, lr_decay_iters=40, lr_warmup_init=1e-4, min_lr=1e-4,
              lr=1e-3)),
        (scheduler("OneCycle", RUNNING_CYCLE | {"cycle_second_step_size": 5}), dict(lr_decay_iters=25)),
        ({"communication_data_type": "bf16", "bf16": {"enabled": True}},
         dict(grad_reduce_in_bf16=True, accumulate_allreduce_grads_in_fp32=False)),
        ({"communication_data_type": "fp32"},
         dict(grad_reduce_in_bf16=False, accumulate_allreduce_grads_in_fp32=True)),
        ({"curriculum_learning": CURRICULUM},
         dict(curriculum_min_length=8, seq_length=32, curriculum_iters=10)),
        ({"curriculum_learning": CURRICULUM | {"enabled": False}}, dict(curriculum_min_length=None)),
    ],
)  # fmt: skip
def test_what_a_file_sets(write, config, expected):
    lr = {} if "scheduler" in config else {"optimizer": ADAM}
    settings = parse(MODEL, write(lr | config)).as_flat_dict()
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("sizes", "flags", "expected"),
    [
        ({"train_batch_size": 32}, "--micro-batch-size 2", (2, 32)),
        ({"gradient_accumulation_steps": 3}, "--micro-batch-size 2", (2, 24)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, "", (2, 32)),
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": "auto"}, "--global-batch-size 8", (2, 8)),
        ({"train_batch_size": 8}, "--global-batch-size 8 --micro-batch-size 2", (2, 8)),
    ],
)
def test_batch_sizes_complete_each_other(write, sizes, flags, expected):
    training = parse(SIZES + flags, write(sizes)).training
    assert (training.micro_batch_size, training.global_batch_size) == expected


def test_the_flag_of_the_batch_size_wins_as_in_megatron_deepspeed(write):
    path = write({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2})
    settings, notes = parse_with_notes(f"{SIZES} --global-batch-size 24", path)
    assert (settings.training.micro_batch_size, settings.training.global_batch_size) == (2, 24)
    assert notes == [f"train_batch_size 16 of {path} has no effect beside --global-batch-size 24"]


@pytest.mark.parametrize(
    ("sizes", "flags", "words"),
    [
        ({"gradient_accumulation_steps": 3}, "--micro-batch-size 2 --global-batch-size 8", "8 2 3 4 24"),
        ({"train_batch_size": 9, "gradient_accumulation_steps": 2}, "", "9 2 4"),
        ({"train_batch_size": 9}, "--micro-batch-size 2", "9 2 4"),
        ({"gradient_accumulation_steps": 0}, "--micro-batch-size 2", "gradient_accumulation_steps 0"),
        ({"gradient_accumulation_steps": 1}, "--micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 8 8 80",
         "gradient_accumulation_steps 1 --rampup-batch-size"),
    ],
)  # fmt: skip
def test_batch_sizes_must_agree(write, sizes, flags, words):
    assert_words(refusal(SIZES + flags, write(sizes)), words)


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    [
        ({"zero_optimization": {"stage": 2}}, "--zero-stage 3", "--zero-stage 3 zero_optimization.stage 2 ds.json"),
        ({"bf16": {"enabled": False}}, "--bf16", "--bf16 bf16.enabled false"),
        ({"zero_optimization": {"zero_quantized_weights": False}}, "--zero-quantized-weights", "false"),
        ({"gradient_clipping": 0.5}, "--clip-grad 1", "--clip-grad 1.0 gradient_clipping 0.5"),
    ],
)
def test_a_flag_that_contradicts_the_file(write, config, flags, words):
    assert_words(refusal(RUN + flags, write(config)), words)


FP16 = {"enabled": True}


@pytest.mark.parametrize("dynamic", ["--initial-loss-scale 64.0", "--loss-scale-window 9", "--hysteresis 3"])
def test_a_fixed_loss_scale_beside_a_dynamic_one(write, dynamic):
    path = write({"fp16": FP16 | {"loss_scale": 8}})
    assert refusal(RUN + dynamic, path) == (
        f"fp16.loss_scale 8 of {path} is a fixed loss scale, and {dynamic} is of a dynamic one; leave one of them out"
    )


def test_which_loss_scales_agree(write):
    # As with DeepSpeed, whose 0 asks for a dynamic one, the file decides.
    for dynamic in {"loss_scale": 0}, {"initial_scale_power": 15}, {"hysteresis": 3}:
        path, (key,) = write({"fp16": FP16 | dynamic}), dynamic
        settings, notes = parse_with_notes(f"{RUN} --loss-scale 15", path)
        assert settings.precision.loss_scale is None
        assert notes == [f"--loss-scale 15 has no effect: fp16.{key} {dynamic[key]} of {path} asks for a dynamic one"]
    path = write({"fp16": FP16 | {"loss_scale": 0}})
    assert parse(RUN + "--initial-loss-scale 64", path).precision.initial_loss_scale == 64
    # What the file says of both is DeepSpeed's own way to write a fixed scale, and may be repeated.
    path = write({"fp16": FP16 | {"loss_scale": 8, "initial_scale_power": 15}})
    for flags in "", "--loss-scale 8", "--initial-loss-scale 32768":
        assert parse(RUN + flags, path).precision.loss_scale == 8


def test_an_error_names_the_key_that_was_not_typed(write):
    path = write(TUTORIAL)
    message = refusal(RUN, path)
    assert "--zero-hpz-partition-size 16 does not divide the 4 rank(s)" in message
    assert f"(zero_optimization.zero_hpz_partition_size 16 in {path})" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation unknown did you mean zero_optimization?"),
        ({"zero_optimization": {"zero_quantised_weights": True}},
         "zero_optimization.zero_quantised_weights did you mean zero_optimization.zero_quantized_weights?"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights belongs zero_optimization.zero_quantized_weights"),
        ({"zero_optimization": {"zeropp_loco_param": {"beta": 1}}}, "zeropp_loco_param.beta did you mean err_beta"),
        ({"zero_optimization": True}, "zero_optimization object"),
        ({"zero_optimization": {"stage": "3"}}, 'zero_optimization.stage number "3"'),
        ({"zero_optimization": {"zero_quantized_weights": 1}}, "zero_quantized_weights true or false 1"),
        ({"zero_optimization": {"allgather_partitions": False}}, "zero_optimization.allgather_partitions false"),
        ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "zero_quantized_nontrainable_weights"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
         "zero_optimization.offload_optimizer.ratio 0.3"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param.device cpu"),
        ({"zero_optimization": {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "cpu"}}},
         "zero_optimization.offload_optimizer.device contradicts zero_optimization.offload_param.device"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "mics_shard_size 8 --num-distributed-optimizer-instances"),
        ({"fp16": {}}, "fp16.enabled missing"),
        ({"fp16": {"enabled": False, "loss_scal": 128}}, "fp16.loss_scal did you mean fp16.loss_scale?"),
        ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis"),
        ('{"gradient_clipping": NaN}', "gradient_clipping finite NaN"),
        ('{"train_batch_size": %s}' % ("9" * 400), "train_batch_size finite 999"),
        ({"fp16": {"enabled": True, "initial_scale_power": 128}}, "fp16.initial_scale_power 0 127 128"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1.5}}, "fp16.initial_scale_power whole 1.5"),
        ('{"fp16": ' * 100_000 + "1" + "}" * 100_000, "not valid JSON"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage at most 3 4"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type Adam AdamW SGD Lamb"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode false"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "optimizer.params.betas two"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.params.cycle_min_lr missing"),
        ({"scheduler": {"type": "OneCycle", "params": CYCLE}}, "scheduler.params.cycle_momentum true momentum stays"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler.params.warmup_num_steps missing"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "sine"}}}, "warmup_type sine linear log"),
        ({"curriculum_learning": CURRICULUM | {"schedule_type": "fixed_root"}}, "schedule_type fixed_linear"),
        ({"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}}, "data_efficiency.data_routing"),
        ({"compression_training": {"a": {"shared_parameters": {"enabled": True}}}}, "compression_training compressing"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1}},
          "scheduler": {"type": "WarmupLR",
                        "params": {"warmup_type": "linear", "warmup_num_steps": 1, "warmup_max_lr": 2}}},
         "scheduler.params.warmup_max_lr 2 optimizer.params.lr 1"),
        ({"tensorboard": {"enabled": True}}, "tensorboard.output_path missing"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing.cpu_checkpointing"),
        ('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}', "bf16 twice"),
        ('{"bf16": ', "not valid JSON line 1"),
        ("[]", "object"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_followed_is_refused_by_the_key(write, content, words):
    path = write(content)
    message = refused_file(path)
    assert path in message
    assert_words(message, words)


OFF = {"enabled": False}
PARTS = {"enabled": True, "seed": 1, "data_routing": OFF | {"random_ltd": OFF}, "data_sampling": OFF}
COMPRESSION = {"weight_quantization": {"shared_parameters": OFF, "different_groups": {}}}


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": OFF | {"loss_scale": 128, "initial_scale_power": 3}},
        {"fp16": {"enabled": "auto", "loss_scale": None}, "gradient_clipping": "auto", "scheduler": None},
        {"data_efficiency": PARTS, "compression_training": COMPRESSION},
        *({"zero_optimization": {name: 1e9}} for name in ("stage3_max_live_parameters", "max_live_parameters")),
        {"zero_optimization": {"prefetch_bucket_size": 1e9}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "dataloader_drop_last": True},
    ],
)
def test_what_is_off_auto_null_or_without_effect_sets_nothing(write, config):
    values = read_deepspeed_config(write(config)).values
    assert values == ({"fp16": False} if config.get("fp16", {}).get("enabled") is False else {})


def test_monitors_are_those_that_exist_here(write):
    config = {
        "tensorboard": {"enabled": True, "output_path": "out", "job_name": "job"},
        "wandb": {"enabled": True, "project": "p", "team": "t", "group": "g"},
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "csv_monitor": {"enabled": True, "output_path": "out"},
        "comms_logger": {"enabled": True},
    }
    logging = parse(RUN, write(config)).logging
    assert (logging.tensorboard_dir, logging.wandb_project, logging.wandb_entity) == ("out/job", "p", "t")
    assert logging.log_throughput
    for section in config.values():
        section["enabled"] = False
    assert parse(RUN, write(config)).logging == parse(RUN, write({})).logging
    # A run has one folder of events, and the flag's says which.
    config["tensorboard"]["enabled"] = True
    settings, notes = parse_with_notes(f"{RUN} --tensorboard-dir mine", write(config))
    assert settings.logging.tensorboard_dir == "mine"
    assert any("has no effect beside --tensorboard-dir mine" in note for note in notes)


def test_the_file_says_which_precision_computes(write):
    path = write({"fp16": {"enabled": False}, "bf16": {"enabled": True}})
    settings, notes = parse_with_notes(f"{RUN} --fp16", path)
    assert settings.precision.bf16 and not settings.precision.fp16
    assert notes == [f"--fp16 has no effect: bf16.enabled true of {path} computes otherwise"]
