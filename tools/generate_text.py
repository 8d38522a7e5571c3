"""`megatron-zpp generate-text`, for a checkout that is not installed as a command."""

from megatron_zpp.commands.generate_text import main

if __name__ == "__main__":
    raise SystemExit(main())
