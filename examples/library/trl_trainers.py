"""ZeRO++ under TRL's trainers: torchrun --nproc-per-node 4 examples/library/trl_trainers.py METHOD

Needs the packages trl, peft and accelerate. A small Llama, made from a configuration, learns to answer with digits by
sft, dpo or grpo, or to add two digits by GRPO (addition); nothing is downloaded. Each step prints the loss or the
reward, and the bytes per parameter that left a node.
"""

import argparse
import string
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from megatron_zpp.errors import output_folder
from megatron_zpp.integrations.trl import with_zeropp
from megatron_zpp.zeropp import ZeroPPConfig

parser = argparse.ArgumentParser()
parser.add_argument("method", choices=["sft", "dpo", "grpo", "addition"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument(
    "--lr", type=float, help="constant learning rate; default 3e-3, addition 1e-3, with --lora 1e-2, and falling"
)
parser.add_argument("--lora", action="store_true")
parser.add_argument("--no-resident-weights", action="store_true", help="gather for each token")
parser.add_argument("--output", type=output_folder, default="runs/trl_trainers")
arguments = parser.parse_args()

SHOWN = ("loss", "rewards/margins", "reward")
characters = {
    character: i for i, character in enumerate(["<pad>", "<end>", *string.digits, *string.ascii_lowercase, *"+="])
}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(characters, unk_token="<pad>")), pad_token="<pad>", eos_token="<end>"
)
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # characters

torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=len(characters),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=False,
    pad_token_id=0,
    eos_token_id=1,
)
model, reference = LlamaForCausalLM(shape), LlamaForCausalLM(shape)
reference.load_state_dict(model.state_dict())

settings: dict[str, Any] = dict(
    output_dir=arguments.output,
    max_steps=arguments.steps,
    per_device_train_batch_size=4,
    learning_rate=arguments.lr or (1e-2 if arguments.lora else 1e-3 if arguments.method == "addition" else 3e-3),
    lr_scheduler_type="constant" if arguments.lr else "linear",
    logging_steps=1,
    disable_tqdm=True,
    save_strategy="no",
    report_to="none",
    bf16=False,
    gradient_checkpointing=False,
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
)
adapter = LoraConfig(r=8, target_modules="all-linear") if arguments.lora else None
prompts = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]
common: dict[str, Any] = dict(processing_class=tokenizer, peft_config=adapter)
trainer: SFTTrainer | DPOTrainer | GRPOTrainer
if arguments.method == "sft":
    data = Dataset.from_dict({"prompt": prompts, "completion": ["0123456789"] * len(prompts)})
    trainer = SFTTrainer(model, SFTConfig(**settings), train_dataset=data, **common)
elif arguments.method == "dpo":
    pairs = {"prompt": prompts, "chosen": ["0123"] * len(prompts), "rejected": ["abcd"] * len(prompts)}
    options: dict[str, Any] = {} if arguments.lora else {"ref_model": reference}
    trainer = DPOTrainer(model, args=DPOConfig(**settings), train_dataset=Dataset.from_dict(pairs), **options, **common)
elif arguments.method == "addition":
    sums = {f"{a}+{b}=": str(a + b) for a in range(10) for b in range(10 - a)}

    def right(completions: list[str], answer: list[str], **_: object) -> list[float | None]:
        """1 for the right sum; half at most for another digit, the more the nearer it is; 0 for letters."""
        pairs = zip(completions, answer, strict=True)
        digits = [(text, number, text.isdigit()) for text, number in pairs]
        return [
            1.0 if text == number else 0.5 - abs(int(text) - int(number)) / 20 if is_digit else 0.0
            for text, number, is_digit in digits
        ]

    settings["per_device_train_batch_size"] = 64
    trainer = GRPOTrainer(
        model,
        reward_funcs=right,
        args=GRPOConfig(**settings, num_generations=16, max_completion_length=1, num_iterations=2),
        train_dataset=Dataset.from_dict({"prompt": [*sums], "answer": [*sums.values()]}),
        **common,
    )
else:

    def digits(completions: list[str], **_: object) -> list[float | None]:
        """The share of digits among the characters."""
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    trainer = GRPOTrainer(
        model,
        reward_funcs=digits,
        args=GRPOConfig(**settings, num_generations=4, max_completion_length=8, num_iterations=2),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **common,
    )

num_parameters = sum(parameter.numel() for parameter in model.parameters())
config = ZeroPPConfig(
    quantized_weights=True, hpz_partition_size=2, hpz_secondary_dtype="int8", quantized_gradients=True
)
trainer = with_zeropp(trainer, config, resident_weights=not arguments.no_resident_weights)


class Bytes(TrainerCallback):  # type: ignore[misc]
    """Collects the bytes that all ranks send in each step: policy and other models, between and within nodes."""

    rows: list[list[float]] = []  # noqa: RUF012

    def on_step_end(self, *_: Any, **kw: Any) -> None:
        from megatron_zpp.integrations.huggingface import ZeroPPCallback

        (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, ZeroPPCallback))
        assert callback.zeropp is not None
        taken = [zeropp.traffic.take() for zeropp in (callback.zeropp, *callback.others)]
        sent = torch.tensor([n for traffic in taken for n in (traffic.inter_node, traffic.intra_node)])
        dist.all_reduce(sent)
        self.rows.append((sent / 2 / num_parameters).tolist())  # two nodes


counted = Bytes()
trainer.add_callback(counted)
trainer.train()
if trainer.is_world_process_zero():
    for line, row in zip(trainer.state.log_history, counted.rows, strict=False):
        shown = ", ".join(f"{name} {float(line[name]):.7f}" for name in SHOWN if name in line)
        print(f"step {line['step']}: {shown}; bytes {' '.join(f'{value:.3f}' for value in row)}")

if arguments.method == "addition":  # the likeliest answers, equal on all ranks
    prompts = tokenizer([*sums], return_tensors="pt")
    assert trainer.model is not None
    with torch.no_grad():
        answers = trainer.model(**prompts).logits[:, -1].argmax(-1)
    given = [tokenizer.decode([answer]) for answer in answers]
    if trainer.is_world_process_zero():
        count = sum(text == number for text, number in zip(given, sums.values(), strict=True))
        print(f"right: {count} of {len(sums)}")
