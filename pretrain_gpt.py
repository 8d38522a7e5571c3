"""Pretrain a GPT. ``python pretrain_gpt.py --help``, or under ``torchrun`` on several GPUs or nodes."""

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT

if __name__ == "__main__":
    main(GPT)
