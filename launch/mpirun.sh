#!/bin/sh
# Start train.py in several processes with Open MPI, and restart it after a crash:
#
#     sh mpirun.sh 2 --steps 960              two processes
#     sh mpirun.sh 2 --emulate 4              two, with four emulated devices each
#     HOSTS=hosts.txt sh mpirun.sh 16         on the machines of that hostfile, with
#                                             lines such as: node1 slots=8
#
# The options after the number of processes go to train.py. On GPUs, start one process
# per GPU: JAX gives each the GPU of its local rank. Several machines must share this
# folder at the same path; that was not run. Open MPI 5 needs JAX 0.11.2 and mpi4py.
#
# To stop it, send SIGTERM to this script, or press Ctrl-C: all processes save, and it
# exits with 75. If the script itself was killed, send SIGUSR1 to its mpirun.
#
# More processes than cores need OMPI_MCA_rmaps_base_oversubscribe=1 in the environment,
# and root needs OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
set -u

processes=${1:-}
case $processes in
  "" | 0* | *[!0-9]*)
    echo "usage: sh mpirun.sh PROCESSES [options of train.py]" >&2
    exit 2
    ;;
esac
shift
if ! command -v mpirun >/dev/null; then
  echo "error: mpirun is not installed; on Debian: apt-get install openmpi-bin" >&2
  exit 127
fi

# The coordinator is process 0, on the first machine; it listens on this address only.
address=127.0.0.1
if [ -n "${HOSTS:-}" ]; then
  head=$(awk '!/^#/ && NF { print $1; exit }' <"$HOSTS")
  address=$(getent ahostsv4 "$head" | awk '{ print $1; exit }')
  case $address in
    "" | 127.*)
      echo "error: $head is ${address:-unknown} here, which others cannot reach" >&2
      exit 78
      ;;
  esac
fi

mpirun='' stopped=no
stop() {
  stopped=yes
  [ -z "$mpirun" ] || kill -USR1 "$mpirun" # forwarded to all processes
}
trap stop HUP INT TERM
for _ in $(seq 20); do
  coordinator=$address:$(shuf -n 1 -i 20000-30000)
  # Without --bind-to, each of two processes gets one core for all of its devices.
  setsid mpirun -n "$processes" --bind-to none ${HOSTS:+--hostfile "$HOSTS"} \
    -x JAX_COORDINATOR_ADDRESS="$coordinator" \
    -x JAX_COORDINATOR_BIND_ADDRESS="$coordinator" \
    python "$(dirname "$0")/train.py" --distributed --wait 150 "$@" &
  mpirun=$!
  [ $stopped = no ] || stop
  while kill -0 "$mpirun" 2>/dev/null; do
    wait "$mpirun"
    status=$?
  done
  # Complete, invalid, stopped, do not restart, or not found: end. Any other status is a
  # crash. train.py exits with 78 after three starts that save nothing new.
  case $stopped:$status in
    yes:* | *:0 | *:2 | *:75 | *:76 | *:78 | *:12[67]) break ;;
  esac
  echo "mpirun.sh: restarting after exit status $status" >&2
  sleep 5
done
exit "$status"
