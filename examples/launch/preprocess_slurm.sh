#!/usr/bin/env bash
#SBATCH --array=0-15
#SBATCH --cpus-per-task=32
# Tokenize a corpus on many machines, then merge: the same bytes as on one machine, with the files in the order of their
# names. From the repository's root, with the virtual environment active:
#
#   job=$(sbatch --parsable examples/launch/preprocess_slurm.sh data/pile data/tokens/part FLAGS)
#   sbatch --dependency=afterok:$job --wrap "python tools/merge_datasets.py --input data/tokens --output-prefix data/all"
#
# FLAGS are tools/preprocess_data.py's: the tokenizer, --append-eod. The folder of the parts holds nothing else.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
[ $# -gt 2 ] || { echo "usage: sbatch $0 FOLDER PREFIX FLAGS" >&2; exit 2; }
folder=$1 prefix=$2 i=$SLURM_ARRAY_TASK_ID parts=$SLURM_ARRAY_TASK_COUNT
shift 2
list='import sys
from megatron_zpp.commands.data.preprocess_data import parse_arguments
from megatron_zpp.data.text.corpus import find_files
from megatron_zpp.errors import reports_errors
args = parse_arguments(["--input", sys.argv[1], "--output-prefix", *sys.argv[2:]])
sys.exit(reports_errors(lambda: print(*(file.path for file in find_files(args.input, args.input_format)), sep="\n"))())'
found=$(python -c "$list" "$folder" "$prefix" "$@") # as tools/preprocess_data.py finds and sorts them
mapfile -t files <<<"$found"
share=("${files[@]:$((i * ${#files[@]} / parts)):$(((i + 1) * ${#files[@]} / parts - i * ${#files[@]} / parts))}")
[ "${#share[@]}" -gt 0 ] || { echo "no file for part $i of $parts: give --array fewer than ${#files[@]} parts" >&2; exit 2; }
mkdir -p "$(dirname "$prefix")"
python tools/preprocess_data.py --input "${share[@]}" --output-prefix "$prefix$(printf %05d "$i")" \
    --workers "${SLURM_CPUS_PER_TASK:-1}" "$@"
