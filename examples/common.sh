# Shared by the scripts in examples/zeropp and examples/loco, which source it from the repository's root: where a run
# takes place, text for the small scales, and how its ranks are started. The training commands stand in the scripts.
#
# From the environment, for all of them:
#   SCALE=laptop|gpu|full   default: full in a Slurm job, laptop elsewhere
#   OUT=FOLDER              of the run's log and checkpoints; default runs/SCRIPT/SCALE-VARIANT
#   DRY_RUN=1               print the command, start nothing
#   ESTIMATE=1              print what the run needs, by tools/estimate.py, and start nothing
#   NODES, RANKS_PER_NODE   another cluster than the script's, at full scale without Slurm; HEAD=node0:29400 there
#   GPUS=1|2|4|8            how many of this machine's GPUs to use with SCALE=gpu; default all
#   BASELINE=FOLDER         of the run to compare with at the end; default the script's; BASELINE= compares nothing
#   WANDB_PROJECT=NAME      report the run to wandb, under the name of its folder, in the group of its script
# shellcheck shell=bash disable=SC2034  # variables are the sourcing script's

# Slurm's signal before the time limit would end this script; launch_in_slurm acts on it. Children inherit '', not this.
[ -z "${SLURM_JOB_ID:-}" ] || trap : USR1

SCALE=${SCALE:-$([ -n "${SLURM_JOB_ID:-}" ] && echo full || echo laptop)}

fail() {
    echo "error: $*" >&2
    exit 2
}

starts() { [ -z "${DRY_RUN:-}${ESTIMATE:-}" ]; }

# needs INSTALL PACKAGE...: refuses to start without the packages; INSTALL gets them.
needs() {
    starts || return 0
    python -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))' "${@:2}" ||
        fail "python has no ${*:2}: $1"
}
# shellcheck disable=SC2016  # backticks of a message
needs 'run `make quickstart` once, then `source .venv/bin/activate`' torch

# one_of NAME CHOICE...: refuses another value of the variable NAME.
one_of() {
    local choice name=$1
    shift
    for choice in "$@"; do [ "$choice" != "${!name}" ] || return 0; done
    fail "$name=${!name} does not exist; choose one of: $*"
}
one_of SCALE laptop gpu full

# cluster NODES RANKS_PER_NODE: sets these two for the chosen scale; the arguments are the full scale's.
cluster() {
    MACHINES=1 LOCAL=()
    case $SCALE in
        laptop) # 4 ranks on the processor, as if they were 2 nodes of 2
            NODES=2 RANKS_PER_NODE=2
            export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
            ;;
        gpu) # one machine, as if it were 2 nodes; one GPU is shared by 2 nodes of one rank
            GPUS=${GPUS:-$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)}
            [ "$GPUS" -gt 0 ] || fail "SCALE=gpu needs a GPU, and nvidia-smi shows none; SCALE=laptop needs none"
            [[ " 1 2 4 8 " == *" $GPUS "* ]] ||
                fail "the batches of SCALE=gpu are for 1, 2, 4 or 8 GPUs, not $GPUS: give GPUS= one of these"
            NODES=2 RANKS_PER_NODE=$((GPUS / 2))
            [ "$GPUS" != 1 ] || RANKS_PER_NODE=1 LOCAL=(--local-nodes 2)
            ;;
        full)
            NODES=${SLURM_JOB_NUM_NODES:-${NODES:-$1}}
            RANKS_PER_NODE=${SLURM_NTASKS_PER_NODE:-${RANKS_PER_NODE:-$2}}
            MACHINES=$NODES
            ;;
    esac
}

# corpus MEGABYTES VOCABULARY: text that every machine has, the sources of Python's standard library, with a tokenizer
# of its own, made once. Sets VOCABULARY, TOKENIZER and TEXT, the trainer's flags for them.
corpus() {
    VOCABULARY=$2
    CORPUS=${CORPUS:-runs/corpus-$1MB}
    TOKENIZER=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$CORPUS/tokenizer.model")
    TEXT=(--data-path "$CORPUS/python_text_document" --split 95,5,0 "${TOKENIZER[@]}")
    starts || return 0
    [ -f "$CORPUS/corpus.jsonl" ] ||
        python examples/quickstart/make_corpus.py --output "$CORPUS/corpus.jsonl" --max-megabytes "$1"
    [ "$CORPUS/tokenizer.model" -nt "$CORPUS/corpus.jsonl" ] ||
        python tools/train_tokenizer.py --input "$CORPUS/corpus.jsonl" --vocab-size "$2" --output "$CORPUS/tokenizer.model"
    [ "$CORPUS/python_text_document.idx" -nt "$CORPUS/tokenizer.model" ] ||
        python tools/preprocess_data.py --input "$CORPUS/corpus.jsonl" --output-prefix "$CORPUS/python" --append-eod \
            --workers 2 "${TOKENIZER[@]}"
}

# tiny_run: a model, its data and length for SCALE=laptop, in MODEL, WIDTH, LENGTH, RATE, OFTEN and TEXT.
tiny_run() {
    corpus 1 512
    WIDTH=64
    MODEL=(--num-layers 2 --hidden-size "$WIDTH" --num-attention-heads 2 --seq-length 64 --distributed-backend gloo)
    LENGTH=(--micro-batch-size 4 --global-batch-size 32 --train-iters 120 --lr-warmup-iters 2)
    RATE=(--lr 2e-3 --min-lr 2e-4)
    OFTEN=(--log-interval 10 --eval-iters 8 --save-interval 1000 --num-workers 0)
}

# small_run: the same for SCALE=gpu; a GPT has 135M parameters.
small_run() {
    corpus 60 8192
    WIDTH=768
    MODEL=(--num-layers 18 --hidden-size "$WIDTH" --num-attention-heads 12 --seq-length 1024)
    LENGTH=(--micro-batch-size 8 --global-batch-size 64 --train-iters 1000 --lr-warmup-iters 100)
    RATE=(--lr 6e-4 --min-lr 6e-5)
    OFTEN=(--log-interval 10 --eval-iters 10 --eval-interval 250 --save-interval 500)
    OFTEN+=(--tensorboard-dir "$OUT/tensorboard" --zeropp-monitor-interval 100)
}

# launch pretrain_X.py FLAGS...: starts the ranks: by srun in a Slurm job that has as many tasks, by torchrun elsewhere.
launch() {
    local world=$((NODES * RANKS_PER_NODE)) launcher=(torchrun --standalone --nproc-per-node)
    launcher+=($((world / MACHINES)))
    if [ "$MACHINES" -gt 1 ]; then # the same command on every machine
        launcher=(torchrun --nnodes "$MACHINES" --nproc-per-node "$RANKS_PER_NODE" --rdzv-backend c10d)
        launcher+=(--rdzv-endpoint "${HEAD:-node0:29400}")
    fi
    [ "${SLURM_NTASKS:-}" != "$world" ] || launcher=(srun --kill-on-bad-exit=1 python)
    [ "${#LOCAL[@]}" = 0 ] || launcher=(python) # it starts its ranks itself

    if [ -n "${ESTIMATE:-}" ]; then
        [ "${#LOCAL[@]}" = 0 ] || echo "for $world GPUs, not for the one that $world ranks share:"
        python tools/estimate.py --nodes "$NODES" --ranks-per-node "$RANKS_PER_NODE" --gpu "$GPU" \
            --vocabulary "$VOCABULARY" "$@"
        return
    fi
    set -- "$@" "${LOCAL[@]}"
    if [ -n "${WANDB_PROJECT:-}" ]; then # all runs of a script are one group, the baseline too
        export WANDB_RUN_GROUP=${WANDB_RUN_GROUP:-$(dirname "${OUT#runs/}")}
        printf 'WANDB_RUN_GROUP=%q ' "$WANDB_RUN_GROUP"
        set -- "$@" --wandb-project "$WANDB_PROJECT" --wandb-exp-name "${OUT#runs/}"
    fi
    printf '%q ' "${launcher[@]}" "$@"
    echo
    starts || return 0
    [ "$MACHINES" = 1 ] || [ "${launcher[0]}" = srun ] || [ -n "${HEAD:-}" ] ||
        fail "$MACHINES machines and no Slurm: run this on each of them, with HEAD=NAME_OF_ONE_OF_THEM:29400"
    mkdir -p "$OUT"
    [ -z "$(saved_iteration)" ] || echo "goes on from iteration $(saved_iteration) in $OUT; remove it to start over"
    if [ "${launcher[0]}" = srun ]; then
        launch_in_slurm "$@"
    else
        "${launcher[@]}" "$@" 2>&1 | tee -a "$OUT/log.txt"
    fi
}

# conclude SCRIPT EXPERIMENT VARIANT VARIABLE=VALUE [FLAG...]: ends a script. At laptop scale it trains the baseline, which
# that variable makes of the script, unless its folder is there. Then it prints published | ours | how | verdict, and writes
# OUT/result.json and OUT/report.html. Where several machines run the script, the one that finds the metrics does.
conclude() {
    local script=examples/$1 experiment=$2 variant=$3 baseline=$4 program=(examples/conclude.py) runs=("$OUT")
    shift 4
    starts && [ -n "$BASELINE" ] && grep -q . < <(find "$OUT" -name metrics.jsonl) || return 0
    if [ "$BASELINE" != "$OUT" ]; then
        if [ "$SCALE" = laptop ] && [ ! -d "$BASELINE" ]; then
            echo "training the baseline, $baseline"
            env "$baseline" OUT="$BASELINE" BASELINE='' "$script" "$@"
        fi
        if [ -d "$BASELINE" ]; then
            program+=(--baseline "$BASELINE")
            runs=("$BASELINE" "$OUT") # figures are over the first one's
        else
            echo "no baseline in $BASELINE: $baseline makes it"
        fi
    fi
    [ "$SCALE" = full ] || program+=(--data-path "${TEXT[1]}")
    program+=("$([ "$SCALE" = laptop ] && echo --on-cpus || echo --on-gpus)")
    python "${program[@]}" "$experiment" "$variant" "$OUT"
    python tools/report.py "${runs[@]}" --output "$OUT/report.html" || echo "no report page, for the reason above"
}

saved_iteration() { cat "$OUT/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || true; }

# One task per GPU, each a rank, without torchrun in between: it would allow ranks 30 seconds to save. Before the time
# limit Slurm signals this script (--signal=B:USR1@...), which has the ranks save and stop, and puts the job back in the
# queue. It does so after a crash, too, and never when the job got no further than the one before.
launch_in_slurm() {
    local before status=0 ranks stopped=
    before=$(saved_iteration)
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
    # From 22.05 on, srun no longer takes over the job's --cpus-per-task: all workers of a rank would share one core.
    SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}
    export MASTER_ADDR MASTER_PORT SRUN_CPUS_PER_TASK
    # shellcheck disable=SC2016  # expanded in each task
    srun --kill-on-bad-exit=1 bash -c \
        'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
        tasks=${SLURM_STEP_TASKS_PER_NODE:-,} # as 8(x2), or 8,4 on nodes that differ
        [[ $tasks == *,* ]] || export LOCAL_WORLD_SIZE=${tasks%%(*}
        exec python "$@"' rank "$@" \
        > >(tee -a "$OUT/log.txt") 2>&1 &
    ranks=$!
    trap 'stopped=1; kill -USR1 "$ranks"' USR1 # srun passes it on to all ranks
    wait "$ranks" || status=$?
    while kill -0 "$ranks" 2>/dev/null; do # the signal ended the wait, not the ranks
        status=0
        wait "$ranks" || status=$?
    done
    trap : USR1
    [ "$status" != 3 ] || return 3 # NaN, signalled or not: docs/reference/checkpoints.md
    case ${stopped:-$status} in
        0 | 2) return "$status" ;; # finished; a mistake in flags or files
    esac
    [ "$(saved_iteration)" != "$before" ] ||
        fail "ended with status $status and saved nothing new: not started again. The reason is above"
    echo "saved at iteration $(saved_iteration) (status $status): back in the queue"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0 # and not on to what follows this run
}
