"""`megatron-zpp merge-datasets`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.data.merge_datasets import main

if __name__ == "__main__":
    raise SystemExit(main())
