#!/usr/bin/env bash
# A run on several machines that share this folder, by plain SSH: one torchrun on each, which meet at the first one.
#
#   RANKS_PER_NODE=8 examples/launch/ssh.sh "node0 node1" pretrain_llama.py FLAGS
#
# The folder's environment (.venv) is used on each machine. Ctrl-C, or a machine that fails, ends all of them.
set -euo pipefail
[ $# -gt 2 ] || { echo "usage: RANKS_PER_NODE=8 $0 'HOST HOST...' PROGRAM FLAGS" >&2; exit 2; }
read -ra hosts <<<"$1"
shift
[ -f "$1" ] || { echo "error: there is no program $1 here: start this from the folder that has it" >&2; exit 2; }
[ -x .venv/bin/torchrun ] || { echo "error: there is no .venv/bin/torchrun here: run make quickstart first" >&2; exit 2; }
torchrun=(.venv/bin/torchrun --nnodes "${#hosts[@]}" --nproc-per-node "${RANKS_PER_NODE:-8}" --rdzv-backend c10d)
torchrun+=(--rdzv-id "$$" --rdzv-endpoint "${hosts[0]}:${PORT:-29400}")
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for host in "${hosts[@]}"; do
    # -tt: the remote program ends with this one
    ssh -tt "$host" "cd $(printf '%q' "$PWD") && $(printf '%q ' "${torchrun[@]}" "$@")" &
done
for _ in "${hosts[@]}"; do wait -n; done
