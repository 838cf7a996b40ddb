"""Run all chapters N times in random order, and report failures, times and memory.

`nox -s repeat` runs it; `-- 3` for three rounds, `-- --record` for the status page.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from record import code_digests, record
from pair import ROOT

WORKERS = 2
MEMORY_LIMIT = 2 * 2**30


def run_once(path: Path) -> tuple[str, float, int, str]:
    """Run one notebook: its name, seconds, peak bytes of a process, and any error."""
    command = [sys.executable, "-m", "jupyter", "execute", "--timeout=300", str(path)]
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=log, stderr=log)
        # The largest of the processes that it started and waited for: the kernel.
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        log.seek(0)
        error = log.read()[-1500:] if status else ""
    return path.stem, seconds, usage.ru_maxrss * 1024, error


def main(rounds: int, keep: bool) -> int:
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    seconds, memory, failures = defaultdict(list), defaultdict(int), []
    dice, code = random.Random(), code_digests()
    load = os.getloadavg()[0]
    for number in range(rounds):
        order = dice.sample(paths, len(paths))
        with ThreadPoolExecutor(WORKERS) as pool:
            for name, took, peak, error in pool.map(run_once, order):
                seconds[name].append(took)
                memory[name] = max(memory[name], peak)
                if error:
                    failures.append(f"round {number + 1}, {name}: {error}")
    table = {}
    for name, times in sorted(seconds.items()):
        spread = [min(times), statistics.median(times), max(times)]
        table[name] = [round(s, 1) for s in spread] + [round(memory[name] / 2**30, 2)]
        print(
            f"{name:32}" + "{:6.1f} {:6.1f} {:6.1f} s {:6.2f} GiB".format(*table[name])
        )
    heavy = [name for name in memory if memory[name] > MEMORY_LIMIT]
    print(*failures, *[f"{name}: over 2 GiB" for name in heavy], sep="\n")
    print(f"{rounds * len(paths)} runs, {len(failures)} failed")
    if keep:
        about = {"rounds": rounds, "failed": len(failures), "load at start": load}
        about |= {"code": code}
        record("repeat", about | {"chapters": table})
    return bool(failures or heavy)


if __name__ == "__main__":
    count = [int(option) for option in sys.argv[1:] if option.isdigit()]
    sys.exit(main((count or [10])[0], "--record" in sys.argv))
