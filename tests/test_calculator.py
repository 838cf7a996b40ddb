"""The calculator agrees with its page, with the chapters and with compiled programs."""

import math
import random
import re
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import form
import jax
import numpy as np
import pytest
from form import answer, state, table, type_in
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from playwright.sync_api import Browser, Page, expect

AXES = ["pipe", "data", "fsdp", "seq", "model"]
MODES = ["train", "adapters", "generate"]
RECIPES = {"Adam f32": (2, 2, 12), "Adam bf16": (2, 2, 4), "SGD": (2, 2, 0)}
GATHERS = {"once": 1, "twice": 2}
BASES = ["bfloat16", "int8", "int4"]
BY_POSITIONS, BY_ROWS = "by KV heads and positions", "by KV heads and sequences"
CACHES = ["by KV heads", BY_POSITIONS, BY_ROWS, "replicated"]
FIRST = dict(
    re.findall(r'<input name="(\w+)" value="(\d+)"', form.source("calculator"))
)
FIRST = {name: int(value) for name, value in FIRST.items()}
FIRST |= {"for": "train", "chip": "TPU v5e", "recipe": "Adam f32", "gathers": "twice"}
FIRST |= {"gated": "yes", "recompute": "every layer", "base": "bfloat16"}
FIRST |= {"cache": "by KV heads", "weight_bytes": 2, "cache_bytes": 2}
FIRST |= {"node": "", "network": ""}  # the chip's
ADAPTERS, GENERATE = FIRST | {"for": "adapters"}, FIRST | {"for": "generate"}
COUNT = """
  const C = Calculator, G = C.generate;
  const at = (texts.for === "generate" ? G : C).read(texts);
  if (texts.tables === "none") at.vocabulary = 0;
  const price = (count) => ({ ...count(at),
    best: C.leastSeconds(at, count), worst: C.mostSeconds(at, count) });
  if (texts.for === "generate") return {
    weights: C.weights(at), row: G.rowBytes(at), sent: G.sent(at), held: G.held(at),
    times: price(G.decodeTimes), first: price(G.prefillTimes),
    most: G.mostRows(at), critical: G.criticalRows(at),
  };
  const limits = Object.values(C.limits(at));
  return {
    weights: C.weights(at), multiplied: C.multiplied(at), flops: C.stepFlops(at),
    attention: C.attentionFlops(at), again: C.againFlops(at), pipeline: C.pipeline(at),
    sent: C.sent(at), held: C.held(at), times: price(C.times),
    permuted: C.permuted(at),
    speeds: Object.keys(C.sent(at)).map(axis => C.speed(at, axis)),
    "one link": Object.keys(C.sent(at)).map(axis => C.linkSpeed(at, axis)),
    needs: limits.map((o) => o.above ?? o.below), has: limits.map((o) => o.has),
  };"""
LIST = """
  return Calculator.layouts(Calculator.read(texts)).map(({ layout, ...rest }) => [
    ["pipe", "data", "fsdp", "seq", "model"].map(axis => layout[axis]), rest]);"""


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    cut: P


GIVEN = {"NamedTuple": NamedTuple, "P": P, "Tensor": Tensor, "math": math, "jax": jax}
chapter_26 = form.defined(
    "26_cost_models",
    """GiB Chip chips bytes_sent collective_seconds step_flops data_parallel_sent
    fully_sharded_sent tensor_parallel_sent Recipe state_bytes flops_per_byte
    least_tokens most_ways Transformer layer_parameters parameters multiplied
    attention_flops kept_bytes Layout sent_bytes""",
    **GIVEN,
)
tensors = "AXES Scaling Config tensors"
by_specs = "by_key_heads by_positions by_rows"
chapter_30 = form.defined("30_generate", f"{tensors} {by_specs}", **GIVEN)
lora = "ATTENTION TARGETS Lora Adapter adapter_tensors"
chapter_31 = form.defined("31_fine_tune", f"{tensors} {lora}", **GIVEN)
CHIPS = chapter_26.chips
bytes_sent = chapter_26.bytes_sent


def count(browser: Browser, cases: list[dict]) -> list[dict | list]:
    """Return what the script counts for each case, or field and words of its error."""
    return form.counted(browser, "calculator.js", COUNT, cases)


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


# ------------------------------------------------------------------- what is counted


def random_case(rng: random.Random, mode: str) -> dict:
    """Return a chip, a layout without pipe and seq, and sizes that it divides."""
    sizes = [1, 1, 2, 3, 4, 8, 16 if mode == "generate" else 64]
    data, fsdp, model = (rng.choice(sizes) for _ in range(3))
    chip = rng.choice(list(CHIPS))
    kv_heads = rng.choice([1, 2, 3, 4, 6, 8])
    sequence = rng.choice([1, 30, 2048])
    positions = rng.choice([1, 1, 32, 4096]) * 3 * model
    return {
        "for": mode,
        "pipe": 1,
        "data": data,
        "fsdp": fsdp,
        "seq": 1,
        "model": model,
        "devices": data * fsdp * model,
        "replicas": data,
        "ways": model,
        "chip": chip,
        "axes": rng.randint(1, CHIPS[chip].axes),
        "node": 8,
        "network": 1000,  # GB/s: as fast as the links
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
        "base": rng.choice(BASES),
        "rows": rng.choice([1, 4, 60, 6000]) * data * model,
        "positions": positions,
        "prompt": rng.randint(1, positions),
        "used": rng.randint(1, 100),
        "cache": rng.choice(CACHES),
        "weight_bytes": rng.choice([4, 2, 1, 0.5]),
        "cache_bytes": rng.choice([4, 2, 1]),
    }


# The options of the worked examples: their cells count every other size.
WORKED = {"gated": "yes", "recipe": "Adam f32", "gathers": "twice", "axes": 1}
WORKED |= {"recompute": "every layer", "cache": "by KV heads"}
CELLS = {mode: form.cell("calculator", mode) for mode in MODES}
STATE = ["weight", "gradient", "state"]


def by_the_page(case: dict) -> dict:
    """Return what the cells of the page's worked examples compute for other sizes."""
    c, chip = SimpleNamespace(**case), CHIPS[case["chip"]]
    cells = dict(num_layers=c.layers, hidden_size=c.width, intermediate_size=c.hidden)
    cells |= dict(num_heads=c.heads, num_kv_heads=c.kv_heads, head_dim=c.head_size)
    cells |= dict(vocab_size=c.vocabulary, tokens=c.tokens, sequence=c.sequence)
    cells |= dict(data=c.data, fsdp=c.fsdp, model=c.model, rank=c.rank)
    cells |= dict(chip=chip._replace(domain=64), frozen_weights=c.base, ways=c.ways)
    cells |= dict(bytes_sent=bytes_sent, math=math)
    cells |= dict(collective_seconds=chapter_26.collective_seconds)
    cells |= dict(sequences=c.rows // c.replicas, cache_length=c.positions)
    cells |= dict(prompt=c.prompt, prefill_share=c.used / 100)
    cells |= dict(weight_bytes=float(c.weight_bytes), cache_bytes=c.cache_bytes)
    for tag in MODES:
        exec(CELLS[tag], cells)
    start = {"train": "", "adapters": "adapter_", "generate": "decode_"}[case["for"]]
    found = {"memory": [*cells[start + "memory"].values()]}
    found["times"] = [*cells[start + "times"].values()]
    if case["for"] == "generate":
        return found | {"first": [*cells["prefill_times"].values()]}
    return found | {"axes": [*cells[start + "sent"].values()]}


def by_chapter_26(case: dict) -> dict:
    """Return what chapter 26's functions count for a step that trains all weights."""
    c, chip = SimpleNamespace(**case), CHIPS[case["chip"]]
    sizes = c.layers, c.width, c.hidden, c.heads, c.kv_heads, c.head_size, c.vocabulary
    model = chapter_26.Transformer(*sizes, gated=c.gated == "yes")
    layout = chapter_26.Layout(c.data, c.fsdp, c.model)
    again = c.recompute == "every layer"
    weights, multiplied = chapter_26.parameters(model), chapter_26.multiplied(model)
    scores = chapter_26.attention_flops(model, c.tokens, c.sequence)
    twice = c.layers * (chapter_26.layer_parameters(model) - c.width * c.hidden)
    sent = chapter_26.sent_bytes(model, c.tokens, layout, GATHERS[c.gathers])
    sent["model"] *= 5 / 4 if again else 1  # the first all-reduce, once more
    ways, recipe = c.fsdp * c.model, chapter_26.Recipe(*RECIPES[c.recipe])
    found = {
        "weights": weights,
        "multiplied": multiplied,
        "flops": chapter_26.step_flops(multiplied, c.tokens),
        "attention": scores,
        "again": (2 * twice * c.tokens + scores / 3) * again,
        "sent": {"pipe": 0, "seq": 0} | sent,
        "state": chapter_26.state_bytes(weights, ways, recipe),
        "needs": [chapter_26.least_tokens(chip, c.axes)] * 2
        + [chapter_26.most_ways(c.hidden, chip, c.axes)],
        "has": [c.tokens / c.data, c.tokens / c.data / c.fsdp, c.model],
    }
    if again:
        local = c.tokens / (c.data * c.fsdp)
        found["activations"] = chapter_26.kept_bytes(c.layers, local, c.width)
    return found


def by_chapter_31(case: dict) -> dict:
    """Return the bytes of the adapters on a device, by chapter 31's shapes. It copies
    the adapters of shared KV heads, which the calculator shards."""
    if case["kv_heads"] % case["model"]:
        return {}
    lora = chapter_31.Lora(case["rank"], 1)
    [layer] = chapter_31.adapter_tensors(config_of(chapter_31, case), lora)
    parts = on_device([tensor for pair in layer.values() for tensor in pair], case)
    return {"weight": 2 * case["layers"] * parts}


def by_chapter_30(case: dict) -> dict:
    """Return the bytes of weights and caches on a device, by chapter 30's shapes."""
    tree = chapter_30.tensors(config_of(chapter_30, case))
    [layer] = tree.pop("layers")
    matrices = [tensor for tensor in layer.values() if len(tensor.shape) == 2]
    tables = tree["embed_tokens"], tree["lm_head"]
    weights = case["layers"] * on_device(matrices, case) + on_device(tables, case)
    specs = dict(zip(CACHES, [chapter_30.by_key_heads, chapter_30.by_positions]))
    specs |= {BY_ROWS: chapter_30.by_rows, "replicated": P()}
    rows = case["rows"] // case["replicas"]
    shape = rows, case["positions"], case["kv_heads"], case["head_size"]
    cache = on_device([Tensor("cache", shape, specs[case["cache"]])], case)
    cache *= 2 * case["layers"] * case["cache_bytes"]
    return {"weight": float(case["weight_bytes"]) * weights, "cache": cache}


def config_of(chapter: ModuleType, case: dict) -> NamedTuple:
    """Return the model of a case with one layer, as a chapter's Config."""
    sizes = "vocabulary width hidden layers heads kv_heads head_size".split()
    sizes = [(case | {"layers": 1})[name] for name in sizes]
    return chapter.Config(*sizes, 1e-5, 1e4, None, False, False)


def on_device(tensors: list, case: dict) -> int:
    """Return the elements of tensors on one device of chapter 30's mesh."""
    ways = case["ways"]
    by_kv_head = math.gcd(ways, case["kv_heads"])
    mesh = AbstractMesh((by_kv_head, ways // by_kv_head), ("key", "group"))
    shards = [NamedSharding(mesh, each.cut).shard_shape(each.shape) for each in tensors]
    return sum(map(math.prod, shards))


@pytest.mark.parametrize("mode", MODES)
def test_counts_as_the_page_and_the_chapters(browser, mode):
    rng, seen = random.Random(mode), Counter()
    cases = [random_case(rng, mode) for _ in range(400)]
    cases = [case | WORKED for case in cases[:200]] + cases[200:]
    if mode != "train":  # chapters 30 and 31 have gated models only
        cases = [case | {"gated": "yes"} for case in cases]
    by_chapter = dict(zip(MODES, (by_chapter_26, by_chapter_31, by_chapter_30)))[mode]
    for case, found in zip(cases, count(browser, cases)):
        held, sent = found["held"], found["sent"]
        if mode == "generate":
            found |= held | {"memory": [*held.values()]}
        else:
            parts = {"state": sum(held[name] for name in STATE)}
            parts |= {name: held[name] for name in ("activations", "layer", "logits")}
            frozen = [held["frozen"]] if mode == "adapters" else []
            found |= held | parts | {"memory": [*frozen, *parts.values()]}
            found["axes"] = [sent[axis] for axis in ("data", "fsdp", "model")]
        for name in {"times", "first"} & found.keys():
            *alone, best, worst = found[name].values()
            assert best == max(alone)
            if case["axes"] == 1:
                assert worst == pytest.approx(max(alone[::2]) + alone[1])
            found[name] = alone
            seen[name, alone.index(best)] += 1
        expected = by_chapter(case)
        expected |= by_the_page(case) if case.items() >= WORKED.items() else {}
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12), (name, case)
        seen.update(map(str, case.values()))
        seen.update(axis for axis in AXES if sent.get(axis))
    options = {"train": [*RECIPES, *GATHERS, *CHIPS], "adapters": BASES}
    options |= {"generate": [*CACHES, ("first", 0), ("first", 1), ("first", 2)]}
    times = [("times", number) for number in range(3)]
    assert min(seen[option] for option in [*options[mode], *times]) >= 15, seen


def test_chips_and_recipes_are_the_chapters(browser):
    question = "() => [Calculator.CHIPS, Calculator.RECIPES]"
    chips, recipes = form.evaluate(browser, "calculator.js", question)
    assert {name: chips[name] for name in CHIPS} == {n: [*c] for n, c in CHIPS.items()}
    assert recipes == {name: [*sizes] for name, sizes in RECIPES.items()}
    assert RECIPES["Adam f32"] == chapter_26.Recipe()


COLLECTIVES = (
    "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()
)


def test_collectives_take_as_long_as_in_chapter_5(browser):
    cases = [
        (name, collective, size, sides)
        for name, chip in CHIPS.items()
        for collective in COLLECTIVES
        for size in (0, 1, 32, 457e3, 16.06e9)
        for sides in ((1,), (2,), (3,), (8,), (16,), (72,), (2, 4), (1, 7), (4, 4, 4))
        if len(sides) <= chip.axes and math.prod(sides) <= chip.domain
    ]
    question = """cases => cases.map(([chip, collective, size, sides]) => {
      const { isSwitch } = Calculator.CHIPS[chip];
      const n = sides.reduce((a, b) => a * b);
      return [Calculator.bytesSent(collective, size, n, isSwitch),
        Calculator.collectiveSeconds(collective, size, sides, Calculator.CHIPS[chip])];
    })"""
    listed = form.asked(browser, "calculator.js", question, cases)
    assert len(listed) == len(cases) > 800
    for (name, collective, size, sides), found in zip(cases, listed):
        chip, n = CHIPS[name], math.prod(sides)
        sent = bytes_sent(collective, size, n, chip.switch)
        seconds = chapter_26.collective_seconds(collective, size, sides, chip)
        assert found == pytest.approx([sent, seconds]), (name, collective, size, sides)


def test_axes_are_as_nearly_equal_as_n_can_be_divided(browser):
    question = "cases => cases.map(([n, axes]) => Calculator.sidesOf(n, axes))"
    cases = [(n, axes) for n in range(1, 200) for axes in (1, 2, 3)]
    found = form.asked(browser, "calculator.js", question, cases)
    for (n, axes), sides in zip(cases, found):
        assert math.prod(sides) == n and len(sides) == axes
        if axes == 2:
            pairs = [(a, n // a) for a in range(1, n + 1) if n % a == 0 and a <= n // a]
            assert tuple(sides) == max(pairs)
    assert found[cases.index((64, 3))] == [4, 4, 4]
    assert found[cases.index((32, 3))] == [2, 4, 4]


def test_rings_that_leave_the_node_use_the_network(browser):
    """The speed of each ring, from the nodes of its devices."""
    rng, cases, slow = random.Random(26), [], Counter()
    for _ in range(300):
        case = {axis: rng.choice([1, 1, 2, 3, 4, 8]) for axis in AXES}
        case |= {"devices": math.prod(case.values()), "node": rng.choice([1, 4, 8])}
        case |= {"layers": 24, "width": 24, "vocabulary": 24, "sequence": 24}
        case |= {"hidden": 24, "heads": 24, "kv_heads": 24, "head_size": 1}
        case |= {"tokens": 24 * case["data"] * case["fsdp"]}
        case |= {"chip": rng.choice(["H100", "TPU v5e"])}
        cases.append(FIRST | case | {"network": rng.randint(1, 100)})
    for case, found in zip(cases, count(browser, cases)):
        places = np.arange(case["devices"]).reshape([case[axis] for axis in AXES])
        for number, axis in enumerate(AXES):
            nodes = np.moveaxis(places, number, -1) // case["node"]
            cards = max(1, case["node"] // math.prod(places.shape[number + 1 :]))
            links = CHIPS[case["chip"]].axis_bandwidth
            one_link = links / (1 if CHIPS[case["chip"]].switch else 2)
            network = math.inf
            if (nodes != nodes[..., :1]).any():
                network = cards * case["network"] * 1e9
            assert found["speeds"][number] == min(links, network), (axis, case)
            assert found["one link"][number] == min(one_link, network), (axis, case)
            slow[axis, case["chip"]] += network < links
    assert len(slow) == 10 and all(5 < number < 150 for number in slow.values()), slow


def test_empty_fields_of_the_network_take_the_chips_values(browser):
    cases = [
        FIRST | {"chip": name, "data": 2, "fsdp": fsdp, "devices": 2 * fsdp}
        for name, chip in CHIPS.items()
        for fsdp in (chip.domain // 2, chip.domain)
    ]
    width = math.lcm(*(chip.domain for chip in CHIPS.values()))
    cases = [case | {"width": width} for case in cases]
    cases = [case | {"tokens": 2048 * case["devices"]} for case in cases]
    for case, found in zip(cases, count(browser, cases)):
        chip = CHIPS[case["chip"]]
        inside = case["devices"] <= chip.domain
        expected = chip.axis_bandwidth if inside else chip.network
        assert found["speeds"][AXES.index("data")] == expected, case
        assert found["speeds"][AXES.index("fsdp")] == chip.axis_bandwidth, case


@pytest.fixture
def chapter_22() -> ModuleType:
    """Chapter 22's count of what its model sends, its tables like the calculator's."""
    names = """Layers Params LENGTH AXES Setting specs_of leaves_with_specs share
    all_reduce one_way sent_for_weights sent_for_tokens bill given all_settings"""
    chapter = form.defined("22_transformer_3d", names, params=None, **GIVEN)
    shapes = [(4, 64, 3, 64), (4, 64, 64), (0,), (4, 64, 256), (4, 256, 64)]
    leaves = [np.zeros(shape, np.float32) for shape in [(0,), *shapes]]
    norm, wqkv, wo, _, w1, w2 = leaves
    layers = chapter.Layers(norm, wqkv, wo, norm, w1, w2)
    chapter.params = chapter.Params(np.zeros((128, 64), np.float32), layers, norm)
    return chapter


SMALL_22 = FIRST | {"layers": 4, "width": 64, "hidden": 256, "heads": 8, "kv_heads": 8}
SMALL_22 |= {"head_size": 8, "vocabulary": 64, "gated": "no", "sequence": 32}


def test_pipelines_and_rings_send_as_chapter_22(browser, chapter_22):
    """The chapter's elements have four bytes, the calculator's two. Sharded over data,
    the chapter's tables are gathered otherwise, and are left out."""
    cases, settings = [], []
    for setting in chapter_22.all_settings():
        for sequences in (16, 128, 1024):
            axes = setting.pipe, setting.data, 1, setting.seq, setting.tensor
            if setting.fsdp:
                axes = setting.pipe, 1, setting.data, setting.seq, setting.tensor
            case = dict(zip(AXES, axes), devices=8, tokens=32 * sequences)
            case["tables"] = "none" if setting.fsdp else "both"
            case["recompute"] = "every layer" if setting.fsdp else "nothing"
            cases.append(SMALL_22 | case)
            settings.append((setting, sequences))
    everything = chapter_22.params
    for case, (setting, sequences), found in zip(
        cases, settings, count(browser, cases)
    ):
        pipe = found["pipeline"]
        setting = setting._replace(batches=pipe["microbatches"])
        empty = np.zeros((0, 64), np.float32)
        chapter_22.params = (
            everything._replace(table=empty) if setting.fsdp else everything
        )
        gradients, gathers, sums, ring, relay, _ = chapter_22.bill(setting, sequences)
        activation = 4 * 32 * 64 * sequences / (setting.data * setting.seq)
        ends = activation * (2 + 3 / 64)  # of the embedding and the head
        sums -= chapter_22.all_reduce(ends, setting.tensor)
        sent, permuted = found["sent"], found["permuted"]
        assert 2 * total(permuted) == pytest.approx(ring + relay), case
        seconds = (total(sent) + total(permuted)) / 100e9  # these have one link of two
        assert found["times"]["communication"] == pytest.approx(seconds), case
        assert 2 * sent.pop("model") == pytest.approx(sums), case
        assert 2 * total(sent) == pytest.approx(gradients + gathers + ring + relay), (
            case
        )
        held = 2 * found["held"]["weight"]
        assert held == chapter_22.given(setting, chapter_22.params, chapter_22.specs_of)
        flops = found["flops"] + found["attention"] + found["again"]
        idle = pipe["ticks"] / (pipe["ticks"] - setting.pipe + 1)
        assert found["times"]["compute"] == pytest.approx(flops / 8 / 197e12 * idle)
    assert {setting.pipe for setting, _ in settings} == {1, 2, 4}


def test_layouts_are_all_that_divide_fastest_first(browser, chapter_22):
    cases = [SMALL_22 | {"devices": 8, "fsdp": 8, "tokens": 512}]
    cases += [FIRST, FIRST | {"devices": 24, "fsdp": 8, "data": 3, "tokens": 3 * 2**19}]
    cases += [ADAPTERS, FIRST | {"devices": 2**17, "fsdp": 2**12, "data": 2**5}]
    cases[-1]["tokens"] = 2**17 * 2048
    small, first, odd, adapters, many = form.counted(
        browser, "calculator.js", LIST, cases
    )
    of_chapter = {
        (pipe, data * fsdp, seq, model, fsdp > 1)
        for (pipe, data, fsdp, seq, model), _ in small
        if 1 in (data, fsdp)
    }
    assert of_chapter == {setting[:5] for setting in chapter_22.all_settings()}
    assert many == []
    for case, listed in zip(cases, (small, first, odd, adapters)):
        again = count(browser, [case | dict(zip(AXES, axes)) for axes, _ in listed])
        order = []
        for (axes, rest), found in zip(listed, again):
            assert math.prod(axes) == case["devices"]
            assert rest["holds"] == total(found["held"])
            ends = rest["best"], rest["worst"]
            assert ends == (found["times"]["best"], found["times"]["worst"])
            order.append((rest["holds"] > CHIPS["TPU v5e"].memory, *ends))
        assert order == sorted(order)
        assert len({tuple(axes) for axes, _ in listed}) == len(listed)
    assert 0 < sum(rest["holds"] > 16e9 for _, rest in first) < len(first)


def test_largest_and_critical_batch(browser):
    """The largest batch leaves a tenth of the memory free, and one more sequence per
    replica does not; compute takes longer than memory above the critical batch only."""
    rng, proposed, seen = random.Random(30), [], Counter()
    cases = [random_case(rng, "generate") for _ in range(300)]
    found = count(browser, cases)
    for case, counted in zip(cases, found):
        group = case["ways"] // math.gcd(case["kv_heads"], case["ways"])
        step = case["replicas"] * (group if case["cache"] == BY_ROWS else 1)
        proposed += [case | {"rows": counted["most"] + more} for more in (0, step)]
        times, critical = counted["times"], counted["critical"]
        over = case["rows"] / case["replicas"] > critical
        assert over == (times["compute"] > times["memory"]), case
        seen.update([over, critical < math.inf])
    accepted = count(browser, proposed)
    for case, most, more in zip(cases, accepted[::2], accepted[1::2]):
        memory = 0.9 * CHIPS[case["chip"]].memory
        assert total(more["held"]) > memory * (1 - 1e-9), case
        if isinstance(most, dict):  # not rejected for having no sequence at all
            assert total(most["held"]) <= memory * (1 + 1e-9), case
            seen["fits"] += 1
    assert min(seen.values()) > 30, seen


# ------------------------------------------- programs that were compiled for 8 devices

# Chapter 30: what a layer stores of its cache, and sends for it.
BILL = {"replicated": (524_288, 1_024), "by KV heads": (262_144, 0)}
BILL |= {BY_POSITIONS: (65_536, 3_360), BY_ROWS: (65_536, 768)}
ONE_LAYER = {"layers": 1, "width": 64, "hidden": 128, "heads": 8, "kv_heads": 2}
ONE_LAYER |= {"head_size": 16, "vocabulary": 320}
ONE_LAYER |= {"rows": 8, "positions": 256, "prompt": 1, "cache_bytes": 4}


def test_caches_send_as_in_chapter_30(browser):
    """The chapter sends float32; of what the page counts, only the softmax does. A
    switch forwards nothing, as `collectives` counts."""
    case = GENERATE | ONE_LAYER | {"chip": "H100"}
    cases = [case | {"cache": cache} for cache in BILL]
    for (cache, (held, sent)), found in zip(BILL.items(), count(browser, cases)):
        softmax = 288 if cache == BY_POSITIONS else 0
        assert found["held"]["cache"] == held, cache
        assert found["sent"]["cache"] == (sent - softmax) / 2 + softmax, cache
        assert found["sent"]["sums"] * 2 == 7_168 * 3 / 2  # and that of the embedding


# A model of 230,000 weights.
SMALL = {"layers": 4, "width": 64, "hidden": 192, "heads": 8, "kv_heads": 2}
SMALL |= {"head_size": 8, "vocabulary": 320, "tokens": 512, "sequence": 32}
SMALL |= {"devices": 8, "rank": 4, "gathers": "once", "recompute": "nothing"}
REPLICATED, SHARDED = {"data": 8, "fsdp": 1}, {"data": 1, "fsdp": 8}
NORMS = 9 * 64  # elements; and bytes that the other devices have, where all is sharded:
SCALES, TABLES = 7 / 8 * 4 * 4 * 608, 7 / 8 * 2 * 2 * 320 * 64
BF16, INT8 = ({"for": "adapters", "base": base} for base in ("bfloat16", "int8"))
COMPILED = {  # argument bytes, bytes sent, and what the page leaves out of both
    "all weights": (REPLICATED, 2_759_684, 1_609_671, 12 * NORMS, 7 / 4 * 4 * NORMS),
    "bfloat16": (REPLICATED | BF16, 687_492, 132_615, 2 * NORMS, 0),
    "int8": (REPLICATED | INT8, 508_804, 132_615, 2 * NORMS, 0),
    # the CPU's compiler gathers bfloat16 as float32
    "bfloat16, sharded": (SHARDED | BF16, 286_084, 935_431, 2 * NORMS, 7 / 8 * 458_752),
    # the layers are constrained to be gathered as int8, and have replicated scales
    "int8, sharded": (
        *(SHARDED | INT8, 272_260, 440_839),
        *(2 * NORMS + SCALES, TABLES - SCALES),
    ),
}


@pytest.mark.parametrize("program", COMPILED)
def test_small_step_stores_and_sends_as_compiled(browser, program):
    """The program trains in float32: of the 16 bytes of a trained weight, 4 are its
    gradient, which is sent, and the others are arguments."""
    changes, arguments, sent, more_arguments, more_sent = COMPILED[program]
    case = FIRST | SMALL | changes
    found, ring = count(browser, [case, case | REPLICATED])
    held, count_and_tokens = found["held"], 4 + 16 * 32 * 4 / 8
    state = 12 / 16 * sum(held[name] for name in STATE)
    assert arguments == held["frozen"] + state + more_arguments + count_and_tokens
    summed, loss = ring["sent"]["data"], 7 / 4 * 4
    gathered = found["sent"]["data"] + found["sent"]["fsdp"] - summed
    assert sent == pytest.approx(gathered + 2 * summed + more_sent + loss)


def test_small_step_multiplies_as_compiled(browser):
    """All products; the first layer needs no gradient of its input."""
    cases = [FIRST | SMALL | REPLICATED | more for more in ({}, BF16)]
    every, adapters = count(browser, cases)
    assert every["flops"] + every["attention"] == 692_060_160
    first = 512 * (2 * 64 * (64 + 2 * 16) + 3 * 2 * 64 * 4)
    assert adapters["flops"] + adapters["attention"] - first == 529_268_736


# --------------------------------------------------------------------- what it rejects

REJECTED = {
    "train": [
        ({"model": 3}, "devices", "model = 192. Enter 192, or change an axis of the"),
        ({"axes": 3}, "axes", "Link axes is 3, but TPU v5e has 2. Enter 1 to 2."),
        ({"pipe": 3, "devices": 192}, "layers", "pipe = 3 does not divide. Each stage"),
        ({"seq": 3, "devices": 192}, "sequence", "Try 2,049, or change seq."),
        ({"width": 10**9, "fsdp": 7, "devices": 7}, "width", "dimension. Change fsdp."),
        ({"heads": 5, "model": 3, "devices": 192}, "heads", "Try 24, or change KV"),
        ({"sequence": 3000}, "tokens", "length × data × fsdp = 192,000 does"),
        ({"layers": 0}, "layers", "Layers is 0. Enter 1 or more."),
        ({"layers": "64.5"}, "layers", 'cannot read "64.5" as a whole number'),
        ({"layers": 10**10}, "layers", "Enter at most 1,000,000,000."),
        ({"layers": 10**8}, "width", "Enter a smaller hidden size."),
        ({"layers": 10**6, "tokens": 2**29}, "tokens", "Enter fewer tokens."),
    ],
    "adapters": [
        ({"rank": "low"}, "rank", 'Rank: cannot read "low" as a whole number'),
        ({"rank": 10**9}, "rank", "Enter a lower rank."),
    ],
    "generate": [
        ({"prompt": 9000}, "prompt", "is 8,192. Enter a shorter prompt, or a longer"),
        ({"used": 101}, "used", "Enter at most 100."),
        ({"replicas": 3}, "rows", "number of sequences. Try 66, or change Replicas."),
        ({"kv_heads": 2, "cache": BY_ROWS, "rows": 9}, "rows", "devices per KV head ="),
        ({"kv_heads": 2, "cache": BY_POSITIONS, "positions": 8190}, "positions", "Try"),
        ({"replicas": 10**9, "rows": 10**9}, "ways", "Enter at most 1 for"),
        ({"layers": 10**8}, "width", "Enter a smaller hidden size."),
        ({"layers": 10**5, "rows": 10**9}, "rows", "Enter fewer sequences."),
    ],
}


@pytest.mark.parametrize("mode", MODES)
def test_errors_name_the_field_and_the_fix(browser, mode):
    first = FIRST | {"for": mode}
    form.check_rejected(browser, "calculator.js", COUNT, first, REJECTED[mode])


def test_suggested_sizes_are_accepted(browser):
    rng, cases = random.Random(28), []
    sizes = ["heads", "hidden", "vocabulary", "width", "tokens", "rows", "positions"]
    for mode in MODES * 300:
        size = {rng.choice(sizes): rng.randint(1, 10**9)}
        cases.append(random_case(rng, mode) | size)
    suggested = []
    for case, said in zip(cases, count(browser, cases)):
        if isinstance(said, list) and (size := re.search(r"Try ([\d,]+)", said[1])):
            suggested.append(case | {said[0]: size[1]})
    assert len(suggested) > 300
    for case, said in zip(suggested, count(browser, suggested)):
        words = said[1] if isinstance(said, list) else ""
        assert "does not divide" not in words and "too large" not in words, case


# ------------------------------------------------------------------ what the page shows


@pytest.fixture
def calculator(quiet_page) -> Page:
    return quiet_page("book/calculator.html")


SHOWN = {  # changes of the first state, and what the page shows then
    "train": (
        {"chip": "H100", "fsdp": 8, "model": 8},
        """Each of 64 devices needs 30.7 GB of its 80 GB. It sends 156 GB per step. A
        step is compute-bound and takes 493 ms at best and 932 ms at worst:
        1,060,000 to 562,000 tokens/s, compute busy for 100 % to 53 % of the time.
        The rings of fsdp leave the node of 8 and use the network.""",
        ["6 Current layer", "3,067,609,088"],
        ["3 fsdp", "5,269,684,224", "3 %"],
        ["communication", "439 ms", "1,190,000"],
        ["model", "under 6.52 devices", "8", "no"],
    ),
    "adapters": (
        {"for": "adapters", "data": 2, "fsdp": 8, "model": 4},
        """Each of 64 devices needs 19.9 GB of its 16 GB: this does not fit. It sends
        72 GB per step. A step is compute-bound and takes 1.88 s at best and 2.6 s
        at worst: 279,000 to 202,000 tokens/s, compute busy for 100 % to 72 % of the
        time. Training all weights would need 23.1 GB per device, send 75.5 GB, and
        take 2.48 s at best.""",
        ["1 Frozen weights", "501,874,688"],
        ["2 data", "5,373,952", "0 %"],
        ["at best: all overlap", "1.88 s", "279,000"],
    ),
    "generate": (
        {"for": "generate", "kv_heads": 2, "cache": BY_POSITIONS, "axes": 2},
        """Each of 8 devices needs 4.16 GB of its 16 GB. With a tenth left free, at
        most 368 sequences fit. It sends 72.5 MB per step. A step is memory-bound
        (mostly by the cache) and takes 4.91 ms at best and 6.48 ms at worst: 204 to
        154 tokens/s for each sequence, and 13,000 to 9,880 in total. Time to first
        token of a prompt of 2,048: 39.1 ms to 58.7 ms. With 2 KV heads on 8
        devices, 4 devices have a copy of each KV head's weights.""",
        ["2 KV cache", "2,147,483,648"],
        ["2 cache", "12,877,824", "18 %"],
        ["memory: weights", "2.29 ms", "27,900"],
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_page_shows_what_is_counted(calculator, mode):
    assert state(calculator) == {name: str(value) for name, value in FIRST.items()}
    changes, says, *rows = SHOWN[mode]
    type_in(calculator, **changes)
    expect(answer(calculator)).to_have_text(" ".join(says.split()))
    shown = table(calculator)
    for row in rows:
        assert row in shown
    name, _, share = rows[1]
    sent = calculator.get_by_role("img", name="Of the bytes sent")
    assert f"{name[2:]} {share}" in sent.get_attribute("aria-label")
    parts = [".limits", "[name=rank]", "[name=rows]", "[name=tokens]", ".ranking"]
    seen = [calculator.locator(f"#explorer {part}").is_visible() for part in parts]
    assert seen == [*(mode == each for each in MODES), *[mode != "generate"] * 2]


def test_layouts_are_selected_by_mouse_and_by_keyboard(calculator):
    row = calculator.locator("#explorer .ranking tr").nth
    type_in(calculator, chip="H100")
    assert table(calculator, ".ranking")[0][1:4] == ["fsdp 64", "14.1 GB", "yes"]
    row(2).locator("td").last.click()
    expect(row(2)).to_have_attribute("aria-current", "true")
    expect(row(2).get_by_role("button")).to_be_focused()
    chosen = state(calculator)
    assert {name: chosen[name] for name in ("data", "fsdp")} == {
        "data": "2",
        "fsdp": "32",
    }
    calculator.keyboard.press("Shift+Tab")
    calculator.keyboard.press("Enter")
    expect(row(1)).to_have_attribute("aria-current", "true")
    expect(calculator.locator("#explorer .fitting")).to_have_text(
        "These sizes allow 208 layouts of 64 devices; 156 fit in memory, and the one"
        " above is number 2."
    )
    calculator.go_back()
    assert state(calculator) == chosen
    type_in(calculator, chip="TPU v5e", pipe=32, data=1, fsdp=2)
    last = row(50)  # after the first fifty
    expect(last).to_have_attribute("aria-current", "true")
    assert table(calculator, ".ranking")[50][3] == "no"


def test_models_to_try(calculator):
    first = state(calculator)
    models = {"70B": 70_552_387_584, "GPT-2": 162_201_600, "8B": 8_029_995_008}
    for name, weights in models.items():
        calculator.get_by_role("button", name=name).press("Enter")
        said = calculator.locator("#explorer .weights")
        expect(said).to_contain_text(f"has {weights:,} weights")
    assert state(calculator) == first


def test_links_of_the_page_open_what_they_promise(browser):
    cases = {text: FIRST | change for text, change in form.linked("calculator").items()}
    found = dict(zip(cases, count(browser, [*cases.values()])))
    sent = {text: total(each["sent"]) for text, each in found.items()}
    held = {text: total(each["held"]) for text, each in found.items()}
    best = {text: each["times"]["best"] for text, each in found.items()}
    few, many = "Look at 64 devices", "256"
    assert found[few]["times"]["compute"] == best[few]
    assert best[few] / best[many] == pytest.approx(4, rel=0.01)
    worst = found[few]["times"]["worst"] / found[many]["times"]["worst"]
    assert 2.6 < worst < 2.8

    replicas = "Look at 64 replicas"
    assert sent[replicas] == pytest.approx(sent[few] * 2 / 3)
    assert held["a small model"] < 16e9 < held[replicas]

    assert found["8 ways"]["weights"] == 70_552_387_584
    assert sent["8 ways"] < sent["4 ways"] and sent["8"] > sent["4"]

    one, both = "Look at 256 of the v6e", "both link axes"
    assert 2.5 < best[many] / best[one] < 2.7
    assert found[one]["times"]["communication"] == best[one]
    assert 4.6 < best[many] / best[both] < 4.7

    long = cases["Look at tensor parallelism alone"]
    [layouts] = form.counted(browser, "calculator.js", LIST, [long])
    (*_, seq, model), fastest = layouts[0]
    assert seq > 1 and model > 1
    assert (
        fastest["worst"] < found["Look at tensor parallelism alone"]["times"]["worst"]
    )

    single = "one H100 with an <code>int4</code> base"
    [every] = count(browser, [cases[single] | {"for": "train"}])
    assert held[single] < 0.9 * 80e9 < total(every["held"])

    assert 5 < best["64"] / best["Look at one sequence"] < 5.5
    one_short, short = "one", "64 of 256 positions"
    assert 1.1 < best[short] / best[one_short] < 1.2
    caches = [found[text]["held"]["cache"] for text in ("64", "by KV heads")]
    shards = found["by positions, too"]["held"]["cache"]
    assert caches == [4 * shards, 4 * shards]
