"""Run the PyTorch programs that a page of the book shows, under torchrun.

Each program is a part of the record, which has the results of both processes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import record

PROGRAMS = "book/pytorch_programs.py"
LIMIT = 600  # seconds; a busy machine needs 200
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # its store would listen everywhere
    "TORCH_FR_BUFFER_SIZE": "100",
}


def measure(*wanted: str) -> Iterator[tuple[str, list[dict]]]:
    """Run these programs, or all, in two processes that torchrun starts."""
    options = "--nproc-per-node=2 --max-restarts=1 --local-addr=127.0.0.1".split()
    options += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    with tempfile.TemporaryDirectory() as folder:
        options += [f"--rdzv-endpoint={folder}/rendezvous"]  # needs no port
        program = [str(record.ROOT / PROGRAMS), str(LIMIT), *wanted]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, *program]
        process = subprocess.Popen(torchrun, cwd=folder, env=os.environ | SETTINGS)
        try:
            process.wait(LIMIT)
        finally:
            process.terminate()  # torchrun ends its processes first
            process.wait()
        if process.returncode:
            raise SystemExit(f"torchrun ended with status {process.returncode}")
        texts = [Path(folder, f"rank{rank}.json").read_text() for rank in (0, 1)]
    first, second = map(json.loads, texts)
    for name in first:
        yield name, [first[name], second[name]]


def files(program: str) -> list[str]:
    return [PROGRAMS]


def versions() -> dict[str, str]:
    return record.installed("torch")
