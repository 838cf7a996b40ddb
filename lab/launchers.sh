#!/bin/bash
# Start launch/train.py by itself, by Open MPI and by Slurm, and show what it prints:
#
#     bash lab/launchers.sh
#
# It needs Debian or Ubuntu, root that may make namespaces (in a container: docker run
# --privileged) and a python with the book's packages on the PATH. Of Open MPI, Slurm
# and MUNGE it installs what is missing. All else happens in namespaces that end with
# this script, and with them all processes and daemons, their ports, mounts and files.
set -euo pipefail
PATH=$PATH:/usr/sbin

install_missing() (
  type mpirun slurmctld munged ip >/dev/null 2>&1 && exit
  asked=/usr/sbin/policy-rc.d # whether a new package may start its daemons: 101 is no
  if [ ! -e "$asked" ]; then
    trap 'rm "$asked"' EXIT
    install -m 755 <(printf '#!/bin/sh\nexit 101\n') "$asked"
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  apt-get -qq -o DPkg::Lock::Timeout=120 install --yes --no-install-recommends \
    openmpi-bin slurm-wlm munge iproute2
)

if [ "${1:-}" != inside ]; then
  install_missing >&2
  # However this script ends, unshare ends too; with it the first process inside ends,
  # and with that one, by the kernel, all others.
  trap 'kill -KILL $! 2>/dev/null || :' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  setpriv --pdeathsig KILL env -i PATH="$PATH" LANG=C.UTF-8 \
    unshare --pid --fork --kill-child --mount-proc --net --uts bash "$0" inside &
  wait $!
  exit
fi

# ------------------------------------------------------------- inside the namespaces

launch=$(realpath "$(dirname "$0")/../launch")
# Two interfaces, of which Open MPI and Slurm want one that is not lo; none leads outside.
ip link set lo up
ip link add net0 type veth peer name net1
ip address add 192.0.2.1/24 dev net0
ip link set net0 up
ip link set net1 up
echo localhost >/proc/sys/kernel/hostname
mount -t tmpfs -o mode=755 tmpfs /run
trap '[ $? -eq 0 ] || tail -n 30 /run/*.log /run/*/*.log >&2' EXIT
export TMPDIR=/run SLURM_CONF=/run/slurm.conf OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
short=(--steps 48 --save-every 20 --log-every 8)
long=(--steps 240 --save-every 200 --log-every 20)
limit=240 # seconds for a run; on a busy machine one takes 60

begin() { # a run of this name in a copy of launch/, perhaps from another's step 20
  name=$1
  mkdir -p "/run/$name/checkpoints"
  cd "/run/$name"
  cp "$launch"/*.* .
  [ -z "${2:-}" ] || cp -r "/run/$2/checkpoints/20" checkpoints
  SECONDS=0
}

slowly() { # each step of the run takes longer: a signal arrives before the last one
  printf '%s\n' 'set_limit = limit' \
    'limit = lambda *words: set_limit(*words) or time.sleep(0.05)' >>lifecycle.py
}

end() { # of the run, for lab/launchers.py to read
  echo "== $name: $SECONDS s"
}

fail() {
  echo "$name: $*" >&2
  exit 1
}

within() { # so many seconds, a command has to come true
  local last=$((SECONDS + $1))
  until "${@:2}"; do
    [ $SECONDS -lt $last ] || fail "not in $1 seconds: ${*:2}"
    sleep 0.3
  done
}

begin "one process"
timeout $limit python train.py --emulate 8 "${short[@]}"
end
begin "one process, longer"
timeout $limit python train.py --emulate 8 "${long[@]}"
end

begin "Open MPI"
timeout $limit sh mpirun.sh 2 --emulate 4 "${short[@]}"
end
begin "Open MPI, restarted" "Open MPI"
timeout $limit sh mpirun.sh 4 --emulate 2 "${short[@]}"
end

# mpirun.sh itself is told to stop, and then one of its processes is killed.
begin "Open MPI, told to stop"
slowly
sh mpirun.sh 2 --emulate 4 "${long[@]}" >log 2>&1 &
within $limit grep -q "  loss " log
kill -TERM $!
wait $! && fail "it went on"
timeout $limit sh mpirun.sh 2 --emulate 4 "${long[@]}" >>log 2>&1
cat log
end
begin "Open MPI, one process killed"
slowly
sh mpirun.sh 2 --emulate 4 "${long[@]}" >log 2>&1 &
within $limit grep -q "  loss " log
pkill -KILL -n -f "^python.* --distributed "
wait $!
grep -q "^mpirun.sh: ended with .*, and starts again" log || fail "no second start"
cat log
end

# One node, this machine, which says that it has eight processors. A job that goes back
# into the queue waits for a second longer than cred_expire, which is two minutes unless
# said, and then for the scheduler, which looks every half minute unless said.
mkdir /run/munge /run/state /run/spool
cat >/run/slurm.conf <<CONF
ClusterName=launchers
SlurmctldHost=localhost
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool
ProctrackType=proctrack/pgid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmdParameters=config_overrides
KillWait=5
NodeName=localhost CPUs=8
PartitionName=all Nodes=localhost Default=YES
CONF
# Nothing here uses cgroups; before 24.05, cgroup/v1 is what leaves them alone.
case $(slurmctld -V) in
  *" 22."* | *" 23."*) echo CgroupPlugin=cgroup/v1 ;;
  *) echo CgroupPlugin=disabled ;;
esac >/run/cgroup.conf
(umask 077 && head -c 128 /dev/urandom >/run/munge/key)
munged --foreground --key-file=/run/munge/key --seed-file=/run/munge/seed \
  >/run/munged.log 2>&1 &
within 120 test -S /run/munge/munge.socket.2
slurmctld -D >/run/slurmctld.log 2>&1 &
slurmd -D >/run/slurmd.log 2>&1 &
idle() { [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ]; }
within 120 idle

trains() { grep -q "  loss " "train-$job.log" 2>/dev/null; }
ended() { [ -z "$(squeue --noheader --jobs="$job")" ]; }
finish() { # the job: in this state, after so many restarts
  within "$1" ended
  cat "train-$job.log"
  scontrol show job --oneliner "$job" | grep "JobState=$2 .*Restarts=$3 " >/dev/null ||
    fail "job $job is not $2 after $3 restarts"
  end
}

begin "Slurm"
job=$(sbatch --parsable --ntasks=2 job.sbatch --emulate 4 "${short[@]}")
finish $limit COMPLETED 0
begin "Slurm, restarted" "Slurm"
job=$(sbatch --parsable --ntasks=4 job.sbatch --emulate 2 "${short[@]}")
finish $limit COMPLETED 0

begin "Slurm, stopped and requeued"
slowly
job=$(sbatch --parsable --ntasks=2 job.sbatch --emulate 4 "${long[@]}")
within $limit trains
scancel --signal=TERM "$job"
within $limit grep -q "^stopped: " "train-$job.log"
finish $limit COMPLETED 1

# One process is killed, and the other hangs, so that it cannot end by itself: srun ends
# it, and the job goes back into the queue.
begin "Slurm, one process killed"
slowly
job=$(sbatch --parsable --ntasks=2 job.sbatch --emulate 4 "${long[@]}")
within $limit trains
task() { scontrol listpids "$job.0" | awk -v rank="$1" '$5 == rank { print $1 }'; }
kill -STOP "$(task 0)"
kill -KILL "$(task 1)"
finish $limit COMPLETED 1
