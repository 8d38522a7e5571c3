"""`megatron-zpp plan --try` by its earlier name, for a checkout that is not installed as a command."""

from megatron_zpp.commands.suggest_settings import main

if __name__ == "__main__":
    raise SystemExit(main())
