# @title Run kernels in a simulator, and read what they send and await
import contextlib
import dataclasses
import io
import logging
import math
from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def simulator(**options):
    """In this context kernels run in JAX's simulator of TPUs; on a TPU, on the chip."""
    if device.platform == "tpu":
        return contextlib.nullcontext()
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**options))


class Heard(NamedTuple):
    """What a program returned in the simulator, and what this said of it."""

    result: np.ndarray
    races: int
    words: str


def heard(program, *arrays, **options) -> Heard:
    """Run a program on emulated devices, and listen for races. It is read first, as a
    wait without end, or a copy to a device that has not begun, never comes back."""
    levels(program, *arrays)
    mixed_up(program, *arrays)
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
    words = written.getvalue()
    return Heard(result, words.count("RACE DETECTED"), words)


class Event(NamedTuple):
    """A kernel's signal, wait or copy, and the semaphores that it raises or lowers."""

    kind: str  # "signal", "wait", "copy" within a device, or "send" to another one
    semaphores: list[str]  # of a send the one here, then the one there
    count: int
    nbytes: int
    to: np.ndarray | None  # the device that each device sends or signals to


def value_of(atom, known: dict):
    """What is known of a variable or a literal: a name, or a number for each device."""
    return np.asarray(atom.val) if hasattr(atom, "val") else known.get(atom)


def index_of(transforms: list, known: dict) -> str:
    """The index of a reference as [0, 1], with ? for what differs or is not known."""
    indices = [i for part in transforms for i in getattr(part, "indices", ())]
    values = [value_of(i, known) if hasattr(i, "aval") else i for i in indices]
    same = [value is not None and np.ptp(value) == 0 for value in values]
    texts = [f"{np.ravel(v)[0]}" if s else "?" for v, s in zip(values, same)]
    return f"[{', '.join(texts)}]" if texts else ""


def references(parts: list) -> list[tuple]:
    """The references among an equation's parts: variable, transforms, shape."""
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
    """The number of the device that each device names by a tuple or a dictionary."""
    if device_id is None:
        return None
    sizes = known["mesh"]
    own = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    if isinstance(device_id, dict):  # by name; an axis that is left out is one's own
        named = {axis: value_of(i, known) for axis, i in device_id.items()}
        ids = [named.get(axis, place) for axis, place in zip(sizes, own)]
    else:
        ids = [value_of(i, known) for i in jax.tree.leaves(device_id)]
    complaint = f"a device's id has {len(ids)} parts, the mesh {len(sizes)} axes"
    assert len(ids) == len(sizes), complaint
    if any(i is None for i in ids):
        return None
    for i, (axis, size) in zip(ids, sizes.items()):
        outside = np.ravel(i)[(np.ravel(i) < 0) | (np.ravel(i) >= size)]
        assert not len(outside), f"there is no device {outside[:1]} along {axis!r}"
    ids = [np.broadcast_to(i, (math.prod(sizes.values()),)) for i in ids]
    return np.ravel_multi_index(ids, tuple(sizes.values()))


def event_of(equation, known: dict) -> Event | None:
    """What an equation of a kernel does to semaphores; None if it does nothing."""
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
    """Work out numbers that depend on nothing but the device's place in the mesh."""
    values = [value_of(atom, known) for atom in equation.invars]
    numbers = [value for value in values if isinstance(value, np.ndarray)]
    if len(numbers) == len(values) and values and len(equation.outvars) == 1:
        numbers = [
            jnp.asarray(v, a.aval.dtype) for v, a in zip(numbers, equation.invars)
        ]
        numbers = jnp.broadcast_arrays(*numbers)
        try:
            result = equation.primitive.bind(*numbers, **equation.params)
        except Exception:  # not a sum of places; then nothing is known of it
            return
        known[equation.outvars[0]] = np.asarray(result)


def events(jaxpr, known: dict) -> list[Event]:
    """All events of a program in their order; loops of known length are unrolled."""
    found = []
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind == "get_barrier_semaphore":
            known[equation.outvars[0]] = "barrier"
        if kind == "shard_map":
            known["mesh"] = dict(equation.params["mesh"].shape)
        if kind == "axis_index":
            sizes = known["mesh"]
            places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
            axis = [*sizes].index(equation.params["axis_name"])
            known[equation.outvars[0]] = places[axis].astype(np.int32)
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
                    known[here] = value  # a loop's variables change
            if kind == "pallas_call":
                known.update(zip(part.invars, part.debug_info.arg_names))
            within = events(part, known) * equation.params.get("length", 1)
            if kind == "pallas_call":
                params = equation.params["compiler_params"]
                if hasattr(params, "keys"):  # JAX 0.7.2
                    params = dict(params).get("mosaic_tpu")
                has_id = getattr(params, "collective_id", None) is not None
                meets = any("barrier" in event.semaphores for event in within)
                complaint = "a collective_id and a barrier belong together"
                assert has_id == meets, complaint
            found += within
            if kind in ("jit", "pjit"):
                for here, there in zip(part.outvars, equation.outvars):
                    if (value := value_of(here, known)) is not None:
                        known[there] = value
        if not inner:
            evaluate(equation, known)
    return found


def read_kernels(program, *arrays) -> list[Event]:
    """The events of all kernels in a program, as a device meets them."""
    return events(jax.make_jaxpr(program)(*arrays).jaxpr, {})


def sent_by_kernels(program, *arrays) -> int:
    """Bytes that one device sends to others in kernels."""
    found = read_kernels(program, *arrays)
    return sum(event.nbytes for event in found if event.kind == "send")


def levels(program, *arrays) -> list[dict[str, np.ndarray]]:
    """The semaphores of all devices after each event, if they take each step together;
    an AssertionError at the first wait that nothing before it ends."""
    now, after = {}, []
    for event in read_kernels(program, *arrays):
        for number, name in enumerate(event.semaphores):
            level = now.get(name, np.zeros(jax.device_count(), int))
            if event.kind == "wait":
                level = level - event.count
                assert level.min() >= 0, f"a wait for ever, on {name}"
            elif event.to is None or (event.kind == "send" and number == 0):
                level = level + event.count
            else:
                level = level + event.count * np.bincount(
                    event.to, minlength=len(level)
                )
            now[name] = level
        after.append(dict(now))
    return after


def mixed_up(program, *arrays) -> set[str]:
    """The semaphores that do not say which copy has arrived. Device 0 is held back at
    each of its events, while the others go on as far as they can: does anybody find
    more than it waits for, and send on before it has waited for the rest? If they meet
    at a barrier, an AssertionError where a copy goes to it before it has begun."""
    found = read_kernels(program, *arrays)
    meets = any("barrier" in event.semaphores for event in found)
    receiving = {event.semaphores[1] for event in found if event.kind == "send"}
    hasty = set()  # waits after which something is sent before the next such wait
    for number, event in enumerate(found):
        if event.kind == "wait" and event.semaphores[0] in receiving:
            for later in found[number + 1 :]:
                if later.kind == "send":
                    hasty.add(number)
                if later.kind == "send" or (later.kind, later.semaphores) == event[:2]:
                    break
    mixed = set()
    for hold in range(len(found)):
        level, at = {}, [0] * jax.device_count()

        def go(d: int) -> bool:
            event = found[at[d]]
            name = event.semaphores[0]
            if event.kind == "wait":
                there = level.get((name, d), 0)
                if there < event.count:
                    return False
                if there > event.count and at[d] in hasty:
                    mixed.add(name)
                level[name, d] = there - event.count
            else:
                if meets and event.kind == "send" and at[0] == 0 and d:
                    early = event.to is not None and event.to[d] == 0
                    assert not early, "a copy goes to a device that may not have begun"
                for number, name in enumerate(event.semaphores):
                    here = event.to is None or (event.kind == "send" and number == 0)
                    key = name, d if here else int(event.to[d])
                    level[key] = level.get(key, 0) + event.count
            at[d] += 1
            return True

        for end in (hold, len(found)):  # of device 0, which then goes on
            moved = True
            while moved:
                moved = False
                for d in range(len(at)):
                    while at[d] < (len(found) if d else end) and go(d):
                        moved = True
    return mixed
