"""`megatron-zpp report`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.report import main

if __name__ == "__main__":
    raise SystemExit(main())
