"""Pretrain a Llama. ``python pretrain_llama.py --help``, or under ``torchrun`` on several GPUs or nodes."""

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import LLAMA

if __name__ == "__main__":
    main(LLAMA)
