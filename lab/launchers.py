"""Start launch/train.py as launchers do, and compare its losses: `nox -s launchers`.

Open MPI, Slurm and MUNGE come from the distribution. Slurm's daemons run on this
machine alone, on free ports and in a folder of their own: a Slurm or MUNGE that is
there already is not touched. Whatever was started is ended, also when a run fails or
this program is killed; only the packages stay.

`--sudo` becomes root by sudo, which must not ask; `--record` keeps the numbers.
"""

import ctypes
import importlib.metadata
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from record import record, text_digest
from pair import ROOT

LAUNCH = ROOT / "launch"
PACKAGES = {"mpirun": "openmpi-bin", "slurmctld": "slurm-wlm", "munged": "munge"}
# Sums are taken in another order on other devices: see tests/test_script.py.
RELATIVE, ABSOLUTE = 1e-4, 2e-6
SHORT = ["--steps", "48", "--save-every", "20", "--log-every", "8"]
LONG = ["--steps", "240", "--save-every", "200", "--log-every", "20"]
LIMIT = 240  # seconds for one run, of which a busy machine takes 60
SOON = 40  # seconds for a job to end of which one process was killed

# ------------------------------------------------------------------- the machine


def unfit() -> str:
    """Why this cannot run here, in words that say what to do; or nothing."""
    if sys.platform != "linux" or shutil.which("apt-get") is None:
        return "This needs Debian or Ubuntu, in a container for example: no apt-get."
    if os.geteuid() != 0:
        return "This needs root: nox -s launchers -- --sudo, or run it as root."
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        name = socket.gethostname()
        return f"The name of this machine has no address: add {name} to /etc/hosts."
    return ""


POLICY = Path("/usr/sbin/policy-rc.d")  # asked before a new package starts its daemons
NO_DAEMONS = (
    "#!/bin/sh\n# Written by lab/launchers.py for as long as it runs.\nexit 101\n"
)


def install_missing() -> None:
    """Install what is absent, and let no package start a daemon of its own."""
    missing = [name for program, name in PACKAGES.items() if not shutil.which(program)]
    if not missing:
        return
    print(f"Installing {', '.join(missing)}.", flush=True)
    if not POLICY.exists():
        POLICY.write_text(NO_DAEMONS)
        POLICY.chmod(0o755)
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    run_apt([*apt, "-o", "APT::Update::Error-Mode=any", "update"])
    run_apt([*apt, "install", "--yes", "--no-install-recommends", *missing])
    forget_policy()


def run_apt(command: list[str]) -> None:
    """Run apt-get, and show what it says if it fails."""
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{' '.join(command)} failed: no network?")


def forget_policy() -> None:
    """Let packages start their daemons again, if it was here that they were stopped."""
    if POLICY.exists() and POLICY.read_text() == NO_DAEMONS:
        POLICY.unlink()


# ----------------------------------------------------------- to leave nothing behind

libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent() -> None:
    """Ask for SIGTERM when the parent of this process is gone."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def parents(ended: bool) -> dict[int, int]:
    """The processes that have ended and whose parents do not know it yet, or those
    that live, each with its parent."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it is gone meanwhile
            continue
        if (state in "ZX") == ended:
            found[int(entry.parent.name)] = int(parent)
    return found


def descendants() -> set[int]:
    """The processes that come from this one: orphans too, once it adopts them."""
    above = parents(ended=False)
    found = {os.getpid()}
    while more := {pid for pid in above if above[pid] in found} - found:
        found |= more
    return found - {os.getpid()}


def end_all() -> None:
    """End all descendants: politely, then not, and again if one started another."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        until = time.monotonic() + patience
        told = set()
        while (alive := descendants()) and time.monotonic() < until:
            for pid in alive - told:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            told |= alive
            time.sleep(0.1)
            reap()


started: list[subprocess.Popen] = []  # all that this program has to wait for


def start(log: Path, *words: str, folder: Path, place: Path) -> subprocess.Popen:
    """Start a program whose output goes into a log."""
    with open(log, "w") as out:
        process = subprocess.Popen(
            words,
            cwd=place,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this program to hear
        )
    started.append(process)
    return process


def reap() -> None:
    """Let adopted processes vanish that have ended: Slurm waits until they have."""
    own = {process.pid for process in started}
    for pid, parent in parents(ended=True).items():
        if parent == os.getpid() and pid not in own:
            os.waitpid(pid, 0)


def leave(number: int, frame) -> None:
    """End this program as a signal asks, by way of every `finally`."""
    raise SystemExit(128 + number)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """End what was started inside, remove the folder, and fail if anything is left."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes a child of us
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in stops]
    try:
        yield
    finally:
        for number in stops:
            signal.signal(number, signal.SIG_IGN)
        end_all()
        shutil.rmtree(folder, ignore_errors=True)
        forget_policy()
        for number, handler in zip(stops, before):
            signal.signal(number, handler)
        left = [f"process {pid}" for pid in descendants()]
        left += [f"folder {folder}"] * folder.exists()
        mounts = Path("/proc/mounts").read_text().splitlines()
        left += [f"mount {line}" for line in mounts if str(folder) in line]
        if left:
            sys.exit(f"This is left behind: {', '.join(left)}")


def listening() -> dict[str, set[str]]:
    """Where descendants wait for connections: for each program, its addresses."""
    sockets = {}
    for pid in descendants():
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            files = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:  # it has ended meanwhile
            continue
        sockets |= {file: name for file in files if file.startswith("socket:")}
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            name = sockets.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and name:  # it listens
                found.setdefault(name, set()).add(fields[1].rpartition(":")[0])
    return found


LOCAL = "0100007F"  # 127.0.0.1, as /proc/net/tcp writes it


# ---------------------------------------------------------------------- the launchers


class Run(NamedTuple):
    """What a run has printed, and how long it took."""

    what: str
    processes: int
    devices: int  # of each process
    seconds: float
    said: str


def environment(folder: Path) -> dict[str, str]:
    """The environment of a run: this one, without what another launcher has left."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "OMPI_", "PMIX_", "JAX_"))
        and not name.lower().endswith("_proxy")
    }
    return kept | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "SLURM_CONF": str(folder / "slurm.conf"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def new_place(folder: Path, name: str, checkpoint: Path | None = None) -> Path:
    """A copy of launch/ to run in, with a checkpoint from another run to begin with."""
    place = folder / name
    shutil.copytree(LAUNCH, place, ignore=shutil.ignore_patterns("__pycache__"))
    if checkpoint:
        shutil.copytree(checkpoint, place / "checkpoints" / checkpoint.name)
    return place


def command(what: str, place: Path, *words: str, processes=1, devices=8) -> Run:
    """Run a command until it ends well."""
    begun = time.monotonic()
    log = place / "log"
    process = start(log, *words, folder=place.parent, place=place)
    wait_for(f"end of {what}", lambda: process.poll() is not None, LIMIT, [log])
    status = process.returncode
    said = log.read_text()
    if status != 0:
        sys.exit(f"{said}\n{what}: {' '.join(words)} ended with {status}")
    return Run(what, processes, devices, time.monotonic() - begun, said)


def ask(folder: Path, *words: str) -> str:
    """What a short command prints; it has to end well."""
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(folder), timeout=60
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{' '.join(words)} failed")
    return done.stdout.strip()


def wait_for(what: str, true: Callable[[], object], limit: float, logs: list[Path]):
    """Ask until it is true, and return the answer; at the limit, show the logs."""
    until = time.monotonic() + limit
    while not (answer := true()):
        if time.monotonic() > until:
            ends = [f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs]
            sys.exit("\n".join([*ends, f"no {what} in {limit:.0f} seconds"]))
        time.sleep(0.3)
        reap()
    return answer


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_job() -> int:
    """A number for the first job: of a job's number, JAX makes the port of process 0.

    Two Slurms that both begin with 1 would lead their jobs to one port.
    """
    while True:
        first = random.randrange(1, 4000)
        try:
            for number in range(first, first + 8):
                with socket.socket(socket.AF_INET) as probe:
                    probe.bind(("", 61440 + number))
            return first
        except OSError:  # somebody listens there
            continue


# One node, this machine, which says that it has eight processors. All daemons listen
# on 127.0.0.1. A job that goes back into the queue waits for a second longer than
# cred_expire, which is two minutes unless said, and then for the scheduler, which
# looks every half minute unless said.
SLURM_CONF = """
ClusterName=launchers
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP MaxTime=INFINITE
"""


def start_daemon(folder: Path, *words: str) -> Path:
    """Start a daemon in the foreground, so that it ends with us; return its log."""
    log = folder / f"{words[0]}.log"
    start(log, *words, folder=folder, place=folder)
    return log


def start_slurm(folder: Path) -> None:
    """Start MUNGE and Slurm's two daemons, and wait until the node is idle."""
    host = socket.gethostname().partition(".")[0]
    ports = [free_port(), free_port()]
    conf = SLURM_CONF.format(host=host, ports=ports, folder=folder, first=first_job())
    (folder / "slurm.conf").write_text(conf)
    version = ask(folder, "slurmctld", "-V").split()[-1]
    modern = tuple(map(int, version.split(".")[:2])) >= (24, 5)
    # Nothing here uses cgroups; before 24.05, cgroup/v1 is what leaves them alone.
    cgroups = "disabled" if modern else "cgroup/v1"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={cgroups}\n")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))

    files = {
        "socket": "socket",
        "key-file": "key",
        "pid-file": "pid",
        "seed-file": "seed",
    }
    options = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
    logs = [start_daemon(folder, "munged", "--foreground", *options)]
    socket_there = (folder / "munge.socket").exists
    wait_for("socket of MUNGE", socket_there, 30, logs)
    conf = str(folder / "slurm.conf")
    logs.append(start_daemon(folder, "slurmctld", "-D", "-f", conf))
    logs.append(start_daemon(folder, "slurmd", "-D", "-f", conf, "-N", host))

    def idle() -> bool:
        words = ["sinfo", "--noheader", "--format=%T"]
        env = environment(folder)
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        return done.stdout.strip() == "idle"

    wait_for("idle node", idle, 60, logs)
    found = listening()
    for name in ("slurmctld", "slurmd"):
        if found.get(name) != {LOCAL}:
            sys.exit(f"{name} listens at {found.get(name)}, not at 127.0.0.1 alone")


class Job(NamedTuple):
    """A job of Slurm."""

    number: str
    place: Path
    begun: float

    def log(self) -> str:
        path = self.place / f"train-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def field(self, name: str) -> str:
        """What Slurm says about the job, such as its JobState."""
        show = ["scontrol", "show", "job", "--oneliner", self.number]
        return re.search(rf"\b{name}=(\S+)", ask(self.place.parent, *show))[1]

    def wait_for_loss(self) -> None:
        """Wait until the job trains."""

        def trains() -> bool:
            if self.ended():
                sys.exit(f"{self.log()}\njob {self.number} has ended too soon")
            return "  loss " in self.log()

        wait_for(f"loss from job {self.number}", trains, LIMIT, self.logs())

    def ended(self) -> str:
        """The state in which the job has ended, or nothing."""
        state = self.field("JobState")
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        return "" if state.startswith(going) else state

    def wait(self, limit: float = LIMIT) -> str:
        """Wait until the job has ended, and return its state."""
        return wait_for(f"end of job {self.number}", self.ended, limit, self.logs())

    def logs(self) -> list[Path]:
        return [*self.place.glob("train-*.log"), *self.place.parent.glob("*d.log")]


def submit(place: Path, *words: str) -> Job:
    """Hand job.sbatch to Slurm, with options before it and after it."""
    begun = time.monotonic()
    number = ask(place.parent, "sbatch", "--parsable", f"--chdir={place}", *words)
    return Job(number, place, begun)


def finish(job: Job, what: str, processes: int, devices: int) -> Run:
    """Wait until a job has ended well."""
    state = job.wait()
    if state != "COMPLETED":
        sys.exit(f"{job.log()}\n{what}: job {job.number} ended as {state}")
    return Run(what, processes, devices, time.monotonic() - job.begun, job.log())


# ------------------------------------------------------------------------ the numbers


def numbers(said: str) -> dict[str, list[float]]:
    """What a run tells, by its line: a loss, or a test's loss and right answers."""
    line = r"^step +(\d+)  (loss|test loss) ([\d.]+)(?:, (\d+) of 261 right)?$"
    return {
        f"step {step} {kind}": [float(loss), *([int(right)] if right else [])]
        for step, kind, loss, right in re.findall(line, said, re.M)
    }


def differences(said: str, reference: str, restored: int = 0) -> list[str]:
    """Where a run that goes on after a step differs from the run that never stopped."""
    found, expected = numbers(said), numbers(reference)
    due = [name for name in expected if int(name.split()[1]) > restored]
    if restored and f"step {restored} test loss" in expected:
        due.append(f"step {restored} test loss")
    told = []
    for name in due:
        old, new = expected[name], found.get(name, [])
        close = len(new) == len(old) and all(
            abs(a - b) <= ABSOLUTE + RELATIVE * abs(b) for a, b in zip(new, old)
        )
        if not close or new[1:] != old[1:]:
            told.append(f"{name}: {new or 'no such line'}, one process has {old}")
    if restored and f"step {restored:5}  restored\n" not in said:
        told.append(f"it did not go on after step {restored}")
    if not due:
        told.append("there is nothing to compare")
    return told


def compare(run: Run, reference: Run, restored: int = 0) -> Run:
    """Return the run, if its numbers are those of the reference."""
    if told := differences(run.said, reference.said, restored):
        words = "\n".join(told)
        sys.exit(f"{run.said}\n{run.what} differs from one process:\n{words}")
    print(f"{run.what}: {run.seconds:.0f} s", flush=True)
    return run


# --------------------------------------------------------------------------- the runs


def one_process(folder: Path, what: str, options: list[str]) -> Run:
    """The numbers that all others are compared with."""
    words = ["python", "train.py", "--emulate", "8", *options]
    run = command(what, new_place(folder, what.replace(" ", "-")), *words)
    return compare(run, run)


def with_mpirun(folder: Path, whole: Run) -> list[Run]:
    """Two processes, then four that go on from their checkpoint of step 20."""
    place = new_place(folder, "mpirun-2x4")
    start = ["sh", "mpirun.sh"]
    two = command(
        "Open MPI", place, *start, "2", "--emulate", "4", *SHORT, processes=2, devices=4
    )
    compare(two, whole)
    place = new_place(folder, "mpirun-4x2", place / "checkpoints/20")
    four = command(
        "Open MPI, restarted",
        place,
        *start,
        "4",
        "--emulate",
        "2",
        *SHORT,
        processes=4,
        devices=2,
    )
    return [two, compare(four, whole, restored=20)]


def with_slurm(folder: Path, whole: Run) -> list[Run]:
    """The same by jobs of Slurm."""
    place = new_place(folder, "slurm-2x4")
    job = submit(place, "job.sbatch", "--emulate", "4", *SHORT)
    two = compare(finish(job, "Slurm", 2, 4), whole)
    place = new_place(folder, "slurm-4x2", place / "checkpoints/20")
    job = submit(place, "--ntasks=4", "job.sbatch", "--emulate", "2", *SHORT)
    four = finish(job, "Slurm, restarted", 4, 2)
    return [two, compare(four, whole, restored=20)]


def stopped(folder: Path, whole: Run) -> Run:
    """A job that gets SIGTERM half-way, saves, and goes on from the queue."""
    place = new_place(folder, "slurm-stopped")
    job = submit(place, "job.sbatch", "--emulate", "4", *LONG)
    job.wait_for_loss()
    ask(folder, "scancel", "--signal=TERM", job.number)
    run = finish(job, "Slurm, stopped and requeued", 2, 4)
    stops = re.findall(r"^stopped: .* after step (\d+)$", run.said, re.M)
    if len(stops) != 1 or job.field("Restarts") != "1":
        sys.exit(f"{run.said}\nit stopped after {stops}, not once")
    if f"step {int(stops[0]):5}  restored\n" not in run.said:
        sys.exit(f"{run.said}\nit did not go on after step {stops[0]}")
    return compare(run, whole)


def killed(folder: Path) -> float:
    """How long a job lives on when one of its processes is killed; it has to fail.

    The other process is made to hang, so that it cannot end by itself.
    """
    place = new_place(folder, "slurm-killed")
    job = submit(place, "job.sbatch", "--emulate", "4", *LONG)
    job.wait_for_loss()
    [hangs] = [pid for pid in descendants() if is_task(pid, "0")]
    [victim] = [pid for pid in descendants() if is_task(pid, "1")]
    os.kill(hangs, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    state = job.wait(SOON)
    if state != "FAILED" or job.field("Restarts") != "0":
        sys.exit(f"{job.log()}\na process was killed, and the job ended as {state}")
    seconds = time.monotonic() - begun
    print(f"Slurm, one process killed: {state} after {seconds:.0f} s", flush=True)
    return seconds


def is_task(pid: int, number: str) -> bool:
    """Whether a process is the Python of this task of a job."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return False
    return b"train.py" in words[1:2] and f"SLURM_PROCID={number}".encode() in env


def work(folder: Path) -> None:
    """Install, run everything, and print a table; the first fault ends it."""
    install_missing()
    short = one_process(folder, "one process", SHORT)
    long = one_process(folder, "one process, longer", LONG)
    runs = [short, *with_mpirun(folder, short)]
    start_slurm(folder)
    runs += with_slurm(folder, short)
    runs += [long, stopped(folder, long)]
    survived = killed(folder)
    versions = {
        "Open MPI": ask(folder, "mpirun", "--version").splitlines()[0].split()[-1],
        "Slurm": ask(folder, "slurmctld", "-V").split()[-1],
        "JAX": importlib.metadata.version("jax"),
        "Python": platform.python_version(),
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
    }
    rows = [
        {
            "what": run.what,
            "processes": run.processes,
            "devices": run.devices,
            "seconds": round(run.seconds, 1),
            "loss": [*numbers(run.said).values()][-1][0],
        }
        for run in runs
    ]
    print("\n" + ", ".join(f"{name} {value}" for name, value in versions.items()))
    print(f"{'':30} processes x devices  seconds  last test loss")
    for row in rows:
        print(
            f"{row['what']:30} {row['processes']:9} x {row['devices']}"
            f" {row['seconds']:16.1f}  {row['loss']:.6f}"
        )
    if "--record" in sys.argv:
        script = text_digest(ROOT / "launch/train.py")
        killed_after = {"seconds to end when one is killed": round(survived)}
        record("launchers", {**versions, "script": script, "runs": rows} | killed_after)


def main() -> int:
    """Let a second process do the work, and clean up after it however it ends."""
    if "--sudo" in sys.argv:
        words = [word for word in sys.argv[1:] if word != "--sudo"]
        path = f"PATH={os.environ['PATH']}"
        sudo = ["sudo", "--non-interactive", "--preserve-env", "env", path]
        os.execvp("sudo", [*sudo, sys.executable, __file__, *words])
    if complaint := unfit():
        sys.exit(complaint)
    if "--work" in sys.argv:
        folder = Path(os.environ["LAUNCHERS_FOLDER"])
        with nothing_left(folder):
            end_with_parent()
            work(folder)
        return 0
    end_with_parent()
    folder = Path(tempfile.mkdtemp(prefix="launchers-"))
    folder.chmod(0o711)  # MUNGE asks for this; the key has a mode of its own
    with nothing_left(folder):
        env = os.environ | {"LAUNCHERS_FOLDER": str(folder)}
        words = [sys.executable, __file__, "--work", *sys.argv[1:]]
        status = subprocess.Popen(words, env=env).wait()
    if status == 0:
        print("Nothing is left running. The packages stay installed.")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
