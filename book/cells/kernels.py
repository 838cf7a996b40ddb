# @title Simulate kernels, and read their copies and semaphores
import contextlib
import dataclasses
import io
import logging
import math
from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def simulator(**options):
    """Return a context in which kernels run in JAX's TPU simulator; on a TPU, on it."""
    if device.platform == "tpu":
        return contextlib.nullcontext()
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
    """Return a reference's index as [0, 1], with ? where it is unknown or differs."""
    indices = [i for part in transforms for i in getattr(part, "indices", ())]
    values = [value_of(i, known) if hasattr(i, "aval") else i for i in indices]
    same = [value is not None and np.ptp(value) == 0 for value in values]
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
    message = f"device_id has {len(ids)} parts, but the mesh has {len(sizes)} axes"
    assert len(ids) == len(sizes), message
    if any(i is None for i in ids):
        return None
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
        name = known.setdefault(variable, f"semaphore {len(known)}")
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
    """Evaluate an equation whose inputs are known for every device of the mesh."""
    values = [value_of(atom, known) for atom in equation.invars]
    numbers = [value for value in values if isinstance(value, np.ndarray)]
    if len(numbers) == len(values) and values and len(equation.outvars) == 1:
        numbers = [
            jnp.asarray(v, a.aval.dtype) for v, a in zip(numbers, equation.invars)
        ]
        numbers = jnp.broadcast_arrays(*numbers)
        try:
            result = equation.primitive.bind(*numbers, **equation.params)
        except Exception:  # then its result is unknown
            return
        known[equation.outvars[0]] = np.asarray(result)


def events(jaxpr, known: dict) -> list[Event]:
    """Return all events of a program in order, with loops of known length unrolled."""
    found = []
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind == "get_barrier_semaphore":
            known[equation.outvars[0]] = "barrier"
        if kind == "shard_map":
            known["mesh"] = dict(equation.params["mesh"].shape)
        if kind == "axis_index":
            sizes = known["mesh"]
            indices = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
            axis = [*sizes].index(equation.params["axis_name"])
            known[equation.outvars[0]] = indices[axis].astype(np.int32)
        if event := event_of(equation, known):
            found.append(event)
        inner = jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda part: hasattr(part, "eqns") or hasattr(part, "jaxpr"),
        )
        inner = [getattr(part, "jaxpr", part) for part in inner]
        inner = [part for part in inner if hasattr(part, "eqns")]
        for part in inner:
            outer = equation.invars[len(equation.invars) - len(part.invars) :]
            for here, there in zip(part.invars, outer):
                value = value_of(there, known)
                if isinstance(value, str) or (value is not None and kind != "scan"):
                    known[here] = value  # not of a scan, whose variables change
            if kind == "pallas_call":
                known.update(zip(part.invars, part.debug_info.arg_names))
            within = events(part, known) * equation.params.get("length", 1)
            if kind == "pallas_call":
                params = equation.params["compiler_params"]
                if hasattr(params, "keys"):  # JAX 0.7.2
                    params = dict(params).get("mosaic_tpu")
                has_id = getattr(params, "collective_id", None) is not None
                uses_barrier = any("barrier" in event.semaphores for event in within)
                message = "a kernel has a collective_id if and only if it has a barrier"
                assert has_id == uses_barrier, message
            found += within
            if kind in ("jit", "pjit"):
                for here, there in zip(part.outvars, equation.outvars):
                    if (value := value_of(here, known)) is not None:
                        known[there] = value
        if not inner:
            evaluate(equation, known)
    return found


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
                assert value.min() >= 0, f"deadlock: nothing ends a wait on {name}"
            elif event.to is None or (event.kind == "send" and number == 0):
                value = value + event.count
            else:
                value = value + event.count * np.bincount(
                    event.to, minlength=len(value)
                )
            values[name] = value
        after.append(dict(values))
    return after


def ambiguous_semaphores(program, *arrays) -> set[str]:
    """Return the semaphores whose value does not tell which of several copies arrived.

    Device 0 is delayed before each of its events in turn, while the others run as far
    as they can. A semaphore is ambiguous if a device finds a larger value than it waits
    for, and sends before it has waited for the rest. In a program with a barrier, raise
    an AssertionError for a copy to a device that has not started the kernel."""
    found = read_kernels(program, *arrays)
    uses_barrier = any("barrier" in event.semaphores for event in found)
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
                    message = "a copy to a device that may not have started the kernel"
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
    return ambiguous
