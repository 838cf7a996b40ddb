# @title Start a program in several processes
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

# Every process runs this first. On Linux it is killed as soon as the notebook's kernel,
# which started it, has ended.
BEGIN = """
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ["KERNEL"]):
        sys.exit("the kernel has ended already")
sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines, at once
sys.path[0] = os.path.dirname(sys.argv[1])
runpy.run_path(sys.argv[1], run_name="__main__")
"""
NOT_PASSED_ON = re.compile(r"(?i)XLA_FLAGS|JAX_.*|.*_proxy")  # settings of the notebook
NOT_SHOWN = re.compile(  # lines of Gloo, of JAX's log, of tracebacks, and empty ones
    r"$|.*(\[Gloo\]|connected peer|nnected to \d)|[IWEF]\d{4} |WARNING: All log|RPC: |"
    r"=== Source|Traceback|The (stack|above) |jax\.errors\.Simpl|-{9}| {2,}|"
    r"Timeout \(|Thread 0x|external/|\*\*\* Check|Additional GRPC|:UN\w+:|\. This is"
)


class ProcessResult(NamedTuple):
    """The exit status of a process, None if it was killed at the time limit; the JSON
    that it wrote into its result file, or None; and everything that it printed."""

    status: int | None
    result: object
    output: str


def launch(
    program: str | Path,
    processes: int = 2,
    devices: int = 4,
    limit: float = 120,
    patience: float = 0,
    **environment: object,
) -> list[ProcessResult]:
    """Run a program in several processes with `devices` CPU devices each, wait for all
    of them, and print their output without log lines. When one fails, the others get
    `patience` more seconds; after `limit` seconds all are killed. No process is left
    running, not even after an interrupt or, on Linux, when the kernel is killed.

    The program finds in os.environ COORDINATOR, a free address; PROCESSES, the number
    of processes; PROCESS, its index; RESULT, a path for its result; `environment`."""
    with socket.socket() as probe:  # find a free port
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {k: v for k, v in os.environ.items() if not NOT_PASSED_ON.fullmatch(k)}
    settings |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices, "NO_COLOR": 1}
    settings |= {"JAX_COORDINATOR_BIND_ADDRESS": address, "COORDINATOR": address}
    settings |= {"PROCESSES": processes, "KERNEL": os.getpid(), **environment}
    command = [sys.executable, "-c", BEGIN, str(program)]
    ended, running = [], []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{index}.txt") for index in range(processes)]
        results = [Path(folder, f"{index}.json") for index in range(processes)]
        try:
            for index, (output, result) in enumerate(zip(outputs, results)):
                own = settings | {"PROCESS": index, "RESULT": result}
                env = {name: str(value) for name, value in own.items()}
                with output.open("w") as file:
                    pipes = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
                    running.append(subprocess.Popen(command, env=env, **pipes))
            deadline = time.monotonic() + limit
            statuses = [None]
            while None in statuses and time.monotonic() < deadline:
                time.sleep(0.05)
                statuses = [process.poll() for process in running]
                if any(statuses):  # one has failed
                    deadline = min(deadline, time.monotonic() + patience)
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()
        for status, output, result in zip(statuses, outputs, results):
            written = json.loads(result.read_text()) if result.exists() else None
            ended.append(
                ProcessResult(status, written, output.read_text(errors="replace"))
            )
    for index, process in enumerate(ended):
        for line in process.output.splitlines():
            if not NOT_SHOWN.match(line):
                print(f"{index}: {line}")
    return ended
