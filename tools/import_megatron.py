"""`megatron-zpp import-megatron`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.convert.import_megatron import main

if __name__ == "__main__":
    raise SystemExit(main())
