#!/usr/bin/env bash
# Trains on several machines under Slurm, from the repository's folder:
#
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh configs/plasticity/llama2_1b_20x.yaml [key=value ...]
#
# Everything below can be given to sbatch on the command line, which wins over these lines. Add your
# site's --partition, --account and --time.
#
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH --signal=B:TERM@180
#
# --signal: 180 s before the time limit, and on preemption where Slurm is set up to tell, this script gets
# SIGTERM. The run then saves, ends with code 3, and the job is queued again: it resumes by itself.
#
# Variables, all optional:
#   NPROC_PER_NODE   processes per machine (default: one for each GPU)
#   LOG_DIR          one log for each machine goes there (default: runs/slurm/JOBID)
#   RDZV_PORT        port of the rendezvous on the first machine (default: from the job's number)
#   REPOSITORY       this repository (default: where sbatch was called)
#   NCCL_*, GLOO_*   are passed on, such as NCCL_SOCKET_IFNAME=ib0
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "error: no config: sbatch launch/slurm.sh configs/NAME.yaml [key=value ...]" >&2
    exit 2
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "error: not a Slurm job: start this with sbatch; on one machine use launch/pretrain.sh" >&2
    exit 2
fi
# Slurm runs a copy of this script from another folder, so its own place says nothing.
cd -- "${REPOSITORY:-$SLURM_SUBMIT_DIR}"
if [[ ! -f launch/pretrain.sh ]]; then
    echo "error: no launch/pretrain.sh in $PWD: call sbatch in the repository or set REPOSITORY" >&2
    exit 2
fi

log_dir=${LOG_DIR:-runs/slurm/$SLURM_JOB_ID}
mkdir -p -- "$log_dir"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_host=${hosts%%$'\n'*}
port=${RDZV_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# torchrun reads its options from PET_*. A requeued job must not meet what is left of its former self,
# hence the count of restarts in the id.
export PET_NNODES=$SLURM_JOB_NUM_NODES
export PET_RDZV_BACKEND=c10d
export PET_RDZV_ENDPOINT=$first_host:$port
export PET_RDZV_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# Exactly the first machine holds the rendezvous: torchrun can only guess that from host names.
# shellcheck disable=SC2016  # expanded on each machine, not here
on_each='
is_host=false
[[ $SLURM_NODEID == 0 ]] && is_host=true
export PET_RDZV_CONF=is_host=$is_host
exec bash launch/pretrain.sh "$@"'

echo "$(date '+%F %T') job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $PET_NNODES machines," \
    "rendezvous at $PET_RDZV_ENDPOINT, logs in $log_dir"

# When one machine is done (or has failed) the others get a minute: after a save they end by themselves,
# after a failure they may wait for it forever.
srun --kill-on-bad-exit=0 --wait=60 --open-mode=append --output="$log_dir/node%n.log" \
    bash -c "$on_each" launch/pretrain.sh "$@" &
step=$!

# To the launchers on all machines; srun itself would end the step instead of passing TERM on.
forward() {
    echo "$(date '+%F %T') SIGTERM: the run saves and stops"
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap forward TERM

status=0
wait "$step" || status=$?
# A signal ends `wait` early, with the step still running.
while kill -0 "$step" 2>/dev/null; do
    status=0
    wait "$step" || status=$?
done

if [[ $status -eq 3 ]]; then
    # Not where a user has cancelled the job, or Slurm is requeueing it already.
    if scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
        echo "$(date '+%F %T') saved; the job is queued again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
elif [[ $status -ne 0 ]]; then
    echo "error: the run ended with code $status; see $log_dir" >&2
    tail -n 5 -- "$log_dir"/node*.log >&2 || true
fi
exit "$status"
