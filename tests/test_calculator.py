"""Test that the calculator agrees with its page and the chapters, and that it works."""

import math
import re
from collections import Counter, namedtuple
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import form
import jax
import numpy as np
import pytest
from form import answer, state, table, type_in
from jax.sharding import PartitionSpec as P
from playwright.sync_api import Browser, Page, expect

AXES = ["pipe", "data", "fsdp", "seq", "model"]
MODES = ["train", "adapters", "generate"]
BY_POSITIONS, BY_ROWS = "by KV heads and positions", "by KV heads and sequences"
FIRST = dict(
    re.findall(r'<input name="(\w+)" value="(\d+)"', form.source("calculator"))
)
FIRST = {name: int(value) for name, value in FIRST.items()}
FIRST |= {"for": "train", "chip": "TPU v5e", "recipe": "Adam f32", "gathers": "twice"}
FIRST |= {"gated": "yes", "recompute": "every layer", "base": "bfloat16"}
FIRST |= {"cache": "by KV heads", "weight_bytes": 2, "cache_bytes": 2}
FIRST |= {"node": "", "network": ""}  # the chip's
COUNT = """
  const C = Calculator, G = C.generate;
  const at = (texts.for === "generate" ? G : C).read(texts);
  if (texts.tables === "none") at.vocabulary = 0;
  const price = (count) => ({ ...count(at),
    best: C.leastSeconds(at, count), worst: C.mostSeconds(at, count) });
  if (texts.for === "generate") return {
    weights: C.weights(at), sent: G.sent(at), held: G.held(at),
    times: price(G.decodeTimes), first: price(G.prefillTimes),
    most: G.mostRows(at), critical: G.criticalRows(at),
  };
  return {
    weights: C.weights(at), flops: C.stepFlops(at),
    attention: C.attentionFlops(at), again: C.againFlops(at), pipeline: C.pipeline(at),
    sent: C.sent(at), held: C.held(at), times: price(C.times),
    permuted: C.permuted(at),
    speeds: Object.keys(C.sent(at)).map(axis => C.speed(at, axis)),
    "one link": Object.keys(C.sent(at)).map(axis => C.linkSpeed(at, axis)),
  };"""
LIST = """
  return Calculator.layouts(Calculator.read(texts)).map(({ layout, ...rest }) => [
    ["pipe", "data", "fsdp", "seq", "model"].map(axis => layout[axis]), rest]);"""


GIVEN = {"NamedTuple": NamedTuple, "P": P, "math": math, "jax": jax}
chapter_26 = form.defined(
    "26_cost_models",
    "GiB Chip chips bytes_sent collective_seconds StateBytes",
    **GIVEN,
)
CHIPS = chapter_26.chips
bytes_sent = chapter_26.bytes_sent


def count(browser: Browser, cases: list[dict]) -> list[dict | list]:
    """Return what the script counts for each case, or field and words of its error."""
    return form.counted(browser, "calculator.js", COUNT, cases)


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


# ------------------------------------------------------------------- what is counted


# Besides the first state: different sizes, KV heads that two devices share.
OTHER = {"data": 2, "fsdp": 3, "model": 4, "devices": 24, "layers": 5, "width": 1320}
OTHER |= {"hidden": 2080, "heads": 24, "kv_heads": 6, "head_size": 7, "vocabulary": 44}
OTHER |= {"tokens": 1980, "sequence": 30, "rank": 3, "replicas": 2, "ways": 4}
OTHER |= {"rows": 6000, "positions": 36, "prompt": 17, "used": 40}
FORMATS = [{}, {"base": "int8", "weight_bytes": 1, "cache_bytes": 4}]
FORMATS += [{"base": "int4", "weight_bytes": 0.5, "cache_bytes": 1}]
CELLS = {mode: form.cell("calculator", mode) for mode in MODES}


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


@pytest.mark.parametrize("mode", MODES)
def test_counts_as_the_page(browser, mode):
    cases = [
        FIRST | sizes | formats | {"for": mode, "chip": chip, "node": 64}
        for sizes in ({}, OTHER)
        for formats in FORMATS
        for chip in CHIPS
    ]
    for case, found in zip(cases, count(browser, cases)):
        held, sent = found["held"], found["sent"]
        if mode == "generate":
            found["memory"] = [*held.values()]
            rows, chip = case["rows"] / case["replicas"], CHIPS[case["chip"]]
            free = 0.9 * chip.memory - held["weight"]
            most = math.floor(rows * free / (held["cache"] + held["logits"]))
            assert found["most"] == max(0, most) * case["replicas"], case
            times, cache = found["times"], held["cache"] / chip.memory_bandwidth
            gain = times["compute"] - cache
            critical = rows * (times["memory"] - cache) / gain if gain > 0 else math.inf
            assert found["critical"] == pytest.approx(critical), case
        else:
            trained = held["weight"] + held["gradient"] + held["state"]
            frozen = [held["frozen"]] if mode == "adapters" else []
            parts = [held[name] for name in ("activations", "layer", "logits")]
            found["memory"] = [*frozen, trained, *parts]
            found["axes"] = [sent[axis] for axis in ("data", "fsdp", "model")]
        for name in {"times", "first"} & found.keys():
            *alone, best, worst = found[name].values()
            assert best == max(alone)
            assert worst == pytest.approx(max(alone[::2]) + alone[1])
            found[name] = alone
        for name, value in by_the_page(case).items():
            assert found[name] == pytest.approx(value, rel=1e-12), (name, case)


def test_other_options_change_what_the_page_says(browser):
    options = {"gathers": "once", "recompute": "nothing", "gated": "no"}
    cases = [FIRST | OTHER | {name: value} for name, value in options.items()]
    first, once, stored, plain = count(browser, [FIRST | OTHER, *cases])
    assert once["sent"]["fsdp"] == pytest.approx(first["sent"]["fsdp"] * 2 / 3)
    assert stored["sent"]["model"] == pytest.approx(first["sent"]["model"] * 8 / 10)
    layer = first["held"]["layer"] - stored["held"]["layer"]
    assert stored["held"]["activations"] == pytest.approx(5 * layer)
    assert first["again"] > stored["again"] == 0
    assert first["weights"] - plain["weights"] == 5 * 1320 * 2080


def test_chips_and_recipes_are_the_chapters(browser):
    question = "() => [Calculator.CHIPS, Calculator.RECIPES]"
    chips, recipes = form.evaluate(browser, "calculator.js", question)
    assert {name: tuple(chip.values()) for name, chip in chips.items()} == CHIPS
    adam = [*chapter_26.StateBytes()]
    assert recipes == {"Adam f32": adam, "Adam bf16": [2, 2, 4], "SGD": [2, 2, 0]}


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
    listed = form.evaluate(browser, "calculator.js", question, cases)
    assert len(listed) == len(cases) > 800
    for (name, collective, size, sides), found in zip(cases, listed):
        chip, n = CHIPS[name], math.prod(sides)
        sent = bytes_sent(collective, size, n, chip.switch)
        seconds = chapter_26.collective_seconds(collective, size, sides, chip)
        assert found == pytest.approx([sent, seconds]), (name, collective, size, sides)


LINKS, CARD = 450e9, 50e9  # of an H100, bytes/s
RINGS = {  # the sizes of pipe, data, fsdp, seq and model: what leaves a node of 8
    (1, 1, 8, 1, 1): {},
    (1, 1, 8, 1, 8): {"fsdp": CARD},  # a ring has one device in each node,
    (1, 2, 4, 1, 2): {"data": CARD},
    (2, 1, 1, 8, 2): {"pipe": CARD, "seq": 4 * CARD},  # or four,
    (1, 1, 32, 1, 1): {"fsdp": 8 * CARD},  # or all eight
    (1, 1, 1, 4, 3): {"seq": 2 * CARD, "model": 8 * CARD},
}


def test_rings_that_leave_the_node_use_the_network(browser):
    case = FIRST | {"chip": "H100", "tokens": 2**21, "sequence": 2**12, "layers": 24}
    case |= {"heads": 24, "kv_heads": 24, "hidden": 24, "vocabulary": 24}
    cases = [case | dict(zip(AXES, mesh), devices=math.prod(mesh)) for mesh in RINGS]
    cases.append(case | {"chip": "TPU v5e", "data": 2, "fsdp": 256, "devices": 512})
    *found, two_slices = count(browser, cases)
    for slower, each in zip(RINGS.values(), found):
        speeds = [slower.get(axis, LINKS) for axis in AXES]
        assert each["speeds"] == each["one link"] == speeds, slower
    assert two_slices["speeds"] == [100e9, 25e9 / 8, 100e9, 100e9, 100e9]
    assert two_slices["one link"][2] == 50e9


@pytest.fixture
def chapter_22() -> ModuleType:
    """Chapter 22's count of what its model sends, its tables like the calculator's."""
    names = """Layers Params AXES Layout specs_of Call leaves_with_specs block_size
    weight_calls token_calls calls_of stored all_layouts"""
    given = GIVEN | {"namedtuple": namedtuple}
    chapter = form.defined("22_transformer_3d", names, params=None, **given)
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
    cases, layouts = [], []
    for layout in chapter_22.all_layouts():
        for sequences in (16, 128, 1024):
            axes = layout.pipe, layout.data, 1, layout.seq, layout.tensor
            if layout.fsdp:
                axes = layout.pipe, 1, layout.data, layout.seq, layout.tensor
            case = dict(zip(AXES, axes), devices=8, tokens=32 * sequences)
            case["tables"] = "none" if layout.fsdp else "both"
            case["recompute"] = "every layer" if layout.fsdp else "nothing"
            cases.append(SMALL_22 | case)
            layouts.append((layout, sequences))
    everything = chapter_22.params
    for case, (layout, sequences), found in zip(cases, layouts, count(browser, cases)):
        pipe = found["pipeline"]
        layout = layout._replace(microbatches=pipe["microbatches"])
        empty = np.zeros((0, 64), np.float32)
        params = everything._replace(table=empty) if layout.fsdp else everything
        by = Counter()
        for call in chapter_22.calls_of(params, layout, sequences, 32):
            sent = call.times * bytes_sent(call.collective, call.size, call.n)
            by[call.purpose] += sent
        gradients, gathers = by["gradients"], by["weights"]
        ring, relay = by["keys and values"], by["stages"]
        activation = 4 * 32 * 64 * sequences / (layout.data * layout.seq)
        ends = activation * (2 + 3 / 64)  # of the embedding and the head
        sums = by["activations"] - bytes_sent("all-reduce", ends, layout.tensor)
        sent, permuted = found["sent"], found["permuted"]
        assert 2 * total(permuted) == pytest.approx(ring + relay), case
        seconds = (total(sent) + total(permuted)) / 100e9  # these have one link of two
        assert found["times"]["communication"] == pytest.approx(seconds), case
        assert 2 * sent.pop("model") == pytest.approx(sums), case
        assert 2 * total(sent) == pytest.approx(gradients + gathers + ring + relay), (
            case
        )
        held = 2 * found["held"]["weight"]
        assert held == 4 * chapter_22.stored(params, layout)
        flops = found["flops"] + found["attention"] + found["again"]
        idle = pipe["ticks"] / (pipe["ticks"] - layout.pipe + 1)
        assert found["times"]["compute"] == pytest.approx(flops / 8 / 197e12 * idle)
    assert {layout.pipe for layout, _ in layouts} == {1, 2, 4}


def test_layouts_are_all_that_divide_fastest_first(browser, chapter_22):
    cases = [SMALL_22 | {"devices": 8, "fsdp": 8, "tokens": 512}, FIRST]
    small, first = form.counted(browser, "calculator.js", LIST, cases)
    of_chapter = {
        (pipe, data * fsdp, seq, model, fsdp > 1)
        for (pipe, data, fsdp, seq, model), _ in small
        if 1 in (data, fsdp)
    }
    assert of_chapter == {layout[:5] for layout in chapter_22.all_layouts()}
    order = []
    again = count(browser, [FIRST | dict(zip(AXES, axes)) for axes, _ in first])
    for (axes, rest), found in zip(first, again):
        assert math.prod(axes) == 64 and rest["holds"] == total(found["held"])
        ends = rest["best"], rest["worst"]
        assert ends == (found["times"]["best"], found["times"]["worst"])
        order.append((rest["holds"] > CHIPS["TPU v5e"].memory, *ends))
    assert order == sorted(order) and {over for over, *_ in order} == {False, True}
    assert len({tuple(axes) for axes, _ in first}) == len(first)


# Chapter 30: what a layer stores of its cache, and sends for it.
BILL = {"replicated": (524_288, 1_024), "by KV heads": (262_144, 0)}
BILL |= {BY_POSITIONS: (65_536, 3_360), BY_ROWS: (65_536, 768)}
ONE_LAYER = {"layers": 1, "width": 64, "hidden": 128, "heads": 8, "kv_heads": 2}
ONE_LAYER |= {"head_size": 16, "vocabulary": 320}
ONE_LAYER |= {"rows": 8, "positions": 256, "prompt": 1, "cache_bytes": 4}


def test_caches_send_as_in_chapter_30(browser):
    """The chapter sends float32; of what the page counts, only the softmax does. A
    switch forwards nothing, as `collectives` counts."""
    case = FIRST | {"for": "generate", "chip": "H100"} | ONE_LAYER
    cases = [case | {"cache": cache} for cache in BILL]
    for (cache, (held, sent)), found in zip(BILL.items(), count(browser, cases)):
        softmax = 288 if cache == BY_POSITIONS else 0
        assert found["held"]["cache"] == held, cache
        assert found["sent"]["cache"] == (sent - softmax) / 2 + softmax, cache
        assert found["sent"]["sums"] * 2 == 7_168 * 3 / 2  # and that of the embedding


# --------------------------------------------------------------------- what it rejects

GENERATING, SHARED = {"for": "generate"}, {"for": "generate", "kv_heads": 2}
REJECTED = [
    ({"model": 3}, "devices", "model = 192. Enter 192, or change an axis of the"),
    ({"axes": 3}, "axes", "Link axes is 3, but TPU v5e has 2. Enter 1 to 2."),
    ({"pipe": 3, "devices": 192}, "layers", "pipe = 3 does not divide. Each stage"),
    ({"width": 10**9, "fsdp": 7, "devices": 7}, "width", "dimension. Change fsdp."),
    ({"heads": 5, "model": 3, "devices": 192}, "heads", "Try 24, or change KV"),
    ({"sequence": 3000}, "tokens", "length × data × fsdp = 192,000 does"),
    ({"layers": 0}, "layers", "Layers is 0. Enter 1 or more."),
    ({"for": "adapters", "rank": "1.5"}, "rank", 'cannot read "1.5" as a whole number'),
    ({"layers": 10**10}, "layers", "Enter at most 1,000,000,000."),
    (GENERATING | {"prompt": 9000}, "prompt", "is 8,192. Enter a shorter prompt, or"),
    (GENERATING | {"used": 101}, "used", "Enter at most 100."),
    (SHARED | {"cache": BY_ROWS, "rows": 9}, "rows", "devices per KV head ="),
    (SHARED | {"cache": BY_POSITIONS, "positions": 8190}, "positions", "Try"),
]


def test_errors_name_the_field_and_the_fix(browser):
    form.check_rejected(browser, "calculator.js", COUNT, FIRST, REJECTED)


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
    ),
    "generate": (
        {"for": "generate", "kv_heads": 2, "cache": BY_POSITIONS, "axes": 2},
        """Each of 8 devices needs 4.16 GB of its 16 GB. With a tenth left free, at
        most 368 sequences fit. It sends 72.5 MB per step. A step is memory-bound and
        takes 4.91 ms at best and 6.48 ms at worst: 204 to 154 tokens/s for each
        sequence, and 13,000 to 9,880 in total. Time to first token of a prompt of
        2,048: 39.1 ms to 58.7 ms. With 2 KV heads on 8 devices, 4 devices have a copy
        of each KV head's weights.""",
        ["2 KV cache", "2,147,483,648"],
        ["2 cache", "12,877,824", "18 %"],
        ["memory: weights", "2.29 ms", "27,900"],
    ),
}


@pytest.mark.parametrize("mode", SHOWN)
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


def test_layouts_are_selected_by_mouse_and_by_keyboard(calculator):
    row = calculator.locator("#explorer .ranking tr").nth
    type_in(calculator, chip="H100")
    assert table(calculator, ".ranking")[0][1:4] == ["fsdp 64", "14.1 GB", "yes"]
    row(2).locator("td").last.click()
    expect(row(2)).to_have_attribute("aria-current", "true")
    expect(row(2).get_by_role("button")).to_be_focused()
    assert state(calculator).items() >= {"data": "2", "fsdp": "32"}.items()
    calculator.keyboard.press("Shift+Tab")
    calculator.keyboard.press("Enter")
    expect(row(1)).to_have_attribute("aria-current", "true")
    expect(calculator.locator("#explorer .fitting")).to_have_text(
        "These sizes allow 208 layouts of 64 devices; 156 fit in memory, and the one"
        " above is number 2."
    )
    type_in(calculator, chip="TPU v5e", pipe=32, data=1, fsdp=2)
    last = row(50)  # after the first fifty
    expect(last).to_have_attribute("aria-current", "true")
    assert table(calculator, ".ranking")[50][3] == "no"


def test_models_to_try(calculator):
    first = state(calculator)
    models = {"70B": 70_552_387_584, "GPT-2": 162_201_600, "8B": 8_029_995_008}
    for name, weights in models.items():
        calculator.get_by_role("button", name=name).press("Enter")
        weights_shown = calculator.locator("#explorer .weights")
        expect(weights_shown).to_contain_text(f"has {weights:,} weights")
    assert state(calculator) == first


def test_predictions_of_the_page_start_from_true_claims(browser):
    cases = {text: FIRST | change for text, change in form.linked("calculator").items()}
    found = dict(zip(cases, count(browser, [*cases.values()])))
    # This fails if one of the links is rejected.
    sent = {text: total(each["sent"]) for text, each in found.items()}
    times = found["Look at 64 devices"]["times"]
    assert times["compute"] == times["best"]
    replicas, shards = sent["Look at 64 replicas"], sent["Look at 64 devices"]
    assert replicas == pytest.approx(shards * 2 / 3)
    assert found["8 ways"]["weights"] == 70_552_387_584
    assert sent["8 ways"] < sent["4 ways"]
