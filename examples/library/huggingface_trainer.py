"""ZeRO++ and LoCo under the Hugging Face Trainer: torchrun --nproc-per-node 4 examples/library/huggingface_trainer.py

Needs the packages transformers and accelerate. The model is made from a configuration, and trains on the bytes of
README.md; nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megatron_zpp.errors import output_folder
from megatron_zpp.integrations.huggingface import ZeroPPCallback
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=output_folder, default="runs/huggingface_trainer")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--resume", metavar="CHECKPOINT", help="a folder that a run with the same flags has saved")
arguments = parser.parse_args()
if arguments.resume is not None and not Path(arguments.resume, "trainer_state.json").is_file():
    parser.error(f"--resume {arguments.resume} holds no trainer_state.json: give a checkpoint-N folder of --output")

torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
text = torch.frombuffer(bytearray(Path("README.md").read_bytes()), dtype=torch.uint8).long()
samples = [{"input_ids": sample, "labels": sample} for sample in text[: text.numel() // 64 * 64].view(-1, 64)]

config = ZeroPPConfig(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, loco=LoCoConfig())
trainer = Trainer(
    LlamaForCausalLM(shape),
    TrainingArguments(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,  # only the last micro-batch crosses nodes
        learning_rate=3e-3,
        logging_steps=1,
        disable_tqdm=True,
        save_steps=arguments.steps // 2,
        report_to="none",
        fsdp=True,  # type: ignore[arg-type]
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    ),
    train_dataset=samples,  # type: ignore[arg-type]
    callbacks=[ZeroPPCallback(config)],
)
trainer.train(resume_from_checkpoint=arguments.resume)
if trainer.is_world_process_zero():
    for line in trainer.state.log_history[:-1]:
        print(f"step {line['step']}: loss {line['loss']:.4f}")
