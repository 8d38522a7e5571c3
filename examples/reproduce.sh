#!/usr/bin/env bash
# Published results of ZeRO++ and LoCo, each by one command: lists them, or runs the one that is named. See reproduce.toml.
#   examples/reproduce.sh [NAME]     SCALE=laptop|gpu|full, default laptop
cd "$(dirname "$0")/.." || exit
exec python benchmarks/reproduce.py "$@"
