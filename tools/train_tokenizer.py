"""`megatron-zpp train-tokenizer`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.data.train_tokenizer import main

if __name__ == "__main__":
    raise SystemExit(main())
