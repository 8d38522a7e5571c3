"""Pretrain a GPT. ``python pretrain_gpt.py --help``, or under ``torchrun`` on several GPUs or nodes."""

from megatron_zpp.architectures import GPT
from megatron_zpp.training.pretrain import main

if __name__ == "__main__":
    main(GPT)
