"""`megatron-zpp estimate`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.estimate import main

if __name__ == "__main__":
    raise SystemExit(main())
