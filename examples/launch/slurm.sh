#!/usr/bin/env bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
# A run under Slurm, from the repository's root with the virtual environment active. Each task is a rank:
#
#   OUT=runs/mine sbatch --account=... examples/launch/slurm.sh pretrain_llama.py FLAGS
#
# Ten minutes before the time limit all ranks save and stop, and the job goes back to the queue until the run is finished.
# It also goes back after a crash, but not if it saved nothing new, nor after a mistake in flags or files, or NaN.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. examples/common.sh
[ $# -gt 1 ] || fail "give the program and its flags: sbatch examples/launch/slurm.sh pretrain_llama.py FLAGS"
OUT=${OUT:-runs/slurm}
mkdir -p "$OUT"
launch_in_slurm "$@" --save "$OUT/checkpoints" --load "$OUT/checkpoints" --load-latest-good --exit-signal-handler
