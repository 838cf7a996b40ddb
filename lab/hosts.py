"""Cause the faults that need a wire, and record what becomes of JAX.

Each of two hosts is a network namespace of this machine, with one process and one CPU
device in it; a veth pair is the wire between them. Both processes run
lab/hosts_worker.py until something breaks.

Each fault has a stage of its own: namespaces of processes, of mounts and of the
network, which go with the first process in them. So nothing is left, however this ends.
Needs Linux, root, iproute2 and nftables, which it installs on Debian and Ubuntu.
"""

import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import record
from hosts_worker import COORDINATOR, HEARTBEAT

WORKER = Path(__file__).with_name("hosts_worker.py")
PORT = COORDINATOR.partition(":")[2]
SETTLED = 35  # steps that both processes make before a fault
START = 120  # seconds that two processes may take until then
STAGE = "setpriv --pdeathsig KILL unshare --pid --fork --kill-child --mount-proc"
FOLDER = Path("/run")  # on a stage it is empty at first, and gone afterwards
# Gloo listens at the first address of the host's own name that the host has, and at
# 127.0.0.1 nobody else would reach it.
BUILD = """
mount -t tmpfs tmpfs /run
echo 127.0.0.1 localhost > /run/hosts
mount --bind /run/hosts /etc/hosts
ip netns add host0
ip netns add host1
ip link add wire netns host0 type veth peer name wire netns host1
for host in 0 1; do
  echo 192.0.2.$((host + 1)) $(uname -n) >> /run/hosts
  ip -n host$host address add 192.0.2.$((host + 1))/24 dev wire
  ip -n host$host link set wire up
  ip -n host$host link set lo up
done
"""

# ----------------------------------------------------------------------- the faults


class Fault(NamedTuple):
    """What breaks, when, and how the two processes are expected to end.

    `ends` says for each process that it "fails", is "killed", "leaves" (with status 0),
    "hangs" (makes no step more) or "goes on" until the watch is over. The clock starts
    with `cause`, a line of shell in which $0 and $1 are the processes, or, without one,
    when the first process notes the word `clock`.
    """

    name: str
    watch: float  # seconds
    ends: tuple[str, ...]
    cause: str = ""
    before: str = ""  # a line of shell, before the processes start
    clock: str = "initializing"
    slow: bool = False  # whether it is the steps that show it
    work: dict = {}  # settings of the processes


def drop(ports: str) -> str:
    """Drop TCP packets to these ports of host 0, and from these ports of host 0."""
    chain = "add chain inet fault input { type filter hook input priority 0; }"
    rule = f"add rule inet fault input iifname wire tcp $side {ports} drop"
    table = f'nft "add table inet fault; {chain}; {rule}"'
    first = f"side=dport; ip netns exec host0 {table}"
    return f"{first}; side=sport; ip netns exec host1 {table}"


DOWN, UP = "ip -n host1 link set wire down", "ip -n host1 link set wire up"
LIMIT = "rate 1mbit burst 32kbit latency 400ms"
OCCUPY = f"""
import socket, time
every = {{"family": socket.AF_INET6, "dualstack_ipv6": True}}
listening = socket.create_server(("::", {PORT}), **every)
print("listening", flush=True)
time.sleep(999)
"""
TAKE_PORT = f"""ip netns exec host0 {sys.executable} -c '{OCCUPY}' > /run/other &
until grep -qs listening /run/other; do sleep 0.1; done"""
SAVE = {"checkpoints": "/run/checkpoints"}
TEN = {"options": {"initialization_timeout": 10}}
ONE_MORE = {"options": {"shutdown_timeout_seconds": 15}, "steps": [35, 36]}
DEFAULT = {"options": {"heartbeat_timeout_seconds": 100}}
FAIL, GO_ON = ("fails", "fails"), ("goes on", "goes on")
HANG, LEAVE = ("fails", "hangs"), ("leaves", "leaves")
FAULTS = [
    Fault("process 1 killed", 40, ("fails", "killed"), "kill -KILL $1", work=SAVE),
    Fault("process 0 killed", 40, ("killed", "fails"), "kill -KILL $0", work=SAVE),
    Fault("process 1 stopped", 20, HANG, "kill -STOP $1", work=SAVE),
    Fault(
        "process 1 stopped, default heartbeat", 110, HANG, "kill -STOP $1", work=DEFAULT
    ),
    Fault("link down", 40, FAIL, DOWN),
    Fault("link down for 5 s", 15, GO_ON, f"{DOWN}; sleep 5; {UP}", slow=True),
    Fault("coordinator's port dropped", 40, FAIL, drop(PORT)),
    Fault(
        "only the coordinator's port open",
        200,
        FAIL,
        before=drop(f"!= {PORT}"),
        clock="initialized",
    ),
    Fault(
        "slow link",
        15,
        GO_ON,
        f"tc -n host0 qdisc add dev wire root tbf {LIMIT}",
        slow=True,
        work={"floats": 65_536},
    ),
    Fault("SIGTERM, nobody polls", 10, GO_ON, "kill -TERM $1"),
    Fault("SIGTERM, only Orbax polls", 3, GO_ON, "kill -TERM $1", work=SAVE),
    Fault("SIGTERM, both poll", 20, LEAVE, "kill -TERM $1", work=SAVE | {"poll": True}),
    Fault("one step more", 40, FAIL, clock="done", work=ONE_MORE),
    Fault("port in use", 40, FAIL, before=TAKE_PORT, work=TEN),
    Fault("process 1 never starts", 40, ("fails",), work=TEN),
]
BY_NAME = {fault.name: fault for fault in FAULTS}

# ---------------------------------------------------------------------- on the stage


def shell(script: str, *words: int) -> None:
    """Run a script, up to what fails; in it the words are $0 and $1."""
    command = ["sh", "-e", "-c", script, *map(str, words)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=START)


def start(process: int, settings: dict) -> subprocess.Popen:
    """Start one of the processes in its host; what it prints goes into a file."""
    command = ["ip", "netns", "exec", f"host{process}", sys.executable, WORKER]
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "TZ": "UTC"}
    env |= {"PATH": os.environ["PATH"]}
    with open(FOLDER / f"{process}.txt", "w") as out:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        words = json.dumps({"process": process} | settings)
        return subprocess.Popen([*command, words], env=env, **pipes)


def printed() -> list[str]:
    """What each process has printed so far."""
    return [path.read_text() for path in sorted(FOLDER.glob("?.txt"))]


def begin(fault: Fault, workers: list[subprocess.Popen]) -> float:
    """Wait until the clock starts, cause the fault, and return the time just before."""
    deadline = time.time() + START
    while time.time() < deadline:
        time.sleep(0.02)
        if not fault.cause:
            if begun := re.findall(rf"(?m)^(\S+) {fault.clock}$", "".join(printed())):
                return min(map(float, begun))
        elif all(len(STEP.findall(text)) > SETTLED for text in printed()):
            zero = time.time()
            shell(fault.cause, *(worker.pid for worker in workers))
            return zero
        elif any(worker.poll() is not None for worker in workers):
            break
    sys.exit("\n".join([*printed(), f"{fault.name}: they did not get so far"]))


def happen(fault: Fault) -> dict:
    """Let a fault happen between two fresh hosts, and return its timeline."""
    shell(BUILD)
    shell(fault.before)
    workers = [start(process, fault.work) for process in range(len(fault.ends))]
    zero = begin(fault, workers)
    ends = [None] * len(workers)
    while None in ends and time.time() < zero + fault.watch:
        time.sleep(0.01)
        for process, worker in enumerate(workers):
            if ends[process] is None and worker.poll() is not None:
                ends[process] = round(time.time() - zero, 1)
    found = timeline(fault, zero, printed())
    found |= {"end": ends, "status": [worker.returncode for worker in workers]}
    if fault.work.get("checkpoints"):  # one in the making has a name of another form
        names = [path.name for path in FOLDER.glob("checkpoints/*")]
        found["on_disk"] = sorted(int(name) for name in names if name.isdigit())
    if not shows(fault, found):
        sys.exit("\n".join([*printed(), f"{fault.name}: not so: {found}"]))
    return found


# --------------------------------------------------------------------- the timeline

STEP = re.compile(r"(?m)^(\d+\.\d+) step \d+ (\d+\.\d+)$")  # when, and how long it took
COMPLAINT = re.compile(r"(?m)^(\d+\.\d+) complaint (.*)$")
LOGGED = re.compile(  # a message, and the lines below it that belong to it
    r"(?m)^[EF](\d{4} \S+) +\d+ \S+\] (?:\[\d+\] )?(?!Polled an error|Failed to cancel)"
    r"(.*(?:\n(?!=== |\*\*\* |Traceback|[EFIW]\d{4} |\d+\.\d+ ).*)*)"
)
NOISE = re.compile(  # what differs from run to run, or says nothing
    r".*(absl::Status: |to all tasks: |with status: )|\[\S+\.cc:\d+\] |Id: \S+ |"
    r"\b(INTERNAL|UNAVAILABLE|UNKNOWN|DEADLINE_EXCEEDED): |"
    r"/[\w.]+\.CoordinationService/"
)


def plain(message: str) -> str:
    """A message without what differs from run to run, and no longer than a line."""
    message = NOISE.sub("", " ".join(message.split()))
    for host in (0, 1):
        message = re.sub(rf"\[?192\.0\.2\.{host + 1}\]?:\d+", f"host {host}", message)
    return textwrap.shorten(message, 72, placeholder=" ...")


def first_word(text: str, zero: float) -> tuple[float, str] | tuple[None, None]:
    """When, after time zero, a process first complained, and its words."""
    said = [(float(at), words) for at, words in COMPLAINT.findall(text)]
    for day, words in LOGGED.findall(text):
        day = f"{time.gmtime(zero).tm_year}{day}Z"
        at = datetime.strptime(day, "%Y%m%d %H:%M:%S.%f%z").timestamp()
        said.append((at, words))
    if not said:
        return None, None
    at, words = min(said)
    return round(at - zero, 1), plain(words)


def timeline(fault: Fault, zero: float, texts: list[str]) -> dict:
    """What the record keeps of what the processes printed: under each name a list with
    one entry for each process."""
    first = [first_word(text, zero) for text in texts]
    steps = [STEP.findall(text) for text in texts]
    before = [[float(took) for at, took in own if float(at) <= zero] for own in steps]
    after = [[float(took) for at, took in own if float(at) > zero] for own in steps]
    found = {
        "first_word": [at for at, words in first],
        "message": [words for at, words in first],
        "steps_after": [len(own) for own in after],
        "watched": fault.watch,
    }
    if fault.slow:
        found["step_before"] = [round(statistics.median(own), 4) for own in before]
        found["slowest_step"] = [round(max(own, default=0), 1) for own in after]
    if fault.work.get("checkpoints"):
        found["last_step"] = [len(own) - 1 for own in steps]
    return found


def ending(status: int | None, steps_after: int) -> str:
    """How a process ended, in a word of Fault.ends."""
    if status is None:
        return "goes on" if steps_after else "hangs"
    if status == -signal.SIGKILL:
        return "killed"
    return "fails" if status else "leaves"


def shows(fault: Fault, found: dict) -> bool:
    """Whether the processes end as they should, and only those that fail complain."""
    ends = [*map(ending, found["status"], found["steps_after"])]
    spoke = [message is not None for message in found["message"]]
    if fault.before and any(found["steps_after"]):
        return False
    return ends == [*fault.ends] and spoke == [end == "fails" for end in ends]


# ----------------------------------------------------------------------- the record


def measure(*names: str) -> Iterator[tuple[str, dict]]:
    """Cause these faults, or all, each on a stage of its own."""
    if not all(map(shutil.which, ["ip", "tc", "nft"])):
        install = "apt-get update && apt-get install --yes iproute2 nftables"
        subprocess.run(install, shell=True, check=True)
    for name in names or BY_NAME:
        stage = [*STAGE.split(), sys.executable, __file__, name]
        done = subprocess.run(stage, stdout=subprocess.PIPE, start_new_session=True)
        if done.returncode:
            sys.exit(f"{name}: see above")
        yield name, json.loads(done.stdout)


def files(part: str) -> list[str]:
    """What a fault measures: the program in the hosts."""
    return ["lab/hosts_worker.py"]


def same(kept: dict, found: dict) -> bool:
    """Whether both processes ended as before; seconds and words differ by chance."""
    return kept["status"] == found["status"]


def versions() -> dict[str, str]:
    """What the faults were measured with."""
    return record.installed("jax", "orbax-checkpoint") | {"Linux": platform.release()}


def cell(parts: dict[str, dict]) -> str:
    """The record as a cell of chapter 25."""

    def every(values: Iterable[str]) -> str:
        return " and ".join(sorted({*values}))

    about = {
        "date": every(part["recorded"] for part in parts.values()),
        "JAX": every(part["versions"]["jax"] for part in parts.values()),
        "heartbeat": HEARTBEAT,
    }
    found = {name: parts[name]["found"] for name in BY_NAME if name in parts}
    return f"{HEAD}RECORDED_ON = {about}\nRECORDED = {found}\n"


HEAD = """\
# @title Recorded faults
# Written by `nox -s lab -- hosts --record`, which causes each fault between two hosts
# with one process each. A list has one entry for each process; seconds count from the
# fault.
#   first_word, message   its first complaint: None, it said nothing
#   end, status           None: it still lived after as many seconds as watched says
#   on_disk               steps with a complete checkpoint; every 25th step starts one
"""


if __name__ == "__main__":  # as the first process on a stage
    json.dump(happen(BY_NAME[sys.argv[1]]), sys.stdout)
