"""`megatron-zpp preprocess-data`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.data.preprocess_data import main

if __name__ == "__main__":
    raise SystemExit(main())
