"""The flag --architecture of the tools: a model that is none of ours."""

from __future__ import annotations

import argparse

from megatron_zpp.architectures import Architecture, load_architecture


def given_architecture(args: argparse.Namespace) -> Architecture | None:
    """What ``--architecture`` names; None without it. Raises ValueError."""
    return load_architecture(args.architecture) if args.architecture else None
