#!/bin/sh
# Start train.py as several processes, with Open MPI, and again when they crash:
#
#     sh mpirun.sh 2 --steps 960              two processes, on the devices JAX finds
#     sh mpirun.sh 2 --emulate 4              two, each with four devices of the CPU
#     HOSTS=hosts.txt sh mpirun.sh 16         on the machines of that file, each a line
#                                             as: node1 slots=8
#
# First comes the number of processes, then the options of train.py. On GPUs, ask for
# as many processes as there are GPUs: of a launcher that numbers the processes of a
# machine, JAX takes that number as the one GPU of the process. Several machines need
# this folder at the same path, shared, and were not tried. Open MPI 5 needs JAX 0.11.2
# and mpi4py.
#
# To stop it, send SIGTERM to this script, or Ctrl-C: all processes save, and it ends with
# 75. If the script itself was killed, send SIGUSR1 to the mpirun that it left.
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
  echo "there is no mpirun: on Debian and Ubuntu, apt-get install openmpi-bin" >&2
  exit 127
fi

# Where the processes meet: on the first machine, which listens at this address only.
address=127.0.0.1
if [ -n "${HOSTS:-}" ]; then
  head=$(awk '!/^#/ && NF { print $1; exit }' <"$HOSTS")
  address=$(getent ahostsv4 "$head" | awk '{ print $1; exit }')
  case $address in
    "" | 127.*)
      echo "$head is ${address:-nowhere} here: name what other machines reach" >&2
      exit 78
      ;;
  esac
fi

mpirun='' told=no
stop() {
  told=yes
  [ -z "$mpirun" ] || kill -USR1 "$mpirun" # which it passes on to all processes
}
trap stop HUP INT TERM
for _ in $(seq 20); do
  meet=$address:$(shuf -n 1 -i 20000-30000)
  # Without --bind-to, each of two processes gets one core, for all of its devices.
  setsid mpirun -n "$processes" --bind-to none ${HOSTS:+--hostfile "$HOSTS"} \
    -x JAX_COORDINATOR_ADDRESS="$meet" -x JAX_COORDINATOR_BIND_ADDRESS="$meet" \
    python "$(dirname "$0")/train.py" --distributed --wait 150 "$@" &
  mpirun=$!
  [ $told = no ] || stop
  while kill -0 "$mpirun" 2>/dev/null; do
    wait "$mpirun"
    status=$?
  done
  # Done, refused, told to stop or not to go on: all else is a crash. train.py itself
  # stays down, with 78, where three starts in a row have saved nothing new.
  case $told:$status in
    yes:* | *:0 | *:2 | *:75 | *:76 | *:78 | *:12[67]) break ;;
  esac
  echo "mpirun.sh: ended with $status, and starts again" >&2
  sleep 5
done
exit "$status"
