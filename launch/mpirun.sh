#!/bin/sh
# Start train.py as several processes of this machine, with Open MPI:
#
#     sh mpirun.sh 2 --steps 960              two processes, on the devices JAX finds
#     sh mpirun.sh 2 --emulate 4              two, each with four devices of the CPU
#
# First comes the number of processes, then the options of train.py. On GPUs, ask for
# as many processes as there are GPUs: of a launcher that numbers the processes of a
# machine, JAX takes that number as the one GPU of the process.
#
# To stop it, send SIGTERM to one of the processes: all of them save, and mpirun ends
# with 143. Sent to mpirun itself, it kills them a second later, saved or not.
#
# More processes than cores need OMPI_MCA_rmaps_base_oversubscribe=1 in the environment,
# and root needs OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1. Several
# machines need a list of them (mpirun --hostfile) and a folder that all of them share.
set -eu

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

# Without --bind-to, each of two processes gets one core, for all of its devices.
exec mpirun -n "$processes" --bind-to none \
  python "$(dirname "$0")/train.py" --distributed "$@"
