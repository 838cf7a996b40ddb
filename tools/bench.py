"""Time the book's ways against each other, as ratios, and count bytes on the wire.

Run by `nox -s bench`; `-- --record` keeps the numbers in book/measured/bench.json.
"""

import os
import random
import re
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace as Names

import checks
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax import linen as nn
from measured import record
from pair import ROOT

P, Auto = jax.P, jax.sharding.AxisType.Auto
REFERENCE, ROUNDS = "jit", 15
# Chapter | what it is run up to | program | the collectives that it is compiled to
# | and what a ring must send for the sums and copies that its layout asks for.
WIRE = """
5 | parallel | batch statistics | found | 2 * lap(8, 4 * 6)
6 | programs | regression step | cost | 2 * lap(8, 4 * 3)
7 | cost | classifier step | read(pmap_step, (eight, x8, y8)) | 2 * lap(8, 4 * 9611)
8 | step_all | step of an ensemble | read(step_all, (members, *batch)) | 0
9 | values | rows to a grid | found | need
10 | products | columns times rows | read(jax.jit(jnp.matmul),
  products["columns", "rows"][:2]) | 2 * lap(8, 4 * 512 * 256)
11 | alone | gradient, typed | cost | 2 * lap(2, held) + 2 * lap(4, 4 * 4 * 16)
12 | programs | gradient, by hand | cost | 2 * lap(2, 640) + 2 * lap(4, 4 * 4 * 4)
13 | jit_batch | one layer | read(*jit_batch()) | 2 * lap(8, 4 * 1057)
14 | gathered | tensor step | costs["tensor"]
  | 2 * lap(2, 4 * (matrices // 4 + head + 1)) + 16 * lap(4, 4 * 32 * 64)
14 | gathered | FSDP step | costs["fsdp"]
  | lap(8, 4 * gathered) + lap(8, 4 * (matrices + 640)) + 2 * lap(8, 4 * 11)
14 | gathered | wide MLP, jit | read(*wide["jit"]) | split
14 | gathered | wide MLP, shard_map | read(*wide["shard_map"]) | split
14 | gathered | wide MLP, pmap | read(*wide["pmap"]) | 2 * lap(8, 4 * (4 * 1024**2 + 1))
"""
ROWS = [re.split(r"\s*\|\s*", row) for row in re.split(r"\n(?=\d)", WIRE)[1:]]


def same(value, *_):
    return value


def chapter(number: int, until: str) -> dict:
    """Run a chapter's cells up to the one that defines a name; what they defined."""
    names = {"__name__": "__main__"}  # Flax looks for the module of a class
    code = {int(slug[:2]): code for slug, _, code, _ in checks.chapters(ROOT)}
    for cell in code[number]:
        lines = [s for s in cell.source.splitlines() if not s.startswith("%")]
        with redirect_stdout(None):
            exec("\n".join(lines), names)
        if until in names:
            return names
    raise ValueError(f"chapter {number} defines no {until}")


def contenders(plain, pmapped, stack, mapped, placed) -> dict[str, Callable]:
    """The ways to run one step: each takes nothing and returns the step's results."""
    step, stack = jax.jit(plain), jax.pmap(lambda *rows: rows)(*stack)
    host, at = jax.device_get(placed[1:]), tuple(x.sharding for x in placed[1:])
    return {
        "jit": partial(step, *placed),
        "jit, again": partial(step, *placed),
        "pmap": partial(pmapped, *stack),
        "shard_map": partial(mapped, *placed),
        "no jit": partial(plain, *placed),
        "host data": lambda: step(placed[0], *jax.device_put(host, at)),
    }


def classifier(c: dict) -> dict[str, Callable]:
    """Chapter 7's step; its `shard_map` form is written here, after chapter 6's."""

    def mean_loss(*blocks):
        return jax.lax.pmean(c["mean_loss"](*blocks), "data")

    def step(state, x, y):
        loss, grads = jax.value_and_grad(mean)(state.params, x, y)
        return state.apply_gradients(grads=grads), loss

    mesh = jax.make_mesh((8,), ("data",), axis_types=(Auto,))
    specs = P(), P("data"), P("data")
    mean = jax.shard_map(mean_loss, mesh=mesh, in_specs=specs, out_specs=P())
    at = tuple(jax.NamedSharding(mesh, spec) for spec in specs)
    placed = jax.device_put((c["start"], *c["first"]), at)
    stack = jax_utils.replicate(c["start"]), c["x8"], c["y8"]
    return contenders(c["step_one"], c["pmap_step"], stack, jax.jit(step), placed)


def wide_mlp() -> dict[str, Callable]:
    """Four layers of width 1,024 in chapter 14's form: batch 8, Adam, a 2 x 4 mesh."""
    rules = [("batch", "data"), ("hidden", "model"), ("embed", None)]
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(Auto, Auto))
    specs = [P(None, "model"), P("model")] * 2  # embed x hidden, hidden x embed
    rng, adam = np.random.default_rng(0), optax.adam(1e-3, eps=1e-6)
    x, y = np.float32(rng.normal(size=(2, 8, 1024)))
    weights = list(np.float32(rng.normal(0, 0.03, (4, 1024, 1024))))
    state = weights, adam.init(weights)
    keep = partial(nn.with_logical_constraint, rules=rules, mesh=mesh)
    mean = partial(jax.lax.pmean, axis_name="data")
    total = partial(jax.lax.psum, axis_name="model")

    def step(state, x, y, mean_loss=same, mean_grad=same, total=same, keep=same):
        def loss_fn(weights):
            h = x
            for up, down in zip(weights[::2], weights[1::2]):
                wide = keep(nn.relu(h @ up), ("batch", "hidden"))
                h = keep(h + total(wide @ down), ("batch", "embed"))
            return mean_loss(jnp.mean((h - y) ** 2))

        loss, grads = mean_grad(jax.value_and_grad(loss_fn)(state[0]))
        updates, moments = adam.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), moments), loss

    moments = state[1][0]._replace(count=P(), mu=specs, nu=specs)
    where = (specs, (moments, *state[1][1:])), P("data"), P("data")
    at = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), where)
    layout = dict(mesh=mesh, in_specs=where, out_specs=(where[0], P()))
    body, plain = partial(step, mean_loss=mean, total=total), partial(step, keep=keep)
    mapped, placed = jax.shard_map(body, **layout), jax.device_put((state, x, y), at)
    # pmap has no such layout: it copies the weights and splits the batch.
    stack = jax_utils.replicate(state), x.reshape(8, 1, -1), y.reshape(8, 1, -1)
    pmapped = jax.pmap(partial(step, mean_grad=mean), "data")
    return contenders(plain, pmapped, stack, jax.jit(mapped), placed)


def lap(n: int, nbytes: int) -> float:
    """Bytes a device must send for a lap on a ring of n with an array of nbytes: one
    lap scatters its sum or gathers its parts, and an all-reduce takes two."""
    return (n - 1) / n * nbytes


def wire(chapters: dict[str, dict], wide: dict[str, Callable]) -> list[dict]:
    """For each row of WIRE the bytes that a device sends, counted and at least."""

    def read(step, args: tuple) -> dict:
        return chapters["6"]["collectives"](step.lower(*args).compile())

    rows, known = [], {"read": read, "lap": lap}
    known["wide"] = {k: (w.func, w.args) for k, w in wide.items() if k != "host data"}
    known["split"] = 2 * lap(2, 4 * (1024**2 + 1)) + 6 * lap(4, 4 * 4 * 1024)
    for number, _, program, found, bound in ROWS:
        names = chapters[number] | known
        counted = sum(sent for _, sent in eval(found, names).values())
        bound = round(eval(bound, names))
        rows.append(dict(chapter=number, program=program, counted=counted, bound=bound))
    return rows


def quartiles(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles over the rounds of each contender's seconds by the reference's."""
    ratios = {name: np.divide(t, times[REFERENCE]) for name, t in times.items()}
    return {k: np.quantile(r, [0.25, 0.5, 0.75]).tolist() for k, r in ratios.items()}


def race(ways: dict[str, Callable], steps: int) -> dict[str, list[float]]:
    """Check that all ways compute the same, then time them in random turns."""
    wanted = jax.tree.leaves(jax.device_get(ways[REFERENCE]()))
    for name, run in ways.items():
        for value, want in zip(jax.tree.leaves(run()), wanted, strict=True):
            want = np.broadcast_to(want, value.shape)  # pmap stacks its copies
            close = dict(rtol=1e-3, atol=1e-3 * abs(want).max(), err_msg=name)
            np.testing.assert_allclose(value, want, **close)
    times = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name in random.sample(list(ways), len(ways)):
            start = time.perf_counter()
            for _ in range(steps):
                jax.block_until_ready(ways[name]())
            times[name].append(time.perf_counter() - start)
    return quartiles(times)


def main() -> None:
    """Run and print everything; `--record` keeps it."""
    machine = dict(cores=os.cpu_count(), load=round(os.getloadavg()[0], 1))
    ends = {number: until for number, until, *_ in ROWS}
    chapters = {number: chapter(int(number), until) for number, until in ends.items()}
    wide, c = wide_mlp(), Names(**chapters["6"])
    stack, placed = (c.copies, c.x8, c.y8), (c.copied, c.xs, c.ys)
    six = c.step_one.__wrapped__, c.step_pmap, stack, c.step_shard, placed
    ratios = {
        "regression step": race(contenders(*six), steps=10),
        "classifier step": race(classifier(chapters["7"]), steps=4),
        "wide MLP step": race(wide, steps=1),
    }
    for program, row in ratios.items():
        for name, (low, median, high) in row.items():
            print(f"{program:16}{name:11}{median:8.2f}  ({low:.2f} to {high:.2f})")
    for row in (sent := wire(chapters, wide)):
        print("{chapter:>2} {program:20}{counted:12,}{bound:12,}".format(**row))
    if "--record" in sys.argv:
        machine |= dict(jax=jax.__version__, rounds=ROUNDS)
        record("bench", machine | dict(ratios=ratios, bytes=sent))


if __name__ == "__main__":
    main()
