# @title Simulate kernels, and read their copies and semaphores
import contextlib
import dataclasses
import io
import logging
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def simulator(**options):
    """Return a context in which TPU kernels run in JAX's simulator on a CPU."""
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**options))


class SimulatorRun(NamedTuple):
    """A program's result in the simulator, the races found, and the printed output."""

    result: np.ndarray
    races: int
    output: str


def simulate(program, *arrays, **options) -> SimulatorRun:
    """Run a program in the simulator and count races. Its semaphores are checked first,
    because the simulator hangs at a deadlock or at a copy to a device that has not
    started the kernel."""
    semaphore_values(program, *arrays)
    ambiguous_semaphores(program, *arrays)
    known = [field.name for field in dataclasses.fields(pltpu.InterpretParams)]
    if "on_race" in known:  # JAX 0.12 raises otherwise; older releases print
        options = {"on_race": "warn", **options}
    params = pltpu.InterpretParams(detect_races=True, **options)
    written = io.StringIO()
    log = logging.getLogger()
    handlers, log.handlers = log.handlers, [logging.StreamHandler(written)]
    try:
        with (
            contextlib.redirect_stdout(written),
            pltpu.force_tpu_interpret_mode(params),
        ):
            result = np.asarray(program(*arrays))
            jax.effects_barrier()
    finally:
        log.handlers = handlers
    output = written.getvalue()
    return SimulatorRun(result, output.count("RACE DETECTED"), output)


UNREADABLE = (
    "cannot read this kernel: {} is not known before it runs, or differs between "
    "devices. Write its loops and conditions with Python's for and if"
)


class Event(NamedTuple):
    """A signal, wait or copy of a kernel, and the semaphores that it changes."""

    kind: str  # "signal", "wait", "copy" within a device, or "send" to another one
    semaphores: list[str]  # of a send: the sender's, then the receiver's
    count: int
    nbytes: int
    to: np.ndarray | None  # target device of each device


def value_of(atom, known: dict):
    """Return what is known of a variable or literal: a name, or one value a device."""
    return np.asarray(atom.val) if hasattr(atom, "val") else known.get(atom)


def index_of(transforms: list, known: dict) -> str:
    """Return a reference's index as [0, 1], with ? where devices differ."""
    indices = [i for part in transforms for i in getattr(part, "indices", ())]
    values = [value_of(i, known) if hasattr(i, "aval") else i for i in indices]
    assert all(i is not None for i in values), UNREADABLE.format("a semaphore's index")
    same = [np.ptp(value) == 0 for value in values]
    texts = [f"{np.ravel(v)[0]}" if s else "?" for v, s in zip(values, same)]
    return f"[{', '.join(texts)}]" if texts else ""


def references(parts: list) -> list[tuple]:
    """Return variable, transforms and shape of each reference in an equation."""
    found = []
    for part, following in zip(parts, [*parts[1:], None]):
        variable = getattr(part, "ref", part)
        if not hasattr(getattr(variable, "aval", None), "inner_aval"):
            continue
        transforms = getattr(part, "transforms", following)
        transforms = transforms if isinstance(transforms, tuple) else ()
        shape = variable.aval.shape
        for transform in transforms:
            if hasattr(transform, "get_indexer_shape"):
                shape = transform.get_indexer_shape()
        found.append((variable, transforms, shape))
    return found


def target(device_id: object, known: dict) -> np.ndarray | None:
    """Return, for each device, the index of the device that its device_id names."""
    if device_id is None:
        return None
    sizes = known["mesh"]
    own = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    if isinstance(device_id, dict):  # an axis that is left out is the device's own
        named = {axis: value_of(i, known) for axis, i in device_id.items()}
        ids = [named.get(axis, index) for axis, index in zip(sizes, own)]
    else:
        ids = [value_of(i, known) for i in jax.tree.leaves(device_id)]
    message = f"device_id has {len(ids)} parts, but the mesh has {len(sizes)} axes: "
    message += "name a device by its coordinates, one for each axis"
    assert len(ids) == len(sizes), message
    assert all(i is not None for i in ids), UNREADABLE.format("a device_id")
    for i, (axis, size) in zip(ids, sizes.items()):
        outside = np.ravel(i)[(np.ravel(i) < 0) | (np.ravel(i) >= size)]
        assert not len(outside), f"there is no device {outside[:1]} along {axis!r}"
    ids = [np.broadcast_to(i, (math.prod(sizes.values()),)) for i in ids]
    return np.ravel_multi_index(ids, tuple(sizes.values()))


def event_of(equation, known: dict) -> Event | None:
    """Return what an equation does to semaphores, or None if it uses none."""
    kind = equation.primitive.name
    if kind not in ("dma_start", "dma_wait", "semaphore_signal", "semaphore_wait"):
        return None
    tree = equation.params.get("args_tree") or equation.params["tree"]
    parts = list(jax.tree.unflatten(tree, equation.invars))
    arrays, semaphores = [], []
    for variable, transforms, shape in references(parts):
        if "sem" not in str(variable.aval):
            arrays.append(math.prod(shape) * variable.aval.dtype.itemsize)
            continue
        name = known.get(variable, "a semaphore")
        semaphores.append(name + index_of(transforms, known))
    if kind == "dma_start":
        to = target(parts[-1], known)
        kind = "copy" if len(semaphores) == 1 else "send"
        return Event(kind, semaphores[::-1], 1, arrays[0], to)
    if kind == "dma_wait":
        return Event("wait", semaphores[:1], 1, 0, None)
    count = int(np.ravel(value_of(parts[2], known))[0])
    to = target(parts[3], known) if kind == "semaphore_signal" else None
    return Event(kind.removeprefix("semaphore_"), semaphores, count, 0, to)


def evaluate(equation, known: dict) -> None:
    """Evaluate an equation if its inputs are known for every device of the mesh."""
    for out in equation.outvars:
        known.pop(out, None)  # of the last iteration of a loop
    kind, params = equation.primitive.name, equation.params
    values = [value_of(atom, known) for atom in equation.invars]
    if kind == "get_barrier_semaphore":
        known[equation.outvars[0]] = "barrier"
    elif kind == "axis_index":
        sizes = known["mesh"]
        indices = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
        axis = [*sizes].index(params["axis_name"])
        known[equation.outvars[0]] = indices[axis].astype(np.int32)
    elif kind in ("program_id", "num_programs"):
        known[equation.outvars[0]] = np.int32(known[kind][params["axis"]])
    elif values and all(isinstance(v, np.ndarray | np.generic) for v in values):
        arrays = [jnp.asarray(v, a.aval.dtype) for v, a in zip(values, equation.invars)]
        try:
            result = equation.primitive.bind(*jnp.broadcast_arrays(*arrays), **params)
            [known[equation.outvars[0]]] = [np.asarray(result)]
        except Exception:  # then its result is unknown
            return


def bind(inner: list, outer: list, known: dict) -> None:
    """Make what is known of the outer variables known of the inner ones."""
    values = [value_of(atom, known) for atom in outer]
    for variable, value in zip(inner, values):
        known.pop(variable, None)
        if value is not None:
            known[variable] = value


def runs_of(equation, parts: list, known: dict) -> Iterator:
    """Yield the inner programs that an equation runs, in order, each with its inputs
    bound. Yield None if that depends on values that are not known."""
    kind, params, outer = equation.primitive.name, equation.params, equation.invars
    [part, *_] = parts
    if kind == "pallas_call":
        names = list(part.debug_info.arg_names)
        known.update(zip(part.invars, names))
        grid = params["grid_mapping"].grid
        known["num_programs"] = grid
        for step in np.ndindex(*grid):  # in order, as on a core of a TPU
            known["program_id"] = step
            yield part
    elif kind == "run_scoped":
        bind(part.constvars, outer, known)
        for variable in part.invars:
            known.setdefault(variable, f"semaphore {len(known)}")
        yield part
    elif kind == "cond":
        branch = value_of(outer[0], known)
        if branch is None or np.ptp(branch):
            yield None
            return
        part = parts[int(np.ravel(branch)[0])]
        bind(part.invars, outer[1:], known)
        yield part
        bind(equation.outvars, part.outvars, known)
    elif kind == "scan":
        carried = len(part.outvars)
        same = [v.aval.shape for v in part.invars] == [v.aval.shape for v in outer]
        if not same or len(equation.outvars) != carried:
            yield None
            return
        bind(part.invars, outer, known)
        for _ in range(params["length"]):
            yield part
            bind(part.invars[len(outer) - carried :], part.outvars, known)
        bind(equation.outvars, part.outvars, known)
    elif kind == "while":
        yield None
    else:  # jit, shard_map and other calls
        bind(part.invars, outer[len(outer) - len(part.invars) :], known)
        yield part
        bind(equation.outvars, part.outvars, known)


def events(jaxpr, known: dict) -> list[Event]:
    """Return all events of a program in order: grids and loops are unrolled."""
    found = []
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind == "shard_map":
            known["mesh"] = dict(equation.params["mesh"].shape)
        if event := event_of(equation, known):
            found.append(event)
        parts = jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda part: hasattr(part, "eqns") or hasattr(part, "jaxpr"),
        )
        parts = [getattr(part, "jaxpr", part) for part in parts]
        parts = [part for part in parts if hasattr(part, "eqns")]
        if not parts:
            evaluate(equation, known)
            continue
        within = []
        for part in runs_of(equation, parts, known):
            if part is None:
                message = UNREADABLE.format(f"what a {kind} runs")
                assert not any(map(has_events, parts)), message
                continue
            within += events(part, known)
        if kind == "pallas_call":
            params = equation.params["compiler_params"]
            if hasattr(params, "keys"):  # JAX 0.7.2
                params = dict(params).get("mosaic_tpu")
            has_id = getattr(params, "collective_id", None) is not None
            uses_barrier = any("barrier" in event.semaphores for event in within)
            message = "a kernel has a collective_id if and only if it has a barrier"
            assert has_id == uses_barrier, message
        found += within
    return found


def has_events(jaxpr) -> bool:
    """Return whether a program, or one inside it, uses semaphores."""
    return bool(re.search(r"\b(dma|semaphore)_(start|wait|signal)", str(jaxpr)))


def read_kernels(program, *arrays) -> list[Event]:
    """Return the events of all kernels in a program, in program order."""
    return events(jax.make_jaxpr(program)(*arrays).jaxpr, {})


def sent_by_kernels(program, *arrays) -> int:
    """Return the bytes that one device sends to others in kernels."""
    found = read_kernels(program, *arrays)
    return sum(event.nbytes for event in found if event.kind == "send")


def semaphore_values(program, *arrays) -> list[dict[str, np.ndarray]]:
    """Return the semaphores' values on all devices after each event, if the devices run
    in lockstep. Raise an AssertionError at the first wait that deadlocks."""
    values, after = {}, []
    for event in read_kernels(program, *arrays):
        for number, name in enumerate(event.semaphores):
            value = values.get(name, np.zeros(jax.device_count(), int))
            if event.kind == "wait":
                value = value - event.count
                assert value.min() >= 0, (
                    f"deadlock: no signal or copy ends a wait on {name!r}"
                )
            elif event.to is None or (event.kind == "send" and number == 0):
                value = value + event.count
            else:
                value = value + event.count * np.bincount(
                    event.to, minlength=len(value)
                )
            values[name] = value
        after.append(dict(values))
    return after


def why_ambiguous(name: str, found: list[Event]) -> str:
    """Return what lets two copies raise a semaphore before its device has waited."""
    copies = {s for event in found if event.nbytes for s in event.semaphores}
    sends = [
        i for i, e in enumerate(found) if e.kind == "send" and e.semaphores[1] == name
    ]
    for first, second in zip(sends, sends[1:]):
        between = [e.semaphores[0] for e in found[first:second] if e.kind == "wait"]
        others = [semaphore for semaphore in between if semaphore not in copies]
        if not others:
            return (
                "nothing makes a device wait, before it sends the next copy, until "
                "the receiver has waited for the last one"
            )
        if others == ["barrier"]:
            return "the barrier counts signals, and both may be the other neighbour's"
        to = found[second].to
        signals = [e for e in found if e.kind == "signal" and e.semaphores[0] in others]
        for signal in signals:
            if to is not None and signal.to is not None:
                if (signal.to[to] != np.arange(len(to))).any():
                    return (
                        f"{signal.semaphores[0]!r} is signalled by another device "
                        "than the one that receives the copy"
                    )
    return (
        "a signal allows the next copy before the receiver has waited for the last one"
    )


def ambiguous_semaphores(program, *arrays) -> dict[str, str]:
    """Return the semaphores whose value does not tell which of several copies arrived,
    and for each the reason.

    Device 0 is delayed before each of its events in turn, while the others run as far
    as they can. A semaphore is ambiguous if a device finds a larger value than it waits
    for, and sends before it has waited for the rest. In a program with a barrier, raise
    an AssertionError for a copy to a device that has not started the kernel."""
    found = read_kernels(program, *arrays)
    uses_barrier = any("barrier" in event.semaphores for event in found)
    barrier_waits = [e for e in found if e[:2] == ("wait", ["barrier"])]
    why_early = "the barrier does not wait for the receiver's signal"
    if len(barrier_waits) > 1:
        why_early = "the barrier is used again, so all signals may be one neighbour's"
    receiving = {event.semaphores[1] for event in found if event.kind == "send"}
    early = set()  # waits after which a send comes before the next wait of this kind
    for number, event in enumerate(found):
        if event.kind == "wait" and event.semaphores[0] in receiving:
            for later in found[number + 1 :]:
                if later.kind == "send":
                    early.add(number)
                if later.kind == "send" or (later.kind, later.semaphores) == event[:2]:
                    break
    ambiguous = set()
    for delay in range(len(found)):
        values, at = {}, [0] * jax.device_count()

        def run_event(d: int) -> bool:
            event = found[at[d]]
            name = event.semaphores[0]
            if event.kind == "wait":
                value = values.get((name, d), 0)
                if value < event.count:
                    return False
                if value > event.count and at[d] in early:
                    ambiguous.add(name)
                values[name, d] = value - event.count
            else:
                if uses_barrier and event.kind == "send" and at[0] == 0 and d:
                    to_first = event.to is not None and event.to[d] == 0
                    message = (
                        "a copy to a device that may not have started the kernel: "
                    )
                    message += why_early
                    assert not to_first, message
                for number, name in enumerate(event.semaphores):
                    here = event.to is None or (event.kind == "send" and number == 0)
                    key = name, d if here else int(event.to[d])
                    values[key] = values.get(key, 0) + event.count
            at[d] += 1
            return True

        for end in (delay, len(found)):  # device 0 stops here first
            moved = True
            while moved:
                moved = False
                for d in range(len(at)):
                    while at[d] < (len(found) if d else end) and run_event(d):
                        moved = True
    return {name: why_ambiguous(name, found) for name in sorted(ambiguous)}
