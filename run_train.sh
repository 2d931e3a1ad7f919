#!/usr/bin/env bash
# Train:  ./run_train.sh [CONFIG.toml] [--table.key=value ...]      (--help, --help=all)
# Check the machines before:  ./run_train.sh --preflight [CONFIG.toml] [...], on the same nodes    (docs/preflight.md)
#
# Without a CONFIG it runs configs/llama_debug.toml. Relative paths, here and in the config, are relative to this
# folder, wherever the script is called from. If the active environment lacks a package, the script makes .venv in this
# folder and uses that.
#
#   NGPU         processes on this node                      default: the visible GPUs, or 1
#   NNODES       nodes of the job; run this on each of them  default: those of this Slurm step, or 1
#                MIN:MAX: any number of nodes in this range  (docs/launch.md)
#   NODE_RANK    the number of this node, from 0             default: Slurm's number; 0 of one node
#   MASTER_ADDR  address of node 0                           default: from Slurm; needed when NNODES > 1
#   MASTER_PORT  a free port there                           default: 29500
#   RESTARTS     how often to restart by itself when a rank or a node has failed; default: 0
#   OMP_NUM_THREADS  threads of each process                 default: this node's cores / NGPU
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds that saving may take after SIGTERM or Ctrl-C, before SIGKILL; default: 30
#
# Exit codes:
#   0      done
#   2      the configuration or the input is wrong, and nothing was started
#   75     stopped on request with a checkpoint; run it again to go on
#   76     the same step fails again and again
#   other  that of the first rank to fail; 128 + n if signal n killed it (n = 14: the rank hung, and its stacks are in
#          the run's folder, in logs/)
set -euo pipefail
# Until the run itself starts, this script answers signals: Python would answer by a traceback while it starts. So what
# it starts runs in the background, where Ctrl-C is not heard.
started=''
stopped() {
    [[ ! $started ]] || kill "$started" 2>/dev/null || true
    [[ ! -t 2 ]] || echo >&2 # behind the terminal's ^C
    echo "plumbline: $2" >&2
    exit "$1"
}
trap "stopped 130 'interrupted before training began'" INT
for name in TERM HUP USR1 USR2; do
    trap "stopped 75 'stopped by SIG$name before training began: run it again to go on'" "$name" # if nohup does not ignore it
done
unheard() {
    "$@" &
    started=$!
    wait "$started"
}
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source tools/environment.sh

visible_gpus() { # CUDA_VISIBLE_DEVICES hides GPUs from torch, but not from nvidia-smi
    if [[ ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv -e '^$' -e '^-1$'
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU '
    fi
}

# Slurm: one task on each node runs this script (srun --ntasks-per-node=1), and this script starts the ranks.
if [[ ! ${NNODES-} && ! ${SLURM_STEP_NUM_NODES-} && ${SLURM_JOB_NUM_NODES:-1} -gt 1 ]]; then
    fail "one of this Slurm job's $SLURM_JOB_NUM_NODES nodes: start it with srun --ntasks-per-node=1, or set NNODES=1"
elif [[ ${SLURM_STEP_NUM_TASKS:-0} -gt ${SLURM_STEP_NUM_NODES:-1} ]]; then
    fail "$SLURM_STEP_NUM_TASKS Slurm tasks on ${SLURM_STEP_NUM_NODES:-1} nodes: use srun --ntasks-per-node=1"
fi
if [[ ! ${NGPU-} ]]; then
    NGPU=$(visible_gpus) || NGPU=1 # grep fails if it counts none
fi
NNODES=${NNODES:-${SLURM_STEP_NUM_NODES:-1}}
MASTER_PORT=${MASTER_PORT:-29500}
RESTARTS=${RESTARTS:-0}
[[ $NNODES =~ ^[0-9]{1,6}(:[0-9]{1,6})?$ ]] || fail "NNODES=$NNODES: must be a whole number, or MIN:MAX"
FEWEST=${NNODES%:*} MOST=${NNODES#*:} # a single number is both
if [[ $MOST == 1 ]]; then # also on one of several nodes of a Slurm step, each of which has a run of its own
    NODE_RANK=${NODE_RANK:-0}
else
    NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
fi
for name in NGPU FEWEST MOST NODE_RANK MASTER_PORT RESTARTS; do
    [[ ${!name} =~ ^(0|[1-9][0-9]{0,5})$ ]] || fail "$name=${!name}: must be a whole number from 0 to 999999"
done
((NGPU > 0 && FEWEST > 0 && FEWEST <= MOST && NODE_RANK < MOST)) ||
    fail "NGPU=$NGPU NNODES=$NNODES NODE_RANK=$NODE_RANK: at least 1 process, 1 node, and NODE_RANK below NNODES"
if [[ $MOST -gt 1 && ! ${MASTER_ADDR-} ]]; then
    [[ ${SLURM_STEP_NODELIST-} ]] || fail "NNODES=$NNODES needs MASTER_ADDR, the address of node 0"
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n1)
fi

find_python requirements.txt

program=(train.py)
config=("$@")
if [[ ${1-} == --preflight ]]; then
    shift
    program=(-m tools.preflight)
    config=()
    for argument; do
        [[ $argument != --help && $argument != -h ]] || exec "$PYTHON" "${program[@]}" --help
        [[ $argument =~ ^--(only|skip|expect|device|json|timeout)= ]] || config+=("$argument")
    done
fi

# All mistakes in the configuration are reported here, together and before anything starts, and for a run so is everything that
# it names and that this node lacks: text, tokenizer, packages, GPUs.
checks=(tools.check)
((MOST > 1)) || checks+=(--one-node) # a node that comes late finds its own run alive
[[ ${program[0]} == train.py ]] || checks=(configs.load --quiet)
answer=0
for nodes in $(printf '%s\n' "$FEWEST" "$MOST" | uniq); do
    unheard "$PYTHON" -m "${checks[@]}" ${config[@]+"${config[@]}"} --world-size=$((NGPU * nodes)) --local-world-size="$NGPU" ||
        answer=$?
    ((answer != 3)) || exit 0 # the run is done, which the check has said
    ((answer == 0)) || exit "$answer"
done
for argument; do
    [[ ! $argument =~ ^(-h|--help|--help=all)$ ]] || exit 0 # the check has printed it
done

cores=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l) || true # real cores, not hyper-threads
allowed=$(nproc 2>/dev/null) || allowed=1
((cores > 0 && cores < allowed)) || cores=$allowed
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
export PYTHONUNBUFFERED=1
if [[ $MOST == 1 && -e /sys/class/net/lo ]]; then
    # the ranks of a single node need not be reachable from outside
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
fi
# Node 0's store has a connection to every rank, and each rank has sockets and data files: 1,024, the usual soft limit of
# open files, is too few. Every process may raise it as far as the hard limit.
hard=$(ulimit -Hn)
[[ $hard == unlimited || $hard -gt 1048576 ]] && hard=1048576
ulimit -Sn "$hard" 2>/dev/null || true
umask "$(printf '%o' $(($(umask) | 2)))" # whatever the shell's umask is, others may not write to what a run leaves

mirror=() # run.mirror, or a URL as run.folder: logs and metrics are copied there meanwhile
if [[ ${program[0]} == train.py ]]; then
    while IFS= read -r word || [[ $word ]]; do
        mirror+=("$word")
    done < <(trap '' INT && exec "$PYTHON" -m configs.load --mirror "$@")
    ((${#mirror[@]} == 0)) || mirror=("$PYTHON" -m tools.mirror --node="$NODE_RANK" "${mirror[@]}")
fi
first=()
! env --block-signal=INT true 2>/dev/null || first=(env --block-signal=INT) # until Python has its handlers
if ((NGPU * MOST == 1 && RESTARTS == 0)); then
    exec ${first[@]+"${first[@]}"} ${mirror[@]+"${mirror[@]}"} "$PYTHON" "${program[@]}" "$@" # one process needs no launcher, and starts a second or two earlier without it
fi
exec ${first[@]+"${first[@]}"} ${mirror[@]+"${mirror[@]}"} "$PYTHON" -m tools.launch --nproc-per-node="$NGPU" --nnodes="$NNODES" --node-rank="$NODE_RANK" \
    --master-addr="${MASTER_ADDR-}" --master-port="$MASTER_PORT" \
    --max-restarts="$RESTARTS" --shutdown-timeout="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-30}" "${program[@]}" "$@"
