"""`megatron-zpp inspect-checkpoint`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.inspect_checkpoint import main

if __name__ == "__main__":
    raise SystemExit(main())
