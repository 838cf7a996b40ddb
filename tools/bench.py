"""Time the book's ways against each other, as ratios, and count bytes on the wire.

Run by `nox -s bench`; `-- --record` keeps the numbers in book/measured/bench.json.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace as Names
from typing import NamedTuple

import checks
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax import linen as nn
from jax.stages import Compiled
from record import code_digests, record
from pair import ROOT

P, Auto = jax.P, jax.sharding.AxisType.Auto
REFERENCE, ROUNDS = "jit", 15


def same(value, *_):
    return value


class Program(NamedTuple):
    """A program of a chapter, and the least that a device must send to run it."""

    chapter: int
    until: str  # a name: the chapter is run up to the cell that defines it
    name: str
    compiled: Callable[[Names], Compiled]
    least: float  # bytes, for the sums and copies that its layout asks for


def lap(n: int, nbytes: int) -> float:
    """Bytes a device must send for a lap on a ring of n with an array of nbytes: one
    lap scatters its sum or gathers its parts, and an all-reduce takes two."""
    return (n - 1) / n * nbytes


def total(n: int, numbers: int) -> float:
    """Bytes a device must send to add up so many numbers of float32 on a ring of n."""
    return 2 * lap(n, 4 * numbers)


def batch_statistics(c: Names) -> Compiled:
    step = jax.pmap(c.normalise, axis_name="x")
    return step.lower(c.shares).compile()


def regression_step(c: Names) -> Compiled:
    return c.programs["jit"].compile()


def classifier_step(c: Names) -> Compiled:
    return c.pmap_step.lower(jax_utils.replicate(c.start), c.x8, c.y8).compile()


def ensemble_step(c: Names) -> Compiled:
    return c.step_all.lower(c.members, *c.batch).compile()


def rows_to_grid(c: Names) -> Compiled:
    """Move f32[64, 64] from eight blocks of rows to a grid whose axes are swapped."""
    rows = jax.NamedSharding(c.mesh24, P(("x", "y")))
    grid = jax.NamedSharding(c.mesh24, P("y", "x"))
    x = jax.device_put(np.zeros((64, 64), np.float32), rows)
    return jax.jit(same, out_shardings=grid).lower(x).compile()


def add_products(c: Names) -> Compiled:
    a, b, *_ = c.products["columns", "rows"]
    return jax.jit(jnp.matmul).lower(a, b).compile()


def gradient_typed(c: Names) -> Compiled:
    with jax.set_mesh(c.mesh):
        return jax.jit(jax.grad(c.loss)).lower(c.params, c.x).compile()


def gradient_by_hand(c: Names) -> Compiled:
    return c.full.lower(c.laid1, c.laid2, c.batch).compile()


def one_layer(c: Names) -> Compiled:
    return c.plain.lower(*c.on_line).compile()


def tensor_step(c: Names) -> Compiled:
    return by_rules(c, c.tensor)


def fsdp_step(c: Names) -> Compiled:
    return by_rules(c, c.fsdp)


def by_rules(c: Names, rules: list) -> Compiled:
    """Chapter 14's training step under one of its lists of rules."""
    state, rows, step = c.launch(rules)
    with jax.set_mesh(c.mesh):
        return step.lower(state, *jax.device_put(c.first, rows)).compile()


# The weights' gradients over `data`, activations over `model`.
TYPED = total(2, 16 * 8 + 8 + 8 * 16) + total(4, 4 * 16)
BY_HAND = total(2, 16 * 8 + 8 * 4) + total(4, 4 * 4)
# Chapter 14's network: the matrices of four blocks, and a layer with ten biases.
BLOCKS, HEAD, BIAS = 4 * 2 * 64 * 256, 64 * 10, 10
# Under the tensor rules four blocks add up activations in both passes. Under FSDP a
# device gathers the weights, the blocks' in both passes, and scatters their gradients.
TENSOR = total(2, BLOCKS // 4 + HEAD + BIAS + 1) + 4 * 2 * total(4, 32 * 64)
GATHER, SCATTER = lap(8, 4 * (2 * BLOCKS + HEAD)), lap(8, 4 * (BLOCKS + HEAD))
FSDP = GATHER + SCATTER + total(8, BIAS + 1)
PROGRAMS = [
    Program(5, "normalised", "batch statistics", batch_statistics, total(8, 6)),
    Program(6, "programs", "regression step", regression_step, total(8, 3)),
    Program(7, "x8", "classifier step", classifier_step, total(8, 9611)),
    Program(8, "step_all", "step of an ensemble", ensemble_step, 0),
    Program(9, "mesh24", "rows to a grid", rows_to_grid, 4 * 64 * 64 / 8),
    Program(10, "products", "columns times rows", add_products, total(8, 512 * 256)),
    Program(11, "slope", "gradient, typed", gradient_typed, TYPED),
    Program(12, "full", "gradient, by hand", gradient_by_hand, BY_HAND),
    Program(13, "on_line", "one layer", one_layer, total(8, 1057)),
    Program(14, "launch", "tensor step", tensor_step, TENSOR),
    Program(14, "launch", "FSDP step", fsdp_step, FSDP),
]
# The wide step adds up its gradients and loss over `data` and three activations over
# `model`. Under `pmap` it adds up all gradients over all devices.
SPLIT = total(2, 1024**2 + 1) + 3 * total(4, 4 * 1024)
WIDE = {"jit": SPLIT, "shard_map": SPLIT, "pmap": total(8, 4 * 1024**2 + 1)}


def chapter(number: int, until: str) -> Names:
    """Run a chapter's cells up to the one that defines a name; what they defined."""
    names = {"__name__": "__main__"}  # Flax looks for the module of a class
    code = {int(slug[:2]): code for slug, _, code, _ in checks.chapters(ROOT)}
    for cell in code[number]:
        lines = [s for s in cell.source.splitlines() if not s.startswith("%")]
        with redirect_stdout(None):
            exec("\n".join(lines), names)
        if until in names:
            return Names(**names)
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


def classifier(c: Names) -> dict[str, Callable]:
    """Chapter 7's step; its `shard_map` form is written here, after chapter 6's."""

    def mean_loss(*blocks):
        return jax.lax.pmean(c.mean_loss(*blocks), "data")

    def step(state, x, y):
        loss, grads = jax.value_and_grad(mean)(state.params, x, y)
        return state.apply_gradients(grads=grads), loss

    mesh = jax.make_mesh((8,), ("data",), axis_types=(Auto,))
    specs = P(), P("data"), P("data")
    mean = jax.shard_map(mean_loss, mesh=mesh, in_specs=specs, out_specs=P())
    at = tuple(jax.NamedSharding(mesh, spec) for spec in specs)
    placed = jax.device_put((c.start, *c.first), at)
    stack = jax_utils.replicate(c.start), c.x8, c.y8
    return contenders(c.step_one, c.pmap_step, stack, jax.jit(step), placed)


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


def wire(chapters: dict[int, Names], wide: dict[str, Callable]) -> list[dict]:
    """The bytes that a device sends in each program, counted and at least."""
    programs = [
        (number, name, compiled(chapters[number]), least)
        for number, _, name, compiled, least in PROGRAMS
    ]
    for way, least in WIDE.items():
        compiled = wide[way].func.lower(*wide[way].args).compile()
        programs.append((14, f"wide MLP, {way}", compiled, least))
    rows = []
    for number, name, compiled, least in programs:
        found = chapters[6].collectives(compiled).values()
        if not all(times for times, _ in found):
            raise ValueError(f"how often {name} sends is not known")
        counted = sum(sent for _, sent in found)
        row = dict(chapter=str(number), program=name, counted=counted)
        rows.append(row | dict(bound=round(least)))
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
    ends = {program.chapter: program.until for program in PROGRAMS}
    chapters = {number: chapter(number, until) for number, until in ends.items()}
    digests = code_digests().items()
    used = {name: code for name, code in digests if int(name[:2]) in ends}
    wide, c = wide_mlp(), chapters[6]
    stack, placed = (c.copies, c.x8, c.y8), (c.copied, c.xs, c.ys)
    six = c.step_one.__wrapped__, c.step_pmap, stack, c.step_shard, placed
    ratios = {
        "regression step": race(contenders(*six), steps=10),
        "classifier step": race(classifier(chapters[7]), steps=4),
        "wide MLP step": race(wide, steps=1),
    }
    for program, row in ratios.items():
        for name, (low, median, high) in row.items():
            print(f"{program:16}{name:11}{median:8.2f}  ({low:.2f} to {high:.2f})")
    for row in (sent := wire(chapters, wide)):
        print("{chapter:>2} {program:20}{counted:12,}{bound:12,}".format(**row))
    if "--record" in sys.argv:
        machine |= dict(jax=jax.__version__, rounds=ROUNDS, code=used)
        record("bench", machine | dict(ratios=ratios, bytes=sent))


if __name__ == "__main__":
    main()
