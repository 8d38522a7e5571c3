"""`megatron-zpp inspect-dataset`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.data.inspect_dataset import main

if __name__ == "__main__":
    raise SystemExit(main())
