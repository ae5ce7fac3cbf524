#!/bin/bash
#SBATCH --job-name=m2forge
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#
#   sbatch examples/cluster/slurm.sh my_rl.toml --runs /shared/runs
#
# Starts a Ray head on the first node and a Ray worker on each other one, then `m2forge rl` with these arguments on the
# first node. The same command, or Slurm's requeue, resumes the run. Two minutes before the time limit the run gets
# SIGTERM, and ends as with Ctrl-C.

set -euo pipefail

port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
run=

finish() {
    # Ends the sruns, and with them Ray on all nodes.
    kill $(jobs -p) 2>/dev/null || true
    wait
}
trap finish EXIT
trap '[ -z "$run" ] || kill -TERM "$run"' TERM

on_node() {
    srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap "${@:2}" &
}

num_up() {
    ray status --address="$head:$port" 2>/dev/null | grep -c '^ *1 node_' || true
}

wait_for() {
    for _ in $(seq "${MAX_LOOKS:-150}"); do
        [ "$(num_up)" -lt "$1" ] || return 0
        sleep "${POLL_S:-2}"
    done
    echo "slurm.sh: $(num_up) of $1 Ray nodes are up; see the output of srun above" >&2
    return 2
}

on_node "$head" ray start --head --port="$port" --node-name="$head" --include-dashboard=false --block
wait_for 1
for node in "${nodes[@]:1}"; do
    on_node "$node" ray start --address="$head:$port" --node-name="$node" --block
done
wait_for "${#nodes[@]}"

m2forge rl "$@" --set cluster.launcher=ray --set cluster.ray.address="$head:$port" &
run=$!
status=0
wait "$run" || status=$?
# A trapped signal ends `wait` before the run ends.
while kill -0 "$run" 2>/dev/null; do
    status=0
    wait "$run" || status=$?
done
exit "$status"
