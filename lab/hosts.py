"""Cause the faults that need a wire, and record what becomes of JAX: `nox -s hosts`.

Each of two hosts is a network namespace of this machine, with one process and one CPU
device in it; a veth pair is the wire between them. Both processes all-reduce every
50 ms until something breaks. The record, book/cells/recorded_hosts.py, is a cell of
chapter 25. Needs Linux, root, iproute2 and nftables.
"""

import argparse
import contextlib
import ctypes
import datetime
import importlib.metadata
import json
import math
import operator
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "book/cells/recorded_hosts.py"
ETC = Path("/etc/netns")  # `ip netns exec NAME` shows NAME/hosts in it as /etc/hosts
PREFIX = "parallel-jax"  # of a name; its owner and a number or the like follow
OWN = re.compile(rf"{PREFIX}-(\d+)-\w+")
ADDRESSES = "192.0.2.1", "192.0.2.2"  # of a range that is nobody's
PORT = 47000  # the coordinator's, inside its namespace, where nobody else can have it
WIRE = "wire"  # the interface of either host
HEARTBEAT = 10  # seconds; the default is 100
PAUSE = 0.05  # seconds between two all-reduces
SETTLED = 35  # steps that both processes make before a fault
EVERY = 25  # steps from one checkpoint to the next
START = 120  # seconds that two processes may take until then
NOT_PASSED_ON = re.compile(r"(?i)XLA_.*|JAX_.*|.*_proxy")  # settings of who runs this


# ------------------------------------------------------------------ inside a host


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent is gone already")


def work(
    process: int,
    diary: str,
    options: dict,
    steps: int,
    floats: int,
    poll: bool,
    checkpoints: str | None,
) -> None:
    """Be one of two processes: all-reduce f32[floats] until something stops it."""
    own = open(diary, "a")

    def note(word: str, *rest: object) -> None:
        print(f"{time.monotonic():.3f}", word, *rest, file=own, flush=True)

    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    manager = None
    try:
        note("initializing")
        jax.distributed.initialize(f"{ADDRESSES[0]}:{PORT}", 2, process, **options)
        note("initialized")
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = NamedSharding(mesh, P("x"))
        whole = NamedSharding(mesh, P())
        mine = jnp.ones((1, floats), jnp.float32)
        x = jax.make_array_from_process_local_data(rows, mine)
        all_reduce = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)
        if checkpoints:
            import orbax.checkpoint as ocp

            often = ocp.CheckpointManagerOptions(save_interval_steps=EVERY)
            manager = ocp.CheckpointManager(checkpoints, options=often)
        for step in range(steps):
            begun = time.monotonic()
            total = all_reduce(x)
            total.block_until_ready()
            note("step", step, f"{time.monotonic() - begun:.4f}")
            if manager:  # it saves every 25th step, and at the sync point
                manager.save(step, args=ocp.args.StandardSave({"total": total}))
            if poll and multihost_utils.reached_preemption_sync_point(step):
                break
            time.sleep(PAUSE)
        if manager:
            manager.close()  # waits until all is written
        note("done")
    except Exception as error:
        note("complaint", f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise


def occupy() -> None:
    """Listen on the coordinator's port, so that the coordinator cannot."""
    every = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    with socket.create_server(("::", PORT), **every):
        print("listening", flush=True)
        signal.pause()


# ------------------------------------------------------------------- the two hosts


def run(*command: str) -> str:
    """Run a command and return what it printed; the error says what failed."""
    done = subprocess.run(
        command, capture_output=True, text=True, start_new_session=True
    )  # in a session of its own, Ctrl-C does not reach it
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """The names of all namespaces that this tool made, by whichever run."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    return [name for name in names if OWN.fullmatch(name)]


def remove(name: str) -> None:
    """Remove a namespace and what is in it: its processes, its wire, its hosts file."""
    if name in namespaces():
        while inside := run("ip", "netns", "pids", name).split():
            for pid in inside:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has ended meanwhile
            time.sleep(0.02)
        run("ip", "netns", "delete", name)
    shutil.rmtree(ETC / name, ignore_errors=True)
    if ETC.exists() and not any(ETC.iterdir()):
        ETC.rmdir()


def remove_leftovers() -> None:
    """Remove what runs left that were killed: their namespaces and folders."""
    temporary = Path(tempfile.gettempdir())
    folders = [*ETC.glob(f"{PREFIX}-*"), *temporary.glob(f"{PREFIX}-*")]
    names = {*namespaces(), *(path.name for path in folders)}
    for name in filter(OWN.fullmatch, sorted(names)):
        owner = OWN.fullmatch(name)[1]
        if not Path("/proc", owner).exists():
            print(f"removing {name}, whose owner is gone", flush=True)
            remove(name)
            shutil.rmtree(temporary / name, ignore_errors=True)


class Hosts:
    """Two namespaces, the wire between them, and the processes in them; `with` undoes
    all of it, whatever happens."""

    def __init__(self) -> None:
        self.names = [f"{PREFIX}-{os.getpid()}-{host}" for host in (0, 1)]
        self.started = []  # all processes
        self.workers = []  # of them, those that run JAX, by their number

    def __enter__(self) -> "Hosts":
        try:
            self.build()
        except BaseException:
            self.undo()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def build(self) -> None:
        """Make the namespaces and the wire, and give each host its name's address.

        Gloo listens where the host's own name leads, so that must not be 127.0.0.1.
        """
        for name, address in zip(self.names, ADDRESSES, strict=True):
            folder = ETC / name
            folder.mkdir(parents=True)
            names = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            Path(folder, "hosts").write_text(names)
            run("ip", "netns", "add", name)
        first, second = self.names
        link = ["ip", "link", "add", WIRE, "netns", first, "type", "veth"]
        run(*link, "peer", "name", WIRE, "netns", second)
        for host, address in enumerate(ADDRESSES):
            self.ip(host, "address", "add", f"{address}/24", "dev", WIRE)
            self.ip(host, "link", "set", WIRE, "up")
            self.ip(host, "link", "set", "lo", "up")

    def ip(self, host: int, *command: str) -> None:
        """Run ip for one of the hosts."""
        run("ip", "-n", self.names[host], *command)

    def inside(self, host: int, *command: str) -> None:
        """Run another command in one of the hosts."""
        run("ip", "netns", "exec", self.names[host], *command)

    def start(self, host: int, python: str, role: str, **settings: object) -> "Watched":
        """Start this file in one of the hosts, as a worker or what else has a role."""
        env = {k: v for k, v in os.environ.items() if not NOT_PASSED_ON.fullmatch(k)}
        env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NO_COLOR": "1"}
        env |= {"ROLE": role, "PARENT": str(os.getpid())}
        env |= {"SETTINGS": json.dumps(settings)}
        command = ["ip", "netns", "exec", self.names[host], python, __file__]
        watched = Watched(command, env)
        self.started.append(watched)
        return watched

    def undo(self) -> None:
        """End the processes, remove the namespaces, and make sure that all is gone;
        what one step cannot undo keeps no other from it."""
        with contextlib.ExitStack() as steps:  # from the last to the first
            steps.callback(self.expect_nothing)
            for name in self.names:
                steps.callback(remove, name)
            for watched in self.started:
                steps.callback(watched.end)

    def expect_nothing(self) -> None:
        """Complain of what is left."""
        left = [name for name in self.names if name in namespaces()]
        left += [str(ETC / name) for name in self.names if Path(ETC, name).exists()]
        left += [w.process.pid for w in self.started if w.process.poll() is None]
        if left:
            raise RuntimeError(f"left behind: {left}")


class Watched:
    """A running process: the lines that it prints, each with the time it came."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pipes |= {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
        self.process = subprocess.Popen(
            command, env=env, start_new_session=True, **pipes
        )
        self.output = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.output.append((time.monotonic(), line.rstrip()))

    def end(self) -> None:
        """Kill the process if it runs, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


# ----------------------------------------------------------------------- the faults


class Fault(NamedTuple):
    """What breaks, when, and how the two processes are expected to end.

    `ends` says for each process that it "fails", is "killed", "leaves" (with status 0),
    "hangs" (makes no step more) or "goes on" until the watch is over. The clock starts
    with `cause` or, without one, when the first process notes the word `clock`.
    """

    name: str
    ends: tuple[str, ...]
    watch: float  # seconds
    cause: Callable[[Hosts], object] | None = None
    clock: str = "initializing"
    before: Callable[[Hosts], object] | None = None  # before the processes start
    mend: Callable[[Hosts], object] | None = None  # 5 seconds after the cause
    options: dict = {}  # of jax.distributed.initialize
    steps: tuple[int, int] = (100_000, 100_000)
    floats: int = 256
    poll: bool = False
    save: bool = False
    slower: float = 0  # how many times slower the slowest step must be


def send(process: int, number: signal.Signals) -> Callable[[Hosts], None]:
    """A cause: send a signal to a process."""
    return lambda hosts: hosts.workers[process].process.send_signal(number)


def link(state: str) -> Callable[[Hosts], None]:
    """A cause: set host 1's end of the wire up or down."""
    return lambda hosts: hosts.ip(1, "link", "set", WIRE, state)


def slow_down(hosts: Hosts) -> None:
    """A cause: let host 0 send 1 Mbit/s at most."""
    rate = "rate 1mbit burst 32kbit latency 400ms".split()
    hosts.inside(0, "tc", "qdisc", "add", "dev", WIRE, "root", "tbf", *rate)


def drop(hosts: Hosts, host: int, what: str) -> None:
    """Drop TCP packets that reach a host over the wire."""
    hook = "{ type filter hook input priority 0; }"
    rule = f"add rule inet fault input iifname {WIRE} {what} drop"
    table = f"add table inet fault; add chain inet fault input {hook}; {rule}"
    hosts.inside(host, "nft", table)


def drop_coordinator(hosts: Hosts) -> None:
    """A cause: drop what goes to and comes from the coordinator's port."""
    drop(hosts, 0, f"tcp dport {PORT}")
    drop(hosts, 1, f"tcp sport {PORT}")


def open_coordinator_only(hosts: Hosts) -> None:
    """A cause: drop all between the hosts but the coordinator's connections."""
    drop(hosts, 0, f"tcp dport != {PORT}")
    drop(hosts, 1, f"tcp sport != {PORT}")


def take_port(hosts: Hosts) -> None:
    """A cause: have another program listen on the coordinator's port."""
    other = hosts.start(0, sys.executable, "occupy")
    deadline = time.monotonic() + START
    while not other.output and time.monotonic() < deadline:
        time.sleep(0.02)
    if [line for _, line in other.output] != ["listening"]:
        raise RuntimeError(f"the port was not taken: {other.output}")


DEFAULT = {"heartbeat_timeout_seconds": 100}
TEN = {"initialization_timeout": 10}
FIFTEEN = {"shutdown_timeout_seconds": 15}
ONE_MORE = SETTLED, SETTLED + 1
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
BOTH_FAIL, BOTH_GO_ON = ("fails", "fails"), ("goes on", "goes on")
FAULTS = [
    Fault("process 1 killed", ("fails", "killed"), 40, send(1, KILL), save=True),
    Fault("process 0 killed", ("killed", "fails"), 40, send(0, KILL), save=True),
    Fault("process 1 stopped", ("fails", "hangs"), 20, send(1, STOP), save=True),
    Fault(
        "process 1 stopped, default heartbeat",
        ("fails", "hangs"),
        110,
        send(1, STOP),
        options=DEFAULT,
    ),
    Fault("link down", BOTH_FAIL, 40, link("down")),
    Fault(
        "link down for 5 s",
        BOTH_GO_ON,
        15,
        link("down"),
        mend=link("up"),
        slower=50,
    ),
    Fault("coordinator's port dropped", BOTH_FAIL, 40, drop_coordinator),
    Fault(
        "only the coordinator's port open",
        BOTH_FAIL,
        200,
        clock="initialized",
        before=open_coordinator_only,
    ),
    Fault("slow link", BOTH_GO_ON, 15, slow_down, floats=65_536, slower=50),
    Fault("SIGTERM, nobody polls", BOTH_GO_ON, 10, send(1, TERM)),
    Fault("SIGTERM, only Orbax polls", BOTH_GO_ON, 3, send(1, TERM), save=True),
    Fault(
        "SIGTERM, both poll",
        ("leaves", "leaves"),
        20,
        send(1, TERM),
        poll=True,
        save=True,
    ),
    Fault(
        "one step more",
        BOTH_FAIL,
        40,
        clock="done",
        options=FIFTEEN,
        steps=ONE_MORE,
    ),
    Fault("port in use", BOTH_FAIL, 40, before=take_port, options=TEN),
    Fault("process 1 never starts", ("fails",), 40, options=TEN),
]


class Note(NamedTuple):
    """A line of a process's diary."""

    time: float
    word: str
    rest: str


def read(diary: Path) -> list[Note]:
    """What a process has written into its diary, in whole lines."""
    text = diary.read_text() if diary.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    notes = [line.split(" ", 2) for line in whole]
    return [Note(float(note[0]), note[1], "".join(note[2:])) for note in notes]


def times(notes: list[Note], word: str) -> list[float]:
    """When a process wrote this word."""
    return [note.time for note in notes if note.word == word]


def begin(fault: Fault, hosts: Hosts, diaries: list[Path]) -> float:
    """Wait until the clock starts, cause the fault, and return the time just before."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        time.sleep(0.02)
        notes = [read(diary) for diary in diaries]
        if fault.cause is None:
            if begun := [at for own in notes for at in times(own, fault.clock)]:
                return min(begun)
        elif all(len(times(own, "step")) > SETTLED for own in notes):
            begun = time.monotonic()
            fault.cause(hosts)
            return begun
        if any(worker.process.poll() is not None for worker in hosts.workers):
            break
    last = [[line for _, line in w.output[-5:]] for w in hosts.workers]
    raise RuntimeError(f"{fault.name}: the processes did not get so far: {last}")


def happen(fault: Fault, python: str, folder: Path) -> list["Seen"]:
    """Let one fault happen between a fresh pair of hosts; what was seen of either
    process."""
    diaries = [folder / f"{process}.txt" for process in range(len(fault.ends))]
    with Hosts() as hosts:
        if fault.before:
            fault.before(hosts)
        for process, diary in enumerate(diaries):
            settings = {
                "process": process,
                "diary": str(diary),
                "options": {"heartbeat_timeout_seconds": HEARTBEAT} | fault.options,
                "steps": fault.steps[process],
                "floats": fault.floats,
                "poll": fault.poll,
                "checkpoints": str(folder / "checkpoints") if fault.save else None,
            }
            hosts.workers.append(hosts.start(process, python, "work", **settings))
        zero = begin(fault, hosts, diaries)
        ends = [None] * len(diaries)
        mend = fault.mend
        while None in ends and time.monotonic() < zero + fault.watch:
            time.sleep(0.01)
            if mend and time.monotonic() > zero + 5:
                mend(hosts)
                mend = None
            for process, worker in enumerate(hosts.workers):
                if ends[process] is None and worker.process.poll() is not None:
                    ends[process] = time.monotonic() - zero
        statuses = [worker.process.poll() for worker in hosts.workers]
        over = time.monotonic()
        outputs = [worker.output for worker in hosts.workers]
    seen = []
    for end, status, output, diary in zip(ends, statuses, outputs, diaries):
        # What a process does that still lives by now is no longer due to the fault.
        until = over if status is None else math.inf
        notes = [note for note in read(diary) if note.time <= until]
        lines = [(at, line) for at, line in output if at <= until]
        seen.append(Seen(zero, end, status, lines, notes))
    return seen


def committed(folder: Path) -> list[int]:
    """The steps of which a checkpoint is complete; one in the making has a name of
    another form."""
    return sorted(
        int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdigit()
    )


# --------------------------------------------------------------------- the timeline


class Seen(NamedTuple):
    """What was seen of one process: when the fault came, seconds until its end or None,
    its exit status or None, the lines that it printed with their times, its diary."""

    zero: float
    end: float | None
    status: int | None
    output: list[tuple[float, str]]
    notes: list[Note]


LOGGED = re.compile(r"([EF])\d{4} \S+ +\d+ \S+\] (?:\[\d+\] )?(.*)")
EMPTY = re.compile("Polled an error|Failed to cancel")  # says nothing of the fault
LAST = re.compile(r"=== |\*\*\* |Traceback|[EFIW]\d{4} ")  # what is below a message
PLAIN = [  # what differs from run to run, and what stands in its place
    (re.compile(r".*(absl::Status: |to all tasks: |with status: )"), ""),  # preambles
    (re.compile(r"\[\S+\.cc:\d+\] "), ""),
    (re.compile(r"\b(INTERNAL|UNAVAILABLE|UNKNOWN|DEADLINE_EXCEEDED): "), ""),
    (re.compile(r"/[\w.]+\.CoordinationService/"), ""),
    (re.compile(rf"\[?{re.escape(ADDRESSES[0])}\]?:\d+"), "host 0"),
    (re.compile(rf"\[?{re.escape(ADDRESSES[1])}\]?:\d+"), "host 1"),
    (re.compile(r"\[::\]:\d+"), "the port"),
    (re.compile(r"Id: \S+ "), ""),
    (re.compile(r"\s+"), " "),
]
LONGEST = 72  # characters of a message


def plain(message: str) -> str:
    """A message without what differs from run to run, and no longer than a line."""
    for pattern, word in PLAIN:
        message = pattern.sub(word, message)
    return textwrap.shorten(message, LONGEST, placeholder=" ...")


def complaints(seen: Seen) -> list[tuple[float, str, bool]]:
    """What a process said of the fault: when, its words, whether it aborted by them."""
    said = [
        (note.time, plain(note.rest), False)
        for note in seen.notes
        if note.word == "complaint"
    ]
    for i, (at, line) in enumerate(seen.output):
        logged = LOGGED.match(line)
        if logged is None or EMPTY.match(logged[2]):
            continue
        words = [logged[2]]
        for _, more in seen.output[i + 1 :]:
            if LAST.match(more):
                break
            words.append(more)
        said.append((at, plain(" ".join(words)), logged[1] == "F"))
    return sorted(said, key=operator.itemgetter(0))


def steps(seen: Seen, after: bool) -> list[float]:
    """Seconds that each step took, of those made before or after the fault."""
    return [
        float(note.rest.split()[1])
        for note in seen.notes
        if note.word == "step" and (note.time > seen.zero) == after
    ]


def timeline(fault: Fault, both: list[Seen], saved: list[int]) -> dict:
    """What the record keeps of a fault: under each name a list with one entry for each
    process."""
    said = [complaints(seen) for seen in both]
    first = [own[0] if own else None for own in said]
    aborts = [next((word for word in own if word[2]), None) for own in said]
    tenth = [None if seen.end is None else round(seen.end, 1) for seen in both]
    found = {
        "first_word": [
            None if word is None else round(word[0] - seen.zero, 1)
            for word, seen in zip(first, both, strict=True)
        ],
        "message": [None if word is None else word[1] for word in first],
        "end": tenth,
        "status": [seen.status for seen in both],
        "steps_after": [len(steps(seen, after=True)) for seen in both],
        "watched": fault.watch,
    }
    if any(abort and abort[0] > word[0] + 1 for abort, word in zip(aborts, first)):
        found["abort"] = [None if abort is None else abort[1] for abort in aborts]
    if fault.slower:
        found["step_before"] = [
            round(statistics.median(steps(seen, after=False)), 4) for seen in both
        ]
        found["slowest_step"] = [
            round(max(steps(seen, after=True), default=0), 1) for seen in both
        ]
    if fault.save:
        found["last_step"] = [len(times(seen.notes, "step")) - 1 for seen in both]
        found["on_disk"] = saved
    return found


def ending(found: dict, process: int) -> str:
    """How a process ended, in a word of Fault.ends."""
    status, after = found["status"][process], found["steps_after"][process]
    if status is None:
        return "goes on" if after else "hangs"
    if status == -signal.SIGKILL:
        return "killed"
    return "fails" if status else "leaves"


def contradictions(fault: Fault, found: dict) -> list[str]:
    """In what the fault did not show as it should have."""
    wrong = []
    for process, expected in enumerate(fault.ends):
        who = f"{fault.name}: process {process}"
        if (seen := ending(found, process)) != expected:
            wrong.append(f"{who} {seen}, and was expected otherwise ({expected})")
        if expected == "fails" and found["message"][process] is None:
            wrong.append(f"{who} said nothing that was understood")
        if expected in ("goes on", "hangs", "killed") and found["message"][process]:
            wrong.append(f"{who} complained: {found['message'][process]}")
        if fault.before and found["steps_after"][process]:
            wrong.append(f"{who} made steps")
        if fault.slower:
            before, after = (found[k][process] for k in ("step_before", "slowest_step"))
            if after < fault.slower * before:
                wrong.append(f"{who} was not slowed down: {before} s, {after} s")
    if fault.save and not found["on_disk"]:
        wrong.append(f"{fault.name}: nothing was saved")
    return wrong


# ----------------------------------------------------------------------- the record


def literal(value: object) -> str:
    """A value as Python on one line, with the quotes that ruff gives it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return repr(value)


def written(name: str, value: object, indent: int) -> list[str]:
    """An entry of a dictionary in the lines that ruff gives it."""
    space = " " * indent
    if isinstance(value, dict):
        entries = [
            line for key in value for line in written(key, value[key], indent + 4)
        ]
        return [f"{space}{literal(name)}: {{", *entries, f"{space}}},"]
    flat = f"{space}{literal(name)}: {literal(value)},"
    if len(flat) <= 88:
        return [flat]
    entries = [f"{space}    {literal(entry)}," for entry in value]
    return [f"{space}{literal(name)}: [", *entries, f"{space}],"]


def cell(where: dict[str, object], found: dict[str, dict]) -> str:
    """The record as a cell of a notebook."""
    lines = HEAD.splitlines()
    for name, value in ("RECORDED_ON", where), ("RECORDED", found):
        entries = [line for key in value for line in written(key, value[key], 4)]
        lines += [f"{name} = {{", *entries, "}"]
    return "\n".join(lines) + "\n"


HEAD = """\
# @title Recorded faults
# Written by `nox -s hosts`, which causes each fault between two hosts with one process
# each. A list has one entry for each process; seconds count from the fault.
#   first_word, message   its first complaint: None, it said nothing
#   end, status           None: it still lived after as many seconds as watched says
#   abort                 the words it ended with, where they came later
#   on_disk               steps with a complete checkpoint; every 25th step starts one
"""


def circumstances() -> dict[str, object]:
    """When and where the record is made."""
    system = platform.freedesktop_os_release()
    return {
        "date": str(datetime.date.today()),
        "commit": run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip(),
        "JAX": importlib.metadata.version("jax"),
        "Orbax": importlib.metadata.version("orbax-checkpoint"),
        "Python": platform.python_version(),
        "Linux": ".".join(platform.release().split(".")[:2]),
        "system": f"{system['NAME']} {system['VERSION_ID']}",
        "cores": os.cpu_count(),
        "heartbeat": HEARTBEAT,
    }


# -------------------------------------------------------------------------- running


def hindrance() -> str | None:
    """Why this machine cannot do it, if it cannot."""
    if sys.platform != "linux":
        return "hosts are simulated by network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "network namespaces need root: run this as root"
    for command, package in ("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables"):
        if shutil.which(command) is None:
            return f"there is no {command}: install {package}"
    return None


def stop(number: int, frame: object) -> None:
    """Leave in good order at the first signal, and do not let a second disturb it."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def rehearse(fault: Fault, python: str) -> dict:
    """Let a fault happen, print what was seen, and stop here if it was no fault."""
    print(f"{fault.name}:", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{os.getpid()}-") as folder:
        both = happen(fault, python, Path(folder))
        found = timeline(fault, both, committed(Path(folder)))
    for name, value in found.items():
        print(f"    {name:13}{literal(value)}", flush=True)
    if wrong := contradictions(fault, found):
        for process, seen in enumerate(both):
            print(f"--- the last lines of process {process}:")
            print("\n".join(line for _, line in seen.output[-30:]))
        sys.exit("\n".join(wrong))
    return found


def main() -> str | None:
    """Cause all faults and write the record, or only those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fault", nargs="*", help="cause only these, record nothing")
    parser.add_argument(
        "--python", help="an interpreter that has another JAX; records nothing"
    )
    asked = parser.parse_args()
    names = [fault.name for fault in FAULTS]
    if unknown := [name for name in asked.fault if name not in names]:
        return f"there is no fault {unknown}; there are {names}"
    if problem := hindrance():
        return problem
    where = circumstances()
    for number in STOPS:
        signal.signal(number, stop)
    found = {}
    try:
        remove_leftovers()
        for fault in FAULTS:
            if not asked.fault or fault.name in asked.fault:
                found[fault.name] = rehearse(fault, asked.python or sys.executable)
    finally:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        Hosts().undo()  # for a signal may have come while that was under way
    if not asked.fault and not asked.python:
        RECORD.write_text(cell(where, found))
        print(f"wrote {RECORD.relative_to(ROOT)}")
    return None


if __name__ == "__main__":
    if "ROLE" in os.environ:
        die_with(int(os.environ["PARENT"]))
        role = {"work": work, "occupy": occupy}[os.environ["ROLE"]]
        role(**json.loads(os.environ["SETTINGS"]))
    else:
        sys.exit(main())
