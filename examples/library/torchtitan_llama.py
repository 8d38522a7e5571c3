"""ZeRO++ and LoCo under torchtitan's debug Llama 3: torchrun --nproc-per-node 4 examples/library/torchtitan_llama.py

Needs the package torchtitan. The model is made from a configuration, and trains on README.md in a small tokenizer of
its own; nothing is downloaded. Any other config of torchtitan's goes through ``with_zeropp`` in the same way.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from megatron_zpp.errors import output_folder
from megatron_zpp.integrations.torchtitan import with_zeropp
from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig


def write_text_and_tokenizer(folder: Path) -> None:
    """What torchtitan's repository has under tests/assets, and its package has not."""
    text = Path("README.md").read_text(encoding="utf-8")
    (folder / "text").mkdir(parents=True, exist_ok=True)
    samples = [json.dumps({"text": paragraph}) for paragraph in text.split("\n\n")]
    (folder / "text" / "train.jsonl").write_text("\n".join(samples))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=512, special_tokens=["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def debug_llama3(folder: Path) -> Trainer.Config:
    """torchtitan's own, small enough for CPUs."""
    config = llama3_debugmodel()
    config.dump_folder = config.hf_assets_path = str(folder)
    config.dataloader.dataset_path = str(folder / "text")
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 64, 2, 16
    config.parallelism.spmd_backend = "partial_dtensor"  # torchtitan's default wants a torch newer than 2.13
    config.validator.enable = False
    config.checkpoint.enable = True
    config.debug.seed = 0
    if not torch.cuda.is_available():  # FlexAttention has no backward pass there
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=output_folder, default="runs/torchtitan")
    parser.add_argument("--steps", type=int, default=20, help="continues from the last checkpoint in the output")
    arguments = parser.parse_args()

    init_logger()
    if os.environ["LOCAL_RANK"] == "0":
        write_text_and_tokenizer(Path(arguments.output))
    config = debug_llama3(Path(arguments.output))
    config.training.steps, config.checkpoint.interval = arguments.steps, arguments.steps // 2
    zeropp = ZeroPPConfig(quantized_weights=True, hpz_partition_size=2, quantized_gradients=True, loco=LoCoConfig())
    trainer = with_zeropp(config, zeropp).build()  # its process group waits for rank 0
    try:
        trainer.train()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
