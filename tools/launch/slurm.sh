#!/usr/bin/env bash
# Submit a run to Slurm, from the repository's folder:
#
#     sbatch -N 32 tools/launch/slurm.sh configs/llama_70b.toml [--table.key=value ...]
#
# It goes on until the run is done: stopped before the time limit, pre-empted or left by a node, it saves where it can,
# is requeued, and resumes from the newest checkpoint. What sbatch's own options say comes before the lines below.
#
#SBATCH --job-name=plumbline
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# 120 seconds before the time limit (Slurm may be up to 60 s early): long enough for one step and one save.
#SBATCH --signal=B:USR1@120
#
#   CONTAINER_IMAGE   run in this image, such as the Dockerfile's, by Slurm's pyxis plug-in: registry#plumbline:1
#                     default: no container
#   CONTAINER_MOUNTS  what else it sees, FROM:TO[,FROM:TO]              default: this folder alone
#   CONTAINER_PREFIX  or run by this command: "apptainer exec --nv image.sif"
#   MAX_RESTARTS      a crash within 10 minutes of a start is tried again while the job has been restarted less often;
#                     default: 3. A later crash is always tried again: it was not a crash at the start
#   RESTARTS          restarts of the ranks within the job, before any requeueing          default: 0
#   NGPU, MASTER_ADDR, MASTER_PORT, ...   as for run_train.sh; by default what Slurm says
#
# Stop it for good:       scancel JOB    (it saves, and has the cluster's KillWait, mostly 30 s, for that)
# Let it save and go on:  scancel --batch --signal=USR1 JOB
# The words of node 0 and every node's errors are in slurm-JOB.log, those of every rank in the run's folder, logs/.
# Exit codes: those of run_train.sh.
set -uo pipefail
say() { echo "slurm.sh: $*" >&2; }

cd "${SLURM_SUBMIT_DIR:?is set by sbatch: this script is for sbatch}" || exit 2
[[ -x run_train.sh ]] || { say "$PWD has no run_train.sh: sbatch this from the repository's folder"; exit 2; }

# A container may have no scontrol, so node 0 is found here. Two jobs that share a node get two ports.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)}
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

step=(--label --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}")
prefix=()
if [[ ${CONTAINER_IMAGE-} ]]; then
    mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    step+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
elif [[ ${CONTAINER_PREFIX-} ]]; then
    read -ra prefix <<<"$CONTAINER_PREFIX"
else # make the environment once, before every node looks for it
    (source tools/environment.sh && find_python requirements.txt) || exit $?
fi

# USR1 goes through srun to every rank, which saves. (TERM would make srun kill them within 40 ms.)
asked=''
trap 'asked=1; [[ ! ${srun-} ]] || kill -USR1 "$srun"' USR1
say "job $SLURM_JOB_ID, start $((1 + ${SLURM_RESTART_COUNT:-0})), on $SLURM_JOB_NODELIST"
srun "${step[@]}" "${prefix[@]}" ./run_train.sh "$@" &
srun=$!
while wait "$srun"; code=$?; ((code > 128)) && kill -0 "$srun" 2>/dev/null; do :; done # a signal ends wait, not srun

again=''
if ((code == 75)) || [[ $asked ]]; then
    again="stopped on request"
elif ((code != 0 && code != 2 && code != 76)); then
    if ((SECONDS > 600 || ${SLURM_RESTART_COUNT:-0} < ${MAX_RESTARTS:-3})); then
        again="failed with exit code $code"
    else
        say "failed with exit code $code soon after its start, $((1 + ${SLURM_RESTART_COUNT:-0})) times now: not requeued"
    fi
fi
# Whoever cancels a job does not want it back, and Slurm itself requeues the one that it pre-empts.
if ((code != 0 && code != 2 && code != 76)) && [[ $again && $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
    say "$again: requeued"
    scontrol requeue "$SLURM_JOB_ID" || say "Slurm did not requeue it: submit it again to go on"
fi
exit "$code"
