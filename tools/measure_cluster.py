"""`megatron-zpp plan --measure` by its earlier name, for a checkout that is not installed as a command."""

from megatron_zpp.commands.measure_cluster import main

if __name__ == "__main__":
    raise SystemExit(main())
