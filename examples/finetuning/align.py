"""Tune a Hugging Face model by TRL under ZeRO++: torchrun --nproc-per-node 4 examples/finetuning/align.py METHOD ...

sft trains on chats ({"messages": ...}), dpo on pairs ({"prompt", "chosen", "rejected"}), and grpo on prompts whose
answers are known ({"prompt", "short"}): its reward is the share of the answer that a text begins with. The model that
results is a folder, from which the next method can start. Needs the packages trl, peft and accelerate.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from megatron_zpp.errors import describe_error, output_folder
from megatron_zpp.files import read_text
from megatron_zpp.integrations.huggingface import ZeroPPCallback
from megatron_zpp.integrations.trl import with_zeropp
from megatron_zpp.metrics.history import METRICS, SCHEMA
from megatron_zpp.zeropp import ZeroPPConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("method", choices=["sft", "dpo", "grpo"])
parser.add_argument("--model", required=True, metavar="DIR", help="folder of the Hugging Face model to start from")
parser.add_argument("--data", required=True, metavar="FILE", help="JSON lines")
parser.add_argument("--output", required=True, type=output_folder, metavar="DIR", help="folder to write the model to")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--new-tokens", type=int, default=24, help="of a rollout")
parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 alone; they are merged at the end")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--zero3", action="store_true", help="plain ZeRO-3, which gathers for each token")
parser.add_argument("--ranks-per-node", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
parser.add_argument("--results", metavar="FILE", help="append tokens/s and bytes to this file as a JSON line")
arguments = parser.parse_args()
method, ranks_per_node = arguments.method, arguments.ranks_per_node

if not Path(arguments.model, "config.json").is_file():
    parser.error(f"--model {arguments.model} holds no config.json: give the folder of a Hugging Face model")
try:
    rows = [json.loads(line) for line in read_text(arguments.data).splitlines()]
except (OSError, ValueError) as error:
    parser.error(f"--data {arguments.data}: {describe_error(error)}")
disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
settings: dict[str, Any] = dict(
    output_dir=arguments.output,
    max_steps=arguments.steps,
    per_device_train_batch_size=arguments.batch_size,
    gradient_accumulation_steps=arguments.accumulation,
    learning_rate=arguments.lr,
    logging_steps=1,
    disable_tqdm=True,
    save_strategy="no",
    report_to="none",
    bf16=arguments.bf16,
    gradient_checkpointing=False,
    fsdp=True,
    fsdp_config={"version": 2, "cpu_ram_efficient_loading": True},
)
common: dict[str, Any] = dict(processing_class=tokenizer, train_dataset=Dataset.from_list(rows))
if arguments.lora:
    common["peft_config"] = LoraConfig(r=16, target_modules="all-linear")


def load() -> PreTrainedModel:
    """Load on rank 0, which sends the others their shards; once settings have said that the model will be sharded."""
    dtype = torch.bfloat16 if arguments.bf16 and arguments.lora else torch.float32  # frozen weights need no fp32
    return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)


trainer: SFTTrainer | DPOTrainer | GRPOTrainer
options: SFTConfig | DPOConfig | GRPOConfig
if method == "sft":
    options = SFTConfig(**settings, assistant_only_loss=True)
    trainer = SFTTrainer(load(), options, **common)
elif method == "dpo":
    # With the chosen answers' own loss: alone, DPO may also make them less likely, if only the rejected ones fall more.
    options = DPOConfig(**settings, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 1.0])
    trainer = DPOTrainer(load(), None if arguments.lora else load(), options, **common)
else:

    def share_of_answer(completions: list[str], short: list[str], **_: object) -> list[float | None]:
        """The share of the right answer that a text begins with."""

        def share(text: str, answer: str) -> float:
            return sum(answer.startswith(text[: i + 1]) for i in range(len(answer))) / len(answer)

        return [*map(share, completions, short)]

    options = GRPOConfig(**settings, num_generations=4, max_completion_length=arguments.new_tokens, num_iterations=2)
    trainer = GRPOTrainer(load(), share_of_answer, options, **common)

if arguments.zero3:
    config = ZeroPPConfig(ranks_per_node=ranks_per_node)
else:
    hpz: dict[str, Any] = dict(hpz_partition_size=ranks_per_node, hpz_secondary_dtype="int8")
    config = ZeroPPConfig(
        quantized_weights=True,
        quantized_gradients=True,
        ranks_per_node=ranks_per_node,
        **(hpz if ranks_per_node > 1 else {}),
    )
trainer = with_zeropp(trainer, config, resident_weights=not arguments.zero3)


class Meter(TrainerCallback):  # type: ignore[misc]
    """Takes the time and this rank's bytes between and within nodes after each step."""

    def __init__(self) -> None:
        self.times, self.sent = list[float](), list[list[int]]()

    def on_step_end(self, args: Any, state: Any, *_: Any, **kw: Any) -> None:
        (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, ZeroPPCallback))
        assert callback.zeropp is not None
        taken = [zeropp.traffic.take() for zeropp in (callback.zeropp, *callback.others)]
        self.times.append(time.time())
        self.sent.append([sum(t.inter_node for t in taken), sum(t.intra_node for t in taken)])


def write_metrics(path: Path, times: list[float], sent: list[list[int]]) -> None:
    """Write a line for each step, as the trainer does, for tools/report.py."""
    begun = {"schema": SCHEMA, "settings": {}, "program": {}, "iteration": 0, "time": times[0]}
    records: list[dict[str, Any]] = [begun]
    tokens = list[int]()
    for line in trainer.state.log_history:
        if "loss" not in line:
            continue  # a summary
        step = line["step"]
        now, (between, within) = times[step - 1], sent[step - 1]
        tokens.append(line.get("num_tokens", tokens[-1] if tokens else 0))  # GRPO counts them once a rollout
        point = {"iteration": step, "samples": step * arguments.batch_size * dist.get_world_size(), "time": now}
        point |= {"lm loss": line["loss"], "comm/bytes-between-nodes": between, "comm/bytes-within-nodes": within}
        if step > 1:  # a rollout serves several steps: the mean since the first
            point["tokens-per-second"] = (tokens[-1] - tokens[0]) / (now - times[0])
        records.append(point)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


meter = Meter()
trainer.add_callback(meter)
trainer.train()
sent = torch.tensor(meter.sent)  # [steps, 2]
dist.all_reduce(sent)
adapters = f"{arguments.output}/adapters"
trainer.save_model(adapters if arguments.lora else arguments.output)
if trainer.is_world_process_zero():
    if arguments.lora:
        PeftModel.from_pretrained(load(), adapters).merge_and_unload().save_pretrained(arguments.output)
        tokenizer.save_pretrained(arguments.output)
    log = [line for line in trainer.state.log_history if "num_tokens" in line]
    write_metrics(Path(arguments.output, METRICS), meter.times, sent.tolist())
    steps = arguments.steps - 2  # the first two warm up
    seconds, (between, within) = meter.times[-1] - meter.times[:2][-1], sent[2:].sum(0).tolist()
    shown: dict[str, str] = {
        name: f"{log[0][name]:.3f} -> {log[-1][name]:.3f}"
        for name in ("loss", "rewards/margins", "reward")
        if name in log[0] and (method != "grpo" or name == "reward")
    }
    measured: dict[str, Any] = {
        "method": method,
        "setting": "ZeRO-3" if arguments.zero3 else "ZeRO++, resident weights",
        # The mean of all steps: a rollout serves several, so the count of tokens does not grow in each.
        "tokens/s": round(log[-1]["num_tokens"] * steps / arguments.steps / seconds, 1) if steps > 0 else None,
        "MB between nodes per step": round(between / max(1, steps) / 1e6, 3),
        "MB within nodes per step": round(within / max(1, steps) / 1e6, 3),
        **shown,
    }
    print("; ".join(f"{name}: {value}" for name, value in measured.items()), flush=True)
    if arguments.results:
        with open(arguments.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(measured) + "\n")
