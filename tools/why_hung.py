"""`megatron-zpp why-hung`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.diagnose.why_hung import main

if __name__ == "__main__":
    raise SystemExit(main())
