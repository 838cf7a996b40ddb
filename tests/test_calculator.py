"""The calculator of a step counts as chapter 26 does, and its page shows it."""

import math
import random
import re
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import form
import numpy as np
import pytest
from form import answer, state, table, type_in
from playwright.sync_api import Browser, Page, expect

TAKEN = """GB GiB Chip CHIPS step_flops all_reduce_sent all_gather_sent
data_parallel_sent fully_sharded_sent tensor_parallel_sent Recipe state_bytes Estimate
estimate binds least_seconds most_seconds flops_per_byte least_tokens most_ways
Transformer layer_parameters parameters multiplied attention_flops kept_bytes Layout
sent_bytes hops_and_bytes latency one_way"""
SIZES = "layers width hidden heads kv_heads head_size vocabulary".split()
AXES = ["data", "fsdp", "model"]
MODES = ["train", "adapters", "generate"]
RECIPES = {"Adam f32": (2, 2, 12), "Adam bf16": (2, 2, 4), "SGD": (2, 2, 0)}
GATHERS = {"once": 1, "twice": 2}
BASES = {  # bytes of a frozen weight [out, in] with its scales
    "bfloat16": lambda out, into: 2 * out * into,
    "int8": lambda out, into: out * into + 4 * out,
    "int4": lambda out, into: out * into / 2 + 4 * out * into / 64,
}
BY_ROWS, BY_POSITIONS = "by key heads and rows", "by key heads and positions"
CACHES = ["by key heads", BY_POSITIONS, BY_ROWS, "whole"]
MORE_CHIPS = ["A100", "H200", "B200"]
CHOSEN = {"for": "train", "chip": "TPU v5e", "recipe": "Adam f32", "gathers": "twice"}
CHOSEN |= {"gated": "yes", "recompute": "every layer", "base": "bfloat16"}
CHOSEN |= {"cache": "by key heads", "weight_bytes": 2, "cache_bytes": 2}
FIRST = form.sizes_at_first("calculator") | CHOSEN
GENERATES = {"for": "generate"}
ADAPTERS, GENERATE = FIRST | {"for": "adapters"}, FIRST | GENERATES
POSITIONS_CUT = {"kv_heads": 2, "cache": BY_POSITIONS}
ROWS_CUT = {"kv_heads": 2, "cache": BY_ROWS}
ONE_H100 = GENERATES | {"chip": "H100", "ways": 1, "rows": 32}
COUNT = """
  const C = Calculator, G = C.generate;
  const at = (texts.for === "generate" ? G : C).read(texts);
  const price = (count) => ({ ...count(at),
    best: C.leastSeconds(at, count), worst: C.mostSeconds(at, count) });
  if (texts.for === "generate") return {
    weights: C.weights(at), row: G.rowBytes(at), sent: G.sent(at), held: G.held(at),
    times: price(G.decodeTimes), first: price(G.prefillTimes),
    binds: C.binds(G.decodeTimes(at)),
    most: G.mostRows(at), critical: G.criticalRows(at),
  };
  const limits = Object.values(C.limits(at));
  return {
    weights: C.weights(at), multiplied: C.multiplied(at), flops: C.stepFlops(at),
    attention: C.attentionFlops(at), again: C.againFlops(at),
    sent: C.sent(at), held: C.held(at), times: price(C.times),
    binds: C.binds(C.times(at)),
    has: limits.map(({ has }) => has), needs: limits.map((o) => o.above ?? o.below),
  };"""

chapter = form.defined("26_cost_models", TAKEN, NamedTuple=NamedTuple)


def count(browser: Browser, cases: list[dict]) -> list[dict | list]:
    """What the script counts for each case, or the field and words of its refusal."""
    return form.counted(browser, "calculator.js", COUNT, cases)


# ----------------------------------------------------- what the chapter's functions say


def model_of(case: dict) -> NamedTuple:
    """The sizes of a case as the chapter's model."""
    return chapter.Transformer(*[case[n] for n in SIZES], gated=case["gated"] == "yes")


def wire_speed(case: dict, axis: str, axes: int) -> float:
    """Bytes/s of the rings along an axis of the mesh, by counting devices off."""
    chip, links = case["chip"], axes * chapter.CHIPS[case["chip"]].axis_speed
    places = np.arange(case["devices"]).reshape([case[name] for name in AXES])
    rings = np.moveaxis(places, AXES.index(axis), -1).reshape(-1, case[axis])
    nodes = rings // case["node"]
    if chip.startswith("TPU") or (nodes == nodes[:, :1]).all():
        return links
    inner = np.prod([case[name] for name in AXES[AXES.index(axis) + 1 :]], dtype=int)
    members = max(1, case["node"] // inner)
    return min(links, members * case["network"] * 1e9)


def price(case: dict, flops: float, sent: dict, moved: float, latency=0.0) -> dict:
    """Seconds that a device's part of a step takes. sent: its bytes along each axis."""
    steps = []
    for axes in (case["axes"], 1):
        wires = sum(size / wire_speed(case, axis, axes) for axis, size in sent.items())
        step = chapter.estimate(flops, 0, chapter.CHIPS[case["chip"]], axes, moved)
        steps.append(step._replace(wires=wires + latency))
    ends = {"best": chapter.least_seconds(steps[0])}
    return steps[0]._asdict() | ends | {"worst": chapter.most_seconds(steps[1])}


def binds(times: dict[str, float]) -> str:
    """The name of the longest of the times."""
    return max(chapter.Estimate._fields, key=times.get)


def beside(case: dict) -> SimpleNamespace:
    """Bytes of a case's weights as they are stored, and what adapters add to them,
    matrix by matrix: nothing, where all weights are trained."""
    c, is_frozen = SimpleNamespace(**case), case["for"] == "adapters"
    stored = BASES[c.base if is_frozen else "bfloat16"]
    rank = c.rank if is_frozen else 0
    q, k = c.heads * c.head_size, c.kv_heads * c.head_size
    into = [q, k, k] + [c.hidden] * (2 if c.gated == "yes" else 1)  # cut by rows
    layer = [(out, c.width, c.model, 1) for out in into]
    layer += [(c.width, size, 1, c.model) for size in (q, c.hidden)]  # cut by columns
    found = SimpleNamespace(is_frozen=is_frozen, between=rank * len(layer))
    found.layer = sum(stored(out, into) for out, into, *_ in layer)
    found.all = c.layers * found.layer + 2 * BASES["bfloat16"](c.vocabulary, c.width)
    sides = [out / rows + into / columns for out, into, rows, columns in layer]
    found.added = c.layers * rank * sum(sides)
    found.last = c.layers * rank * c.width  # the second beside a layer's last product
    found.summed = rank * (len(layer) + (2 if c.recompute == "every layer" else 0))
    found.gathered = chapter.all_gather_sent(found.all / c.model, c.fsdp)
    return found


def trains(case: dict) -> SimpleNamespace:
    """What the chapter counts for a step that trains, by its functions and words."""
    c, model, base = SimpleNamespace(**case), model_of(case), beside(case)
    again, gathers = c.recompute == "every layer", GATHERS[c.gathers]
    found = SimpleNamespace(weights=chapter.parameters(model))
    found.multiplied = chapter.multiplied(model)
    found.flops = chapter.step_flops(found.multiplied, c.tokens)
    found.flops *= 4 / 6 if base.is_frozen else 1
    found.flops += chapter.step_flops(base.added * c.model, c.tokens)
    found.attention = chapter.attention_flops(model, c.tokens, c.sequence)
    twice = c.layers * (chapter.layer_parameters(model) - c.width * c.hidden)
    twice += c.model * (base.added - base.last)
    found.again = (2 * twice * c.tokens + found.attention / 3) * again

    cuts, here = c.fsdp * c.model, c.tokens / (c.data * c.fsdp)
    layout = chapter.Layout(c.data, c.fsdp, c.model)
    found.sent = chapter.sent_bytes(model, c.tokens, layout, gathers)
    trained, frozen = (found.weights, cuts), 0
    if base.is_frozen:
        trained, frozen = (base.added, 1), base.all / cuts
        summed = chapter.all_reduce_sent(2 * base.added, c.fsdp)
        found.sent["data"] = chapter.all_reduce_sent(2 * base.added / c.fsdp, c.data)
        found.sent["fsdp"] = gathers * base.gathered + summed
    found.sent["model"] *= 5 / 4 if again else 1
    between = chapter.all_reduce_sent(2 * here * base.summed, c.model)
    found.sent["model"] += c.layers * between
    found.held = {"frozen": frozen} | {
        name: chapter.state_bytes(*trained, chapter.Recipe(size, 0, 0))
        for name, size in zip(["weight", "gradient", "state"], RECIPES[c.recipe])
    }
    # weights that stay until the way back, beside a device's own
    found.held["gathered"] = base.gathered * (gathers == 1)
    cut = 2 * c.head_size * (c.heads + c.kv_heads)
    cut += (3 if c.gated == "yes" else 2) * c.hidden
    of_token = 4 * c.width + cut / c.model + base.between
    whole = chapter.kept_bytes(1, here, of_token)
    found.held["kept"] = c.layers * whole
    if again:
        found.held["kept"] = chapter.kept_bytes(c.layers, here, c.width)
    at_work = base.layer / c.model * (gathers == 2)
    found.held["layer"] = chapter.all_gather_sent(at_work, c.fsdp) + whole * again
    found.held["logits"] = 2 * 4 * here * c.vocabulary / c.model

    flops = found.flops + found.attention + found.again
    moved = 2 * sum(found.held.values()) - frozen
    found.times = price(case, flops / c.devices, found.sent, moved)
    speeds = [wire_speed(case, axis, c.axes) for axis in AXES]
    found.has = [c.tokens / c.data, here, c.model]
    found.needs = [chapter.CHIPS[c.chip].flops / speed for speed in speeds]
    found.needs[2] = c.hidden / found.needs[2]
    return found


def generates(case: dict) -> SimpleNamespace:
    """What the chapter's functions make of a case that generates, by the page."""
    c, model, ways = SimpleNamespace(**case), model_of(case), case["ways"]
    rows, weight_bytes = c.rows / c.replicas, float(c.weight_bytes)
    key = math.gcd(c.kv_heads, ways)  # the mesh of chapter 30: (key, group)
    group = ways // key
    without = chapter.layer_parameters(model._replace(kv_heads=0))
    of_keys = c.layers * (chapter.layer_parameters(model) - without)

    def part(weights: int) -> float:
        """A device's part of weights; those of keys and values are cut by key heads."""
        return (weights - of_keys) / ways + of_keys / key

    cuts = {"by key heads": [1, 1, key], BY_ROWS: [group, 1, key], "whole": [1, 1, 1]}
    cuts[BY_POSITIONS] = [1, group, key]
    shard = np.divide([rows, c.positions, c.kv_heads], cuts[c.cache])
    of_head = 2 * c.layers * c.head_size * c.cache_bytes
    found = SimpleNamespace(weights=chapter.parameters(model))
    found.row = of_head * c.positions * c.kv_heads
    found.held = {"weight": weight_bytes * part(found.weights)}
    found.held["cache"] = of_head * np.prod(shard)
    found.held["logits"] = 4 * rows * c.vocabulary / ways
    read = {"weights": weight_bytes * part(chapter.multiplied(model))}
    read["cache"] = found.held["cache"] / (key if c.cache == "whole" else 1)

    q, k = (2 * rows * n * c.head_size for n in (c.heads, c.kv_heads))
    summed, gathered = chapter.all_reduce_sent, chapter.all_gather_sent
    softmax = 4 * rows * c.heads / key
    for_cache = {  # [what the ring does, bytes, devices]; an all-to-all is as a gather
        "by key heads": [],
        BY_POSITIONS: [(gathered, q / key, group)] * 2
        + [(ring, softmax, group) for ring in (summed, gathered)],
        BY_ROWS: [(gathered, q / ways, group)] * 2,
        "whole": [(gathered, k, key)] * 2,
    }[c.cache] * c.layers

    def sums(tokens: float) -> list[tuple]:
        return [(summed, 2 * tokens * c.width, ways)] * (2 * c.layers + 1)

    def sent(rings: list[tuple]) -> float:
        return sum(ring(size, n) for ring, size, n in rings)

    def timed(products: float, scores: float, rings: list, moved: float) -> dict:
        """A third of what a step of training takes, which goes there and back twice."""
        latency = sum(  # a gather has half the hops of a sum
            chapter.hops_and_bytes(0, n)[0] / (1 if ring is summed else 2)
            for ring, _, n in rings
        )
        flops = products / 3 + scores / 3 / ways
        return price(case, flops, {"model": sent(rings)}, moved, latency)

    found.sent = {"sums": sent(sums(rows)), "cache": sent(for_cache)}
    products = chapter.step_flops(part(chapter.multiplied(model)), rows)
    scores = chapter.attention_flops(model, rows, c.positions)
    moved = sum(read.values())
    found.times = timed(products, scores, sums(rows) + for_cache, moved)
    products = part(c.layers * chapter.layer_parameters(model)) * c.prompt
    products = chapter.step_flops(products + c.vocabulary * c.width / ways, 1)
    scores = chapter.attention_flops(model, c.prompt, c.prompt)
    peak = c.used / 100
    rings = sums(c.prompt)
    found.first = timed(products / peak, scores / peak, rings, read["weights"])
    found.read = read
    return found


def by_the_chapter(case: dict) -> SimpleNamespace:
    """What the chapter counts for a case."""
    if case["for"] == "generate":
        mesh = {"data": case["replicas"], "fsdp": 1, "model": case["ways"]}
        mesh |= {"devices": case["replicas"] * case["ways"]}
        found = generates(case | mesh)
    else:
        found = trains(case)
    found.best, found.worst = found.times["best"], found.times["worst"]
    found.binds = binds(found.times)
    return found


# --------------------------------------------------------------- what the script counts


def random_case(rng: random.Random, mode: str) -> dict:
    """A chip, a layout, and sizes that it divides."""
    sizes = [1, 1, 2, 3, 4, 8, 16 if mode == "generate" else 64]
    data, fsdp, model = layout = [rng.choice(sizes) for _ in AXES]
    chip = rng.choice(list(chapter.CHIPS))
    kv_heads = rng.choice([1, 2, 3, 4, 6, 8])
    sequence = rng.choice([1, 30, 2048])
    positions = rng.choice([1, 1, 32, 4096]) * 3 * model
    return dict(zip(AXES, layout)) | {
        "for": mode,
        "devices": data * fsdp * model,
        "replicas": data,
        "ways": model,
        "chip": chip,
        "axes": rng.randint(1, chapter.CHIPS[chip].axes),
        "node": rng.choice([1, 4, 8]),
        "network": rng.randint(1, 500),
        "layers": rng.randint(1, 90),
        "width": rng.randint(1, 900) * fsdp,
        "hidden": rng.randint(1, 2000) * model,
        "heads": rng.randint(1, 4) * math.lcm(kv_heads, model),
        "kv_heads": kv_heads,
        "head_size": rng.randint(1, 256),
        "vocabulary": rng.randint(1, 2000) * model,
        "gated": rng.choice(["yes", "no"]),
        "tokens": rng.randint(1, 20) * sequence * data * fsdp,
        "sequence": sequence,
        "recipe": rng.choice(list(RECIPES)),
        "gathers": rng.choice(list(GATHERS)),
        "recompute": rng.choice(["every layer", "nothing"]),
        "rank": rng.choice([1, 4, 16, 300]),
        "base": rng.choice(list(BASES)),
        "rows": rng.choice([1, 4, 60, 6000]) * data * model,
        "positions": positions,
        "prompt": rng.randint(1, positions),
        "used": rng.randint(1, 100),
        "cache": rng.choice(CACHES),
        "weight_bytes": rng.choice([4, 2, 1, 0.5]),
        "cache_bytes": rng.choice([4, 2, 1]),
    }


@pytest.fixture(scope="module")
def counted(browser) -> dict[str, list[tuple[dict, dict]]]:
    """For each mode random cases, each with what the script counts for it."""
    found = {}
    for mode in MODES:
        rng = random.Random(mode)
        cases = [random_case(rng, mode) for _ in range(600)]
        found[mode] = list(zip(cases, count(browser, cases)))
    return found


def test_chips_are_the_chapters(browser):
    question = "() => [Calculator.CHIPS, Calculator.RECIPES]"
    chips, recipes = form.asked(browser, "calculator.js", question)
    assert [name for name in chips if name not in chapter.CHIPS] == MORE_CHIPS
    for name, chip in chapter.CHIPS.items():
        assert chips[name] == list(chip)
    assert recipes == {name: list(sizes) for name, sizes in RECIPES.items()}
    assert RECIPES["Adam f32"] == chapter.Recipe()


ALONE = chapter.Estimate._fields
TRAINING = [*AXES, *RECIPES, *GATHERS, "every layer", "nothing"]
SEEN = {  # what random cases have to have seen, beside each time that may bind
    "train": [*TRAINING, *chapter.CHIPS, "yes", "no"],
    "adapters": [*TRAINING, *BASES],
    "generate": [*CACHES, "repeated", *(f"first {name}" for name in ALONE)],
}


@pytest.mark.parametrize("mode", MODES)
def test_counts_as_the_chapter_does(counted, mode):
    seen = Counter()
    for case, found in counted[mode]:
        expected = by_the_chapter(case)
        for name in found.keys() - {"binds", "most", "critical"}:
            number = pytest.approx(getattr(expected, name), rel=1e-12)
            assert found[name] == number, (name, case)
        assert found["binds"] == expected.binds, case
        seen.update([found["binds"], *map(str, case.values())])
        seen.update(axis for axis in AXES if found["sent"].get(axis))
        if mode == "generate":
            seen["first " + binds(found["first"])] += 1
            seen["repeated"] += case["kv_heads"] % case["ways"] > 0
    for kind in [*ALONE, *SEEN[mode]]:
        assert seen[kind] >= 20, (kind, seen)


def test_gradients_of_adapters_are_summed_as_in_one_ring(counted):
    """Along `data` and `fsdp` together, however the devices are shared between them."""
    for case, found in counted["adapters"]:
        gathered = GATHERS[case["gathers"]] * beside(case).gathered
        shards = case["data"] * case["fsdp"]
        summed = chapter.all_reduce_sent(2 * beside(case).added, shards)
        sent = found["sent"]["data"] + found["sent"]["fsdp"]
        assert sent == pytest.approx(gathered + summed), case


def test_inequalities_are_those_of_the_tightest_pass(counted):
    """On many devices, in any mixture of the axes: sums of gradients hide behind the
    way back, the first gathers and an MLP's first sum behind the way forward."""
    holds = {axis: Counter() for axis in AXES}
    for case, found in counted["train"]:
        if not case["chip"].startswith("TPU"):
            continue  # whose axes may have wires of their own
        c, model = SimpleNamespace(**case), model_of(case)
        layout = chapter.Layout(c.data, c.fsdp, c.model)
        sent = chapter.sent_bytes(model, c.tokens, layout)
        weights = chapter.parameters(model)
        block = 2 * c.width * c.hidden  # weights of an MLP with two matrices
        passes = {  # FLOPs, and the bytes that have to hide behind them
            "data": (4 * weights, sent["data"]),
            "fsdp": (2 * weights, sent["fsdp"] / 3),
            "model": (2 * block, sent["model"] / (4 * c.layers)),
        }
        for place, (axis, (flops, nbytes)) in enumerate(passes.items()):
            n = case[axis]
            if n == 1:
                continue
            each = flops * c.tokens / c.devices, nbytes * n / (n - 1)
            times = chapter.estimate(*each, chapter.CHIPS[c.chip], c.axes)
            has, needs = found["has"][place], found["needs"][place]
            fulfilled = has < needs if axis == "model" else has > needs
            assert fulfilled == (times.arithmetic > times.wires), (axis, case)
            holds[axis][fulfilled] += 1
    for axis, counts in holds.items():
        assert min(counts[True], counts[False]) >= 20, (axis, counts)


def test_largest_and_critical_batch(browser, counted):
    """As many rows as are said fit, are accepted, and one more for each replica does
    not fit; arithmetic takes longer than the memory beyond the critical rows alone."""
    proposed, kinds = [], Counter()
    for case, found in counted["generate"]:
        group = case["ways"] // math.gcd(case["kv_heads"], case["ways"])
        step = case["replicas"] * (group if case["cache"] == BY_ROWS else 1)

        def share(rows: int) -> float:
            held = by_the_chapter(case | {"rows": rows}).held
            return sum(held.values()) / chapter.CHIPS[case["chip"]].memory

        assert found["most"] % step == 0
        assert share(found["most"] + step) > 0.9 * (1 - 1e-9), case
        if found["most"]:
            assert share(found["most"]) <= 0.9 * (1 + 1e-9), case
            proposed.append(case | {"rows": found["most"]})
        times, critical = found["times"], found["critical"]
        over = case["rows"] / case["replicas"] > critical
        assert over == (times["arithmetic"] > times["memory"]), case
        kinds.update([over, critical < math.inf])
    assert min(len(proposed), *kinds.values()) > 30, kinds
    for case in count(browser, proposed):
        assert not isinstance(case, list), case


# Chapter 30's bill: what a layer holds of its cache and sends for it, without the sums.
BILL = {"whole": (524_288, 1_024), "by key heads": (262_144, 0)}
BILL |= {BY_POSITIONS: (65_536, 3_360), BY_ROWS: (65_536, 768)}
ONE_LAYER = {"layers": 1, "width": 64, "hidden": 128, "heads": 8, "kv_heads": 2}
ONE_LAYER |= {"head_size": 16, "vocabulary": 320}
ONE_LAYER |= {"rows": 8, "positions": 256, "prompt": 1, "cache_bytes": 4}


def test_layouts_hold_and_send_as_chapter_30_measures(browser):
    """The chapter sends float32; of what the page counts, the softmax alone does."""
    cases = [GENERATE | ONE_LAYER | {"cache": cache} for cache in BILL]
    for (cache, (held, sent)), found in zip(BILL.items(), count(browser, cases)):
        softmax = 288 if cache == BY_POSITIONS else 0
        assert found["held"]["cache"] == held, cache
        assert found["sent"]["cache"] == (sent - softmax) / 2 + softmax, cache
        assert found["sent"]["sums"] * 2 == 7_168 * 3 / 2  # and that of the embedding


# A model of 230,000 weights whose step was compiled for eight emulated devices.
SMALL = {"layers": 4, "width": 64, "hidden": 192, "heads": 8, "kv_heads": 2}
SMALL |= {"head_size": 8, "vocabulary": 320, "tokens": 512, "sequence": 32}
SMALL |= {"devices": 8, "rank": 4, "gathers": "once", "recompute": "nothing"}
WHOLE, CUT = {"data": 8, "fsdp": 1}, {"data": 1, "fsdp": 8}
NORMS = 9 * 64  # numbers; and bytes that the other devices have, where all is cut:
SCALES, TABLES = 7 / 8 * 4 * 4 * 608, 7 / 8 * 2 * 2 * 320 * 64
BF16, INT8 = ({"for": "adapters", "base": base} for base in ("bfloat16", "int8"))
COMPILED = {  # given to a device, sent by it, and what the page leaves out of both
    "all weights": (WHOLE, 2_759_684, 1_609_671, 12 * NORMS, 7 / 4 * 4 * NORMS),
    "bfloat16": (WHOLE | BF16, 687_492, 132_615, 2 * NORMS, 0),
    "int8": (WHOLE | INT8, 508_804, 132_615, 2 * NORMS, 0),
    # what the CPU's compiler gathers of bfloat16, it gathers as float32
    "bfloat16, cut": (CUT | BF16, 286_084, 935_431, 2 * NORMS, 7 / 8 * 458_752),
    # there the layers are constrained to be gathered as int8, and have whole scales
    "int8, cut": (CUT | INT8, 272_260, 440_839, 2 * NORMS + SCALES, TABLES - SCALES),
}


@pytest.mark.parametrize("words", COMPILED)
def test_small_step_is_given_and_sends_as_compiled(browser, words):
    """The program trains in float32: of the 16 bytes for a weight that is trained, 4
    are its gradient, which is sent, and the others are given."""
    changes, given, sent, more_given, more_sent = COMPILED[words]
    case = FIRST | SMALL | changes
    found, ring = count(browser, [case, case | WHOLE])
    held, count_and_tokens = found["held"], 4 + 16 * 32 * 4 / 8
    state = held["weight"] + held["gradient"] + held["state"]
    assert given == held["frozen"] + 12 / 16 * state + more_given + count_and_tokens
    summed, loss = ring["sent"]["data"], 7 / 4 * 4
    gathered = found["sent"]["data"] + found["sent"]["fsdp"] - summed
    assert sent == pytest.approx(gathered + 2 * summed + more_sent + loss)


def test_small_step_multiplies_as_compiled(browser):
    """All products of a compiled step; the first layer sends nothing to its table."""
    cases = [FIRST | SMALL | WHOLE | more for more in ({}, BF16)]
    every, adapters = count(browser, cases)
    assert every["flops"] + every["attention"] == 692_060_160
    first = 512 * (2 * 64 * (64 + 2 * 16) + 3 * 2 * 64 * 4)
    assert adapters["flops"] + adapters["attention"] - first == 529_268_736


# Another model, on 2 x 4 devices: sums along `data` for a rank of 4, and what a rank of
# 16 adds to those along `model`, in float32.
BY_WAYS = {"layers": 2, "width": 256, "hidden": 1024, "heads": 8, "kv_heads": 4}
BY_WAYS |= {"head_size": 32, "vocabulary": 512, "tokens": 512, "sequence": 32}
BY_WAYS |= {"devices": 8, "data": 2, "fsdp": 1, "model": 4}
ADDED = {"nothing": 258_048, "every layer": 331_776}


@pytest.mark.parametrize("again", ADDED)
def test_adapters_send_along_model_as_compiled(browser, again):
    cases = [ADAPTERS | BY_WAYS | {"rank": r, "recompute": again} for r in (4, 16)]
    few, many = (found["sent"] for found in count(browser, cases))
    assert 2 * few["data"] == 88_064 and 2 * many["data"] == 352_256
    assert 2 * (many["model"] - few["model"]) == ADDED[again]


# ------------------------------------------------------------------- what it refuses

REFUSED = {
    "train": [
        ({"model": 3}, "devices", "model = 192. Write 192, or change data, fsdp or"),
        ({"axes": 3}, "axes", "Axes of links is 3, and TPU v5e has 2. Write 1 to 2."),
        ({"chip": "H100", "axes": 2}, "axes", "H100 has 1. Write 1."),
        ({"kv_heads": 5}, "heads", "many queries. Try 35, or change Key heads."),
        ({"width": 10**9, "fsdp": 7, "devices": 7}, "width", "there. Change fsdp."),
        ({"model": 3, "devices": 192}, "heads", "Heads is 32, and model = 3 does not"),
        ({"heads": 5, "model": 3, "devices": 192}, "heads", "Try 24, or change Key"),
        ({"model": 2, "devices": 128, "hidden": 3}, "hidden", "Try 4, or change model"),
        ({"model": 2, "devices": 128, "vocabulary": 7}, "vocabulary", "Try 8, or"),
        ({"sequence": 3000}, "tokens", "length × data × fsdp = 192,000 does"),
        ({"data": 8, "devices": 512}, "tokens", "Try 1,048,576, or change Sequence"),
        ({"layers": 0}, "layers", "Layers is 0. Write 1 or more."),
        ({"layers": "64.5"}, "layers", 'cannot read "64.5" as a whole number'),
        ({"layers": ""}, "layers", 'Layers: cannot read ""'),
        ({"layers": -2}, "layers", 'Layers: cannot read "-2"'),
        ({"layers": 10**10}, "layers", "Write at most 1,000,000,000."),
        ({"layers": 10**8}, "width", "Take a smaller width."),
        ({"layers": 10**6, "tokens": 2**29}, "tokens", "Take fewer tokens."),
    ],
    "adapters": [
        ({"rank": "low"}, "rank", 'Rank: cannot read "low" as a whole number'),
        ({"rank": 10**9}, "rank", "Take a lower rank."),
        ({"fsdp": 12, "devices": 12}, "width", "Width is 4,096, and fsdp = 12 does"),
    ],
    "generate": [
        ({"prompt": 9000}, "prompt", "is 8,192. Write at most that, or more positions"),
        ({"used": 101}, "used", "Write at most 100."),
        ({"ways": 3}, "heads", "Heads is 32, and Ways = 3 does not divide it."),
        ({"replicas": 3}, "rows", "equally many rows. Try 66, or change Replicas."),
        (ROWS_CUT | {"rows": 9}, "rows", "Try 12, or change Replicas or ways to a key"),
        (POSITIONS_CUT | {"positions": 8190}, "positions", "ways to a key head = 4 do"),
        ({"replicas": 10**9, "rows": 10**9}, "ways", "Write at most 1 way"),
        ({"rows": "many"}, "rows", 'Rows: cannot read "many" as a whole number'),
        ({"layers": 10**8}, "width", "Take a smaller width."),
        ({"layers": 10**5, "rows": 10**9, "cache": "whole"}, "rows", "fewer rows."),
    ],
}


@pytest.mark.parametrize("mode", MODES)
def test_refusals_name_the_field_and_say_what_to_do(browser, mode):
    first = FIRST | {"for": mode}
    form.check_refusals(browser, "calculator.js", COUNT, first, REFUSED[mode])


def test_fields_of_other_modes_are_not_read(browser):
    others = {"rank": "low", "ways": 0, "positions": ""}
    assert count(browser, [FIRST | others]) == count(browser, [FIRST])


def test_no_proposal_is_refused(browser, counted):
    """What a refusal tells one to try instead is accepted, at least in that field."""
    rng, cases, proposed = random.Random(28), [], Counter()
    sizes = ["heads", "hidden", "vocabulary", "width", "tokens", "rows", "positions"]
    for case, _ in sum(counted.values(), []):
        cases.append(case | {rng.choice(sizes): rng.randint(1, 10**9)})
    again = []
    for case, said in zip(cases, count(browser, cases)):
        if isinstance(said, list) and (cure := re.search(r"Try ([\d,]+)", said[1])):
            again.append(case | {said[0]: cure[1]})
            proposed[case["for"]] += 1
    assert min(proposed[mode] for mode in MODES) > 100
    for case, said in zip(again, count(browser, again)):
        words = said[1] if isinstance(said, list) else ""
        assert "does not divide" not in words and "larger than" not in words, case


# ----------------------------------------------------------------- what the page shows


@pytest.fixture
def calculator(quiet_page) -> Page:
    return quiet_page("book/calculator.html")


def three(number: float) -> str:
    """A number with three digits that count."""
    return f"{float(f'{number:.3g}'):,.15g}"


def in_seconds(span: float) -> str:
    """Seconds as the page writes them: 502 ms."""
    units = {"s": 1, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if span >= size), "s")
    return f"{three(span / units[unit])} {unit}"


def percent(part: float, whole: float) -> str:
    """A share as the page writes it."""
    return f"{100 * part / whole if whole else 0:.0f} %"


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def check_parts(rows: list, parts: dict[str, float], last: dict[str, float]) -> None:
    """Check a table of bytes, with shares or without: numbered parts, then others."""
    named = {f"{n} {name}": parts[name] for n, name in enumerate(parts, start=1)}
    assert rows == [
        [name, f"{part:,.0f}", percent(part, total(parts))][: len(rows[0])]
        for name, part in (named | last).items()
    ]


def check_bar(page: Page, says: str, parts: dict[str, float], whole: float) -> None:
    """Check what a bar says to who cannot see it."""
    words = ", ".join(f"{name} {percent(part, whole)}" for name, part in parts.items())
    label = page.get_by_role("img", name=says).get_attribute("aria-label")
    assert label == f"{says}: {words}"


LATER = ["Kept gathered", "Kept for the way back", "The layer at work"]
LATER += ["Logits, with gradient"]
HELD = {
    "train": ["Weights", "Gradients", "Optimizer", *LATER],
    "adapters": ["Frozen base", "Adapters", "Gradients", "Optimizer", *LATER],
    "generate": ["Weights", "Cache", "Logits"],
}


def times_of(case: dict, found: SimpleNamespace) -> list[tuple[str, float, int]]:
    """The rows of the times: names, seconds, and tokens in them."""
    spans, tokens, later = dict(found.times), case["tokens"], []
    best, worst = spans.pop("best"), spans.pop("worst")
    if case["for"] == "generate":
        tokens, speed = case["rows"], chapter.CHIPS[case["chip"]].memory_speed
        del spans["memory"]
        spans |= {f"memory: {name}": size / speed for name, size in found.read.items()}
        prompts = {f"a prompt, at {end}": found.first[end] for end in ("best", "worst")}
        later = [(name, span, case["prompt"]) for name, span in prompts.items()]
    spans |= {"at best: the longest": best, "at worst: wires not hidden": worst}
    return [(name, span, tokens) for name, span in spans.items()] + later


def limits_of(case: dict, found: SimpleNamespace) -> list[list[str]]:
    """The rows of the three inequalities."""
    rows = []
    for axis, has, needs in zip(AXES, found.has, found.needs):
        words = "under {} ways" if axis == "model" else "over {} tokens"
        holds = has < needs if axis == "model" else has > needs
        verdict = "unused" if case[axis] == 1 else "yes" if holds else "no"
        rows.append([axis, words.format(three(needs)), f"{has:,.0f}", verdict])
    return rows


AT_FIRST = """Each of 64 devices holds 14.1 GB of its 16 GB. It sends 47.4 GB in a step,
which takes 2.48 s at best, where arithmetic binds, and 2.95 s at worst: 212,000 to
178,000 tokens a second, with the arithmetic at 100 % to 84 % of its peak. The model has
8,029,995,008 weights, and every token is multiplied with 7,504,658,432 of them.
Attention's scores and mixing are 5 % of the arithmetic, and what is computed a second
time 19 %."""
IN_INT8 = """To train all weights a device would hold 29.5 GB and send 31.6 GB, and a
step would take 2.48 s at best. ... Frozen, they take 9.09 GB. The adapters have
20,971,520 weights, and a device holds 20,971,520 of these. It sends 8.94 GB to
gather the base and 82.6 MB to all-reduce the gradients of adapters."""
IN_WAYS = """To train all weights a device would hold 23.1 GB and send 75.5 GB, ... a
device holds 21,495,808 of these. It sends 7.03 GB to gather the base and 80.6 MB to"""
TO_GENERATE = """With a tenth left, at most 92 rows fit. It sends 59.6 MB in a step,
which takes 12.8 ms at best, where memory binds, mostly for the cache, and 14.3 ms at
worst: 78.3 to 70 tokens a second for each row, and 5,010 to 4,480 in all. A prompt of
2,048 has its first token after 39.1 ms to 59.1 ms."""
LEAVES = "What fsdp sends leaves the node of 8 and waits for the network."
REPEATED = "With 2 key heads for 8 ways, the matrices of each are held 4 times."
SELDOM = ["less than a tenth", "leaves the node", "To train all", "are held"]
H100S = "chip=H100&fsdp=8&model=8"
REPEAT = "for=generate&kv_heads=2&cache=by+key+heads+and"
SHOWN = {  # changes of the first state, and what the page says then, pieces between ...
    "": AT_FIRST,
    "data=2&fsdp=2&model=16&axes=2&recipe=SGD": "Each of 64 devices would hold 48.9 GB,"
    " and has 16 GB: this does not fit.",
    "chip=H100&gathers=once&sequence=8192&gated=no": f"24.2 GB in a step ... {LEAVES}",
    "layers=1&width=64&tokens=8192&sequence=128": "where wires bind, and 1.55 ms at",
    "sequence=1024&tokens=589824": "of its 16 GB: less than a tenth is left, and the",
    "devices=1&fsdp=1&tokens=2048": "The one device would hold 131 GB, and has 16 GB:"
    " this does not fit. It sends 0 bytes in a step, which takes 619 ms at best",
    H100S: LEAVES,
    f"{H100S}&network=450": "839 ms at worst",  # as fast as the links: none waits
    "for=adapters&rank=8&base=int8&gathers=once": IN_INT8,
    "for=adapters&data=2&fsdp=8&model=4": IN_WAYS,
    "for=generate": TO_GENERATE,
    "for=generate&chip=H100&ways=1&rows=32": "at most 52 rows fit. It sends 0 bytes",
    f"{REPEAT}+positions&axes=2": REPEATED,
    f"{REPEAT}+rows&replicas=2&weight_bytes=0.5": f"19,400 in all. ... {REPEATED}",
}


@pytest.mark.parametrize("changes", SHOWN)
def test_page_shows_what_the_chapter_counts(calculator, changes):
    says, changes = SHOWN[changes].replace("\n", " "), form.changes(changes)
    assert state(calculator) == {name: str(value) for name, value in FIRST.items()}
    type_in(calculator, **changes)
    case = FIRST | changes
    found, memory = by_the_chapter(case), chapter.CHIPS[case["chip"]].memory
    sent, names, held = found.sent, HELD[case["for"]], total(found.held)
    parts = dict(zip(names, [*found.held.values()][-len(names) :]))
    last = {"Held": held, "A device has": memory}
    check_parts(table(calculator, ".held"), parts, last)
    check_parts(table(calculator, ".kinds"), sent, {"All": total(sent)})
    check_bar(calculator, "Of a device's memory", parts, max(held, memory))
    check_bar(calculator, "Of what a device sends", sent, total(sent))
    assert table(calculator, ".times") == [
        [name, in_seconds(span), three(tokens / span) if span else "no limit"]
        for name, span, tokens in times_of(case, found)
    ]
    if case["for"] != "generate":
        assert table(calculator, ".limits") == limits_of(case, found)
    seen = [".limits", "[name=rank]", "[name=rows]", "[name=tokens]"]
    seen = [calculator.locator(f"#explorer {part}").is_visible() for part in seen]
    modes = [case["for"] == mode for mode in MODES]
    assert seen == [*modes, not modes[-1]]

    below = calculator.locator("#explorer .weights")
    said = f"{answer(calculator).inner_text()} {below.inner_text()}"
    assert [words for words in says.split(" ... ") if words not in said] == []
    assert [words in said for words in SELDOM] == [words in says for words in SELDOM]


def test_models_to_try(calculator):
    first = state(calculator)
    models = {"70B": 70_552_387_584, "A small one": 162_201_600, "8B": 8_029_995_008}
    for name, weights in models.items():
        calculator.get_by_role("button", name=name).press("Enter")
        said = calculator.locator("#explorer .weights")
        expect(said).to_contain_text(f"has {weights:,} weights")
    assert state(calculator) == first
    type_in(calculator, layers=8)
    type_in(calculator, layers=32, tokens="524,288")
    expect(answer(calculator)).to_contain_text("where arithmetic binds, and 2.95 s at")


def test_an_address_names_what_the_page_does_not_have(calculator):
    asked = {"for": "serve", "cache": "by pages", "weight_bytes": 3, "base": "int3"}
    address = "&".join(f"{name}={value}" for name, value in asked.items())
    calculator.goto(f"{calculator.url.partition('?')[0]}?{address}")
    said = calculator.locator("#explorer > [role=status]")
    for name, value in asked.items():
        expect(said).to_contain_text(f'The address says {name}="{value}", which')
        expect(said).to_contain_text(f"It shows {FIRST[name]} instead")


# --------------------------------------------------------------- what the text promises


def test_links_of_the_page_open_what_they_promise(browser):
    cases = form.linked("calculator", FIRST)
    for case, found in zip(cases, count(browser, cases)):
        assert isinstance(found, dict), (case, found)
    assert cases[:2] == [ADAPTERS, GENERATE]
    assert cases[-3:] == [FIRST, GENERATE, FIRST | ONE_H100]
    found = [by_the_chapter(case) for case in cases[2:-3]]
    few, many, whole, small, *ways, one, both = found[:10]
    frozen, single, one_row, rows, one_short, short, shared, cut = found[10:]
    assert few.binds == "arithmetic"
    assert 3.95 < few.best / many.best < 4.05
    assert 2.6 < few.worst / many.worst < 2.8

    assert np.isclose(total(whole.sent), total(few.sent) * 2 / 3)
    assert total(small.held) < 16e9 < total(whole.held)

    batches = [(case["model"], case["tokens"]) for case in cases[6:10]]
    assert batches == [(8, 32768), (4, 32768), (8, 131072), (4, 131072)]
    assert ways[0].weights == 70_552_387_584
    sent = [total(found.sent) for found in ways]
    assert sent[0] < sent[1] and sent[2] > sent[3]

    assert 2.5 < many.best / one.best < 2.7 and one.binds == "wires"
    assert 4.6 < many.best / both.best < 4.7

    assert cases[12] == ADAPTERS
    assert 0.92 < total(frozen.held) / total(few.held) < 0.93
    assert 0.66 < total(frozen.sent) / total(few.sent) < 0.68
    assert 0.74 < frozen.best / few.best < 0.76
    every = trains(cases[13] | {"for": "train"})
    assert total(single.held) < 0.9 * 80e9 and total(every.held) > 80e9

    assert cases[15] == GENERATE
    assert 5 < rows.best / one_row.best < 5.5
    assert 1.1 < short.best / one_short.best < 1.2
    assert shared.row == rows.row / 4 == cut.row
    assert shared.held["cache"] == rows.held["cache"] == 4 * cut.held["cache"]


def test_numbers_of_the_predictions_are_right():
    text = form.section("calculator", "Predict, then look")
    times = chapter.CHIPS["TPU v6e"].flops / chapter.CHIPS["TPU v5e"].flops
    assert f"A TPU v6e multiplies {times:.1f} times as fast as a v5e" in text
    share = beside(ADAPTERS).added / trains(FIRST).weights
    assert f"Adapters of rank 16 are {100 * share:.1f} % of the weights" in text


def test_worked_step_is_right():
    found = by_the_chapter(FIRST)
    numbers = [found.weights, found.multiplied, total(found.held), found.sent["fsdp"]]
    numbers += [found.held[name] for name in ("kept", "layer", "logits")]
    numbers += [sum(found.held[name] for name in ("weight", "gradient", "state"))]
    numbers += [chapter.layer_parameters(model_of(FIRST))]
    best, worst = found.best, found.worst
    words = [
        rf"${(found.flops + found.attention) / 1e16:.2f} \cdot 10^{{16}}$",
        rf"${found.again / 1e15:.2f} \cdot 10^{{15}}$",
        f"{in_seconds(best)} at best and {in_seconds(worst)} at worst",
        f"{three(FIRST['tokens'] / best)} to {three(FIRST['tokens'] / worst)} tokens a",
        f"= {three(found.needs[0])}.",
    ]
    spans = map(in_seconds, found.times.values())
    title = "Work one out by hand"
    form.check_worked("calculator", title, 10**6, numbers, spans, words)


def test_worked_token_is_right(browser):
    cases = [GENERATE, FIRST | ONE_H100]
    found, gpu = map(by_the_chapter, cases)
    most, most_of_gpu = (counted["most"] for counted in count(browser, cases))
    numbers = [*found.held.values(), total(found.held), found.row, found.weights]
    numbers += [found.sent["sums"], chapter.multiplied(model_of(GENERATE))]
    numbers += [found.read["weights"], gpu.read["weights"], *gpu.held.values()]
    best, worst, alone = (1 / span for span in (found.best, found.worst, gpu.best))
    words = [
        f"room for {most} rows",
        f"{in_seconds(1 / best)} at best and {in_seconds(1 / worst)} at worst",
        f"{three(best)} to {three(worst)} tokens a second for each row",
        f"{three(64 * best)} to {three(64 * worst)} in all",
        f"{three(alone)} tokens a second for each row, {three(32 * alone)} in all.",
        f"There is room for {most_of_gpu} rows",
    ]
    chip = chapter.CHIPS["TPU v5e"]
    spans = [*found.times.values(), found.first["best"], found.first["worst"]]
    spans += [size / chip.memory_speed for size in found.read.values()]
    sending = found.sent["sums"] / chip.axis_speed
    spans += [sending, found.times["wires"] - sending, gpu.best, gpu.first["best"]]
    title = "Work a token out by hand"
    spans = map(in_seconds, spans)
    form.check_worked("calculator", title, 10**6, numbers, spans, words)
