"""Pretrain a Llama. ``python pretrain_llama.py --help``, or under ``torchrun`` on several GPUs or nodes."""

from megatron_zpp.architectures import LLAMA
from megatron_zpp.training.pretrain import main

if __name__ == "__main__":
    main(LLAMA)
