"""`megatron-zpp export-peft`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.convert.export_peft import main

if __name__ == "__main__":
    raise SystemExit(main())
