#!/bin/bash
# Start launch/train.py alone, with Open MPI and with Slurm, and print its output:
#
#     bash lab/launchers.sh
#
# It needs Debian or Ubuntu, root with the right to create namespaces (in a container:
# docker run --privileged), and a python with the book's packages on the PATH. It
# installs Open MPI, Slurm and MUNGE if they are missing. Everything else runs in
# namespaces that end with this script: processes, daemons, ports, mounts and files.
set -euo pipefail
PATH=$PATH:/usr/sbin

install_missing() (
  type mpirun slurmctld munged ip >/dev/null 2>&1 && exit
  policy=/usr/sbin/policy-rc.d # status 101: new packages must not start their daemons
  if [ ! -e "$policy" ]; then
    trap 'rm "$policy"' EXIT
    install -m 755 <(printf '#!/bin/sh\nexit 101\n') "$policy"
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  apt-get -qq -o DPkg::Lock::Timeout=120 install --yes --no-install-recommends \
    openmpi-bin slurm-wlm munge iproute2
)

if [ "${1:-}" != inside ]; then
  install_missing >&2
  # When this script ends, unshare ends too, and with it the first process inside; the
  # kernel then ends all other processes of the namespace.
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
# Open MPI and Slurm need an interface other than lo; neither interface leads outside.
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

begin() { # NAME [RUN]: begin a run in a copy of launch/, perhaps from step 20 of RUN
  name=$1
  mkdir -p "/run/$name/checkpoints"
  cd "/run/$name"
  cp "$launch"/*.* .
  [ -z "${2:-}" ] || cp -r "/run/$2/checkpoints/20" checkpoints
  SECONDS=0
}

slowly() { # make each step of the run longer, so that signals arrive before the last
  printf '%s\n' 'original = set_deadline' \
    'set_deadline = lambda *args: original(*args) or time.sleep(0.05)' >>lifecycle.py
}

end() { # print the end of the run, which lab/launchers.py reads
  echo "== $name: $SECONDS s"
}

fail() {
  echo "$name: $*" >&2
  exit 1
}

within() { # SECONDS COMMAND...: wait until the command succeeds
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

# Send SIGTERM to mpirun.sh itself; in the next run, kill one of its processes.
begin "Open MPI, stopped"
slowly
sh mpirun.sh 2 --emulate 4 "${long[@]}" >log 2>&1 &
within $limit grep -q "  loss " log
kill -TERM $!
wait $! && fail "mpirun.sh did not stop"
timeout $limit sh mpirun.sh 2 --emulate 4 "${long[@]}" >>log 2>&1
cat log
end
begin "Open MPI, one process killed"
slowly
sh mpirun.sh 2 --emulate 4 "${long[@]}" >log 2>&1 &
within $limit grep -q "  loss " log
pkill -KILL -n -f "^python.* --distributed "
wait $!
grep -q "^mpirun.sh: restarting after exit status " log || fail "no second start"
cat log
end

# One node, this machine, configured with eight processors. A requeued job waits one
# second longer than cred_expire (default: two minutes), and then for the next run of
# the scheduler (default: every half minute).
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
# Nothing here uses cgroups; before 24.05, the plugin cgroup/v1 does not touch them.
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
finish() { # SECONDS STATE RESTARTS: wait for the job and check how it ended
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

# Kill one process and suspend the other, which then cannot end by itself: srun ends it,
# and the job is requeued.
begin "Slurm, one process killed"
slowly
job=$(sbatch --parsable --ntasks=2 job.sbatch --emulate 4 "${long[@]}")
within $limit trains
task() { scontrol listpids "$job.0" | awk -v rank="$1" '$5 == rank { print $1 }'; }
kill -STOP "$(task 0)"
kill -KILL "$(task 1)"
finish $limit COMPLETED 1
