"""The judge and the other shared cells do what the chapters rely on.

PYTEST_DONT_REWRITE: the judge quotes assertions as a reader's kernel raises them.
"""

import contextlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from subprocess import PIPE

import jax
import numpy as np
import psutil
import pytest
from pair import ROOT, shared_text


@pytest.fixture
def cells(capsys):
    """The names that the judge and on_cpu define, on a CPU; and what they print."""

    class Device:
        platform, device_kind = "cpu", "cpu"

    names = {"jax": jax, "np": np, "device": Device}
    exec(shared_text(ROOT, ["judge", "on_cpu"]), names)
    names["printed"] = lambda: capsys.readouterr().out.strip()
    return names


def mean(x):
    """The mean of x."""
    raise NotImplementedError


def check(answer):
    found = answer(np.arange(4))
    assert found != 6, "a sum, not a mean"
    assert found == 1.5


def compare(answer):
    np.testing.assert_allclose(answer(np.arange(4)), 1.5, err_msg="not the mean")


def not_in_jax(x):
    """The gradient of pmax, for which JAX raises NotImplementedError of its own."""
    gradient = jax.grad(lambda v: jax.lax.pmax(v, "i"))
    return jax.vmap(gradient, axis_name="i")(x * 1.0)


@pytest.mark.parametrize(
    ("check", "answer", "verdict"),
    [
        (check, mean, r"Open\..*"),
        (check, jax.jit(mean), r"Open\..*"),
        (check, np.mean, r"Right\."),
        (check, jax.numpy.mean, r"Right\."),
        (check, partial(np.mean, axis=0), r"Right\."),
        (check, np.sum, r"Not yet\. a sum, not a mean"),
        (check, np.min, r"Not yet\. assert found == 1\.5"),
        (check, not_in_jax, r"Not yet\. NotImplementedError: .*"),
        (check, 1.5, r"Not yet\. TypeError: 'float' object is not callable"),
        (compare, np.sum, r"Not yet\. not the mean\n.*DESIRED: array\(1\.5\)"),
    ],
)
def test_verdict(cells, check, answer, verdict):
    cells["judge"](check, answer)
    assert re.fullmatch(verdict, cells["printed"](), re.DOTALL)


def test_wrong_answer_is_rejected_in_one_line(cells):
    cells["reject"](compare, np.sum)
    assert cells["printed"]() == "sum is rejected: not the mean"


def test_only_an_assertion_rejects(cells):
    """An answer that cannot even run says nothing about the check."""
    with pytest.raises(AssertionError, match="the check accepts mean"):
        cells["reject"](check, np.mean)
    with pytest.raises(TypeError, match="not callable"):
        cells["reject"](check, 1.5)


def test_cpu_facts_are_asserted_on_the_cpu_and_shown_elsewhere(cells):
    cells["on_cpu"](7, 7)
    with pytest.raises(AssertionError, match="expected 8, found 7"):
        cells["on_cpu"](7, 8)
    cells["device"].platform, cells["device"].device_kind = "gpu", "NVIDIA H100"
    cells["on_cpu"](7, 8)
    assert cells["printed"]() == "the CPU's compiler: 8\nNVIDIA H100: 7"


# ---------------------------------------------------------------- compiled programs

WRITTEN = {"jax": jax}
exec(shared_text(ROOT, ["collectives", "written"]), WRITTEN)
# All-gathers of a GPU and a v5e, an all-reduce of a TPU7x, a TPU's reduce-scatter.
BY_HAND = """
%first (p: bf16[128]) -> bf16[1024] {
  %g = bf16[1024] all-gather(%p), frontend_attributes={chain_id="7"}
  ROOT %c = bf16[1024] custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%last (p: bf16[128]) -> bf16[1024] {
  %g = bf16[1024] all-gather(%p), frontend_attributes={chain_id="7"}
  ROOT %c = bf16[1024] custom-call(%g), custom_call_target="AsyncCollectiveDone"
}
%sum (p: bf16[1024]) -> bf16[1024] {
  ROOT %r = bf16[1024] all-reduce(%p), replica_groups=[1,8]<=[8]
}
%all-reduce-scatter.1 (p: bf16[1024]) -> bf16[128] {
  %p = bf16[1024] parameter(0)
  %r = bf16[1024] all-reduce(%p), replica_groups=[1,8]<=[8]
  ROOT %s = bf16[128] dynamic-slice(%r)
}
ENTRY %main (p: bf16[128]) -> bf16[1024] {
  %p = bf16[128] parameter(0)
  %a = bf16[1024] all-gather-start(%p), replica_groups=[1,8]<=[8]
  %m = bf16[64,64] dot(%p, %p)
  %b = bf16[1024] all-gather-done(%a)
  %s = (s32[1]) call-start(), async_execution_thread="sparsecore", to_apply=%sum
  %f = bf16[1024] fusion(%b), calls=%first
  %n = bf16[64,64] dot(%p, %p)
  %l = bf16[1024] fusion(%n), calls=%last
  %u = bf16[1024] call-update(%s, %l)
  %d = bf16[1024] call-done(%u)
  %x = bf16[128] fusion(%d), calls=%all-reduce-scatter.1
}"""


def test_three_forms_of_asynchronous_collectives_become_start_and_done():
    program, entry = WRITTEN["read_program"](BY_HAND)
    assert WRITTEN["in_words"](WRITTEN["steps_of"](entry, program)) == (
        "start all-gather 0, matmul, done all-gather 0, "
        "start all-gather 2, matmul, done all-gather 2, "
        "start all-reduce 1, done all-reduce 1, reduce-scatter"
    )


def test_excerpts_of_a_compiled_program():
    tpu = '%s = bf16[9] all-reduce(%p), {"strategy":"Ring","x":"{colors:2 phases:1 c"}'
    threaded = '%s = () call-start(), async_execution_thread="sparsecore"'
    transposed = "%p = f32[1024,10]{0,1:T(8,128)} parameter(0)"
    by_row = "%q = f32[1024,10]{1,0:T(8,128)} parameter(1)"
    scalar = tpu.replace("bf16[9]", "f32[]").replace("Ring", "Other")
    entry = {line: WRITTEN["read_line"](line) for line in (transposed, by_row)}
    found = WRITTEN["excerpts"]("\n".join([tpu, scalar, threaded]), entry)
    assert found == [
        "all-reduce, Ring, colors:2 phases:1",
        "asynchronous, sparsecore",
        "f32[1024,10]{0,1:T(8,128)}",
    ]


# ------------------------------------------------------------- chips and their links

CELL = {}
exec(shared_text(ROOT, ["chips"]), CELL)
Chip, chips, bytes_sent = CELL["Chip"], CELL["chips"], CELL["bytes_sent"]
collective_seconds = CELL["collective_seconds"]
program_seconds = CELL["program_seconds"]
TORUS = Chip(1, 1, 1, axis_bandwidth=2, axes=3, domain=999, network=1, latency=1)
SWITCH = TORUS._replace(axes=1, switch=True)
ONE_LAP = ["all-gather", "reduce-scatter", "all-to-all"]


def ways(start: int, end: int, n: int, closed: bool) -> list[tuple[int, int, float]]:
    """Return the shortest ways: direction, hops, and share of the chunk."""
    right, left = (end - start) % n, (start - end) % n
    if not closed:
        return [(1, end - start, 1)] if end > start else [(-1, start - end, 1)]
    if right == left:
        return [(1, right, 1 / 2), (-1, left, 1 / 2)]
    return [(1, right, 1)] if right < left else [(-1, left, 1)]


def simulate(collective: str, n: int, closed: bool) -> tuple[int, float]:
    """Send every chunk of an array of n bytes along an axis; return the most hops, and
    the bytes of the busiest link, of which each sends one way."""
    loads, most = Counter(), 0
    for start in range(n):
        crossed = Counter()  # by the chunk of this device, in an all-gather
        for end in {*range(n)} - {start}:
            for direction, hops, share in ways(start, end, n, closed):
                most = max(most, hops)
                for hop in range(hops):
                    link = (start + direction * hop) % n, direction
                    if collective == "all-to-all":
                        loads[link] += share
                    else:  # a copy stays at each device that it passes
                        crossed[link] = max(crossed[link], share)
        loads.update(crossed)
    return most, max(loads.values())


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("collective", ONE_LAP)
def test_collectives_take_as_long_as_their_busiest_link(collective, closed):
    for n in range(3, 12):  # a reduce-scatter is an all-gather that runs backwards
        hops, sent = simulate(collective, n, closed)
        found = collective_seconds(collective, n, n, TORUS, closed)
        assert found == pytest.approx(hops + sent), n
        assert collective_seconds(collective, 0, n, TORUS, closed) == hops
        there_and_back = collective_seconds("all-reduce", n, n, TORUS, closed)
        gather = collective_seconds("all-gather", n, n, TORUS, closed)
        assert there_and_back == pytest.approx(2 * gather)


def test_permutes_use_one_link_and_switches_take_one_hop_a_lap():
    for n in (2, 8):
        assert collective_seconds("collective-permute", 10, n, TORUS) == 1 + 10
        assert collective_seconds("collective-permute", 10, n, SWITCH) == 1 + 10 / 2
        for closed in (True, False):
            for collective in ONE_LAP:  # n - 1 chunks of n, straight to their devices
                found = collective_seconds(collective, n, n, SWITCH, closed)
                assert found == 1 + (n - 1) / 2
            found = collective_seconds("all-reduce", n, n, SWITCH, closed)
            assert found == 2 + (n - 1)
    assert bytes_sent("collective-permute", 10, 8) == 10
    for chip in (TORUS, SWITCH):
        for collective in ["all-reduce", *ONE_LAP]:
            assert collective_seconds(collective, 10, 1, chip) == 0


def test_several_axes_divide_the_bytes_and_add_their_hops():
    found = collective_seconds("all-reduce", 32, (4, 8), TORUS)
    assert found == 2 * (2 + 4) + 2 * 31 / (2 * 2)
    found = collective_seconds("all-gather", 64, (4, 4, 4), TORUS, closed=False)
    assert found == 3 * 3 + 63 / (3 * 1)
    # All offsets (a, b) occur; along each axis a chunk takes the shorter way.
    for sides in ((4, 8), (8, 4), (3, 5)):
        offsets = [*itertools.product(*map(range, sides))]
        along = [sum(min(o[i], sides[i] - o[i]) for o in offsets) for i in (0, 1)]
        found = collective_seconds("all-to-all", math.prod(sides), sides, TORUS)
        assert found == sum(side // 2 for side in sides) + max(along) / 2


def test_more_devices_than_links_connect_are_rejected():
    for n, chip in ((16, "H100"), ((2, 4), "H100"), ((2, 2, 2), "TPU v5e")):
        with pytest.raises(ValueError, match="the links connect at most"):
            collective_seconds("all-reduce", 1, n, chips[chip])
    assert collective_seconds("all-reduce", 1, 72, chips["GB200 NVL72"]) > 0
    with pytest.raises(ValueError, match="unknown collective: psum"):
        bytes_sent("psum", 1, 8)


def test_a_program_takes_as_long_as_its_collectives():
    """`collectives` counts bytes on a switch; an all-to-all on a ring sends more."""
    kinds = ["all-reduce", *ONE_LAP, "collective-permute"]
    for chip, closed in itertools.product(chips.values(), (True, False)):
        found, total = {}, 0
        for times, kind in enumerate(kinds, start=1):
            sent = times * bytes_sent(kind, 3e6, 8, switch=True)
            found[kind, 8] = times, sent
            total += times * collective_seconds(kind, 3e6, 8, chip, closed)
        assert program_seconds(found, chip, closed) == pytest.approx(total)
    assert program_seconds({}, chip) == 0
    with pytest.raises(ValueError, match="not known how often the all-gather runs"):
        program_seconds({("all-gather", 8): (0, 0)}, chip)


def test_times_that_chapters_quote():
    v5e, h100 = chips["TPU v5e"], chips["H100"]
    for chip, gradients, tiny in ((v5e, 0.281, 8e-6), (h100, 0.0625, 6e-6)):
        found = collective_seconds("all-reduce", 2 * 8_030_261_248, 8, chip)
        assert found == pytest.approx(gradients, rel=2e-3)
        assert collective_seconds("all-reduce", 32, 8, chip) == pytest.approx(
            tiny, rel=1e-3
        )
    pod = collective_seconds("all-reduce", 606e6, (16, 16), chips["TPU v6e"])
    assert pod == pytest.approx(3.05e-3, rel=1e-3)


def test_chips_have_the_published_rates():
    """In the units of the sources, of a chip."""
    links = {"v4": (6, 45), "v5e": (4, 50), "v5p": (6, 100), "v6e": (4, 100)}
    for name, (count, one_way) in links.items():
        chip = chips[f"TPU {name}"]
        assert chip.axes * chip.axis_bandwidth == count * one_way * 1e9
    ironwood = chips["TPU7x"]
    assert ironwood.axes * ironwood.axis_bandwidth == 600e9
    assert (2 * ironwood.flops, 2 * ironwood.memory) == (2307e12, 192 * 2**30)
    nvlink = {"A100": 600, "H100": 900, "H200": 900, "B200": 1800, "GB200 NVL72": 1800}
    for name, both in nvlink.items():
        assert chips[name].axis_bandwidth == both * 1e9 / 2
        assert chips[name].switch and chips[name].axes == 1
    rates = [chip.flops / chip.memory_bandwidth for chip in chips.values()]
    assert [round(rate) for rate in rates] == [
        *(229, 241, 166, 560, 313),
        *(153, 295, 206, 281, 312),
    ]
    gigabits = [round(8 * chip.network / 1e9) for chip in chips.values()]
    assert gigabits == [50, 25, 50, 100, 50, 200, 400, 400, 400, 400]


# ------------------------------------------------------------------ launch

WORKER = """
import os, sys, time
from pathlib import Path

print("sees", os.environ.get("XLA_FLAGS"), os.environ.get("http_proxy"))
Path(os.environ["RESULT"]).write_text(os.environ["PROCESS"])
here = Path(sys.argv[1]).parent
Path(here, os.environ["PROCESS"] + f"-{os.getpid()}").mkdir()
while len([*here.glob("?-*")]) < 2:
    time.sleep(0.05)
if os.environ["THEN"] == "fail" and os.environ["PROCESS"] == "1":
    sys.exit(3)
if os.environ["THEN"] != "end":
    time.sleep(600)
"""
KERNEL = """
import signal
import sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook's kernel
exec(sys.argv[1])
try:
    ended = launch(sys.argv[2], limit=float(sys.argv[3]), THEN=sys.argv[4])
except KeyboardInterrupt:
    print("interrupted")
else:
    print([(process.status, process.result) for process in ended])
"""


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def comes_true(condition: Callable, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("then", "limit", "stop", "last_line"),
    [
        ("end", 60, None, "[(0, 0), (0, 1)]"),
        ("fail", 60, None, "[(None, 0), (3, 1)]"),
        ("sleep", 5, None, "[(None, 0), (None, 1)]"),
        ("sleep", 60, signal.SIGINT, "interrupted"),
        ("sleep", 60, signal.SIGKILL, None),
    ],
)
def test_launch_leaves_nothing(tmp_path, then, limit, stop, last_line):
    (tmp_path / "worker.py").write_text(WORKER)
    words = [shared_text(ROOT, ["processes"]), tmp_path / "worker.py", str(limit), then]
    command = [sys.executable, "-c", KERNEL, *words]
    settings = os.environ | {"XLA_FLAGS": "--kernel", "http_proxy": "kernel"}
    kernel = subprocess.Popen(command, stdout=PIPE, text=True, env=settings)
    assert comes_true(lambda: len([*tmp_path.glob("?-*")]) == 2, 60), "no worker"
    pids = [int(path.name[2:]) for path in tmp_path.glob("?-*")]
    if stop:
        assert all(map(runs, pids))
        kernel.send_signal(stop)
    printed = kernel.communicate(timeout=60)[0].splitlines()
    if not stop:
        assert printed[:2] == ["0: sees None None", "1: sees None None"]
    assert printed[-1:] == ([last_line] if last_line else [])
    assert comes_true(lambda: not any(map(runs, pids)), 10 if stop else 0)
