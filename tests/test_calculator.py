"""The calculator of a step counts as chapter 26 does, and its page shows it."""

import math
import random
import re
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import form
import numpy as np
import pytest
from form import answer, state, table, type_in
from playwright.sync_api import Page, expect

TAKEN = """GB GiB Chip CHIPS step_flops all_reduce_sent all_gather_sent
data_parallel_sent fully_sharded_sent tensor_parallel_sent Recipe state_bytes Estimate
estimate binds least_seconds most_seconds flops_per_byte least_tokens most_ways
Transformer layer_parameters parameters multiplied attention_flops kept_bytes Layout
sent_bytes hops_and_bytes latency one_way"""
SIZES = "layers width hidden heads kv_heads head_size vocabulary".split()
AXES = ["data", "fsdp", "model"]
RECIPES = {"Adam f32": (2, 2, 12), "Adam bf16": (2, 2, 4), "SGD": (2, 2, 0)}
CHOSEN = {"chip": "TPU v5e", "recipe": "Adam f32", "gathers": "twice", "gated": "yes"}
CHOSEN |= {"recompute": "every layer"}
GENERATING = {"for": "train", "cache": "by key heads"}
GENERATING |= {"weight_bytes": 2, "cache_bytes": 2}
BASES = {  # bytes of a frozen weight [out, in] with its scales
    "bfloat16": lambda out, into: 2 * out * into,
    "int8": lambda out, into: out * into + 4 * out,
    "int4": lambda out, into: out * into / 2 + 4 * out * into / 64,
}
MORE_CHIPS = ["A100", "H200", "B200"]
FIRST = form.sizes_at_first("calculator") | CHOSEN | GENERATING
FIRST |= {"base": "bfloat16"}
GENERATE = FIRST | {"for": "generate"}
ADAPTERS = FIRST | {"for": "adapters"}
COUNT = """
  const C = Calculator;
  const at = C.read(texts);
  const times = C.times(at);
  const limits = Object.values(C.limits(at));
  return {
    weights: C.weights(at), multiplied: C.multiplied(at), flops: C.stepFlops(at),
    attention: C.attentionFlops(at), again: C.againFlops(at),
    ...C.sent(at), ...C.held(at), ...times,
    binds: C.binds(times), best: C.leastSeconds(at), worst: C.mostSeconds(at),
    has: limits.map(({ has }) => has), needs: limits.map((o) => o.above ?? o.below),
  };"""


@pytest.fixture(scope="module")
def chapter() -> ModuleType:
    """What chapter 26 defines under the names in TAKEN."""
    return form.defined("26_cost_models", TAKEN, NamedTuple=NamedTuple)


def model_of(chapter: ModuleType, case: dict) -> NamedTuple:
    """The sizes of a case as the chapter's model."""
    return chapter.Transformer(*[case[n] for n in SIZES], gated=case["gated"] == "yes")


def wire_speed(chapter: ModuleType, case: dict, axis: str, axes: int) -> float:
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


def beside(case: dict) -> SimpleNamespace:
    """Bytes of a case's weights as they are stored, and what adapters add to them,
    matrix by matrix: nothing, where all weights are trained."""
    c, is_frozen = SimpleNamespace(**case), case.get("for") == "adapters"
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
    return found


def by_the_chapter(chapter: ModuleType, case: dict) -> SimpleNamespace:
    """What the chapter counts for a case, by its functions and by its words."""
    c, model = SimpleNamespace(**case), model_of(chapter, case)
    chip, gathers = chapter.CHIPS[c.chip], {"once": 1, "twice": 2}[c.gathers]
    again, base = c.recompute == "every layer", beside(case)
    found = SimpleNamespace(weights=chapter.parameters(model))
    found.multiplied = chapter.multiplied(model)
    found.flops = chapter.step_flops(found.multiplied, c.tokens)
    found.flops *= 4 / 6 if base.is_frozen else 1
    found.flops += chapter.step_flops(base.added * c.model, c.tokens)
    found.attention = chapter.attention_flops(model, c.tokens, c.sequence)
    layout = chapter.Layout(c.data, c.fsdp, c.model)
    found.sent = chapter.sent_bytes(model, c.tokens, layout, gathers)
    found.sent["model"] *= 5 / 4 if again else 1
    twice = c.layers * (chapter.layer_parameters(model) - c.width * c.hidden)
    twice += c.model * (base.added - base.last)
    found.again = (2 * twice * c.tokens + found.attention / 3) * again

    cuts, here = c.fsdp * c.model, c.tokens / (c.data * c.fsdp)
    trained, frozen = (found.weights, cuts), 0
    if base.is_frozen:
        trained, frozen = (base.added, 1), base.all / cuts
        gathered = gathers * chapter.all_gather_sent(base.all / c.model, c.fsdp)
        summed = chapter.all_reduce_sent(2 * base.added, c.fsdp)
        found.sent["data"] = chapter.all_reduce_sent(2 * base.added / c.fsdp, c.data)
        found.sent["fsdp"] = gathered + summed
    between = chapter.all_reduce_sent(2 * here * base.summed, c.model)
    found.sent["model"] += c.layers * between
    found.held = {"frozen": frozen} | {
        name: chapter.state_bytes(*trained, chapter.Recipe(size, 0, 0))
        for name, size in zip(["weight", "gradient", "state"], RECIPES[c.recipe])
    }
    found.held["gathered"] = 0
    if gathers == 1:  # weights that stay until the way back, beside a device's own
        found.held["gathered"] = chapter.all_gather_sent(base.all / c.model, c.fsdp)
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
    times = []
    for axes in (c.axes, 1):
        speeds = {axis: wire_speed(chapter, case, axis, axes) for axis in AXES}
        wires = sum(found.sent[axis] / speed for axis, speed in speeds.items())
        alone = chapter.estimate(flops / c.devices, 0, chip, axes, moved)
        times.append(alone._replace(wires=wires))
    found.times, found.binds = times[0]._asdict(), chapter.binds(times[0])
    found.best = chapter.least_seconds(times[0])
    found.worst = chapter.most_seconds(times[1])
    found.has = [c.tokens / c.data, here, c.model]
    speeds = [wire_speed(chapter, case, axis, c.axes) for axis in AXES]
    found.needs = [chip.flops / speed for speed in speeds[:2]]
    found.needs += [c.hidden * speeds[2] / chip.flops]
    return found


def random_case(rng: random.Random, chips: dict) -> dict:
    """A chip, a layout, and sizes that it divides."""
    data, fsdp, model = layout = [rng.choice([1, 1, 2, 3, 4, 8, 64]) for _ in AXES]
    chip = rng.choice(list(chips))
    kv_heads = rng.randint(1, 4)
    sequence = rng.choice([1, 30, 2048])
    return dict(zip(AXES, layout)) | {
        "devices": data * fsdp * model,
        "chip": chip,
        "axes": rng.randint(1, chips[chip].axes),
        "layers": rng.randint(1, 90),
        "width": rng.randint(1, 900) * fsdp,
        "hidden": rng.randint(1, 2000) * model,
        "heads": rng.randint(1, 4) * kv_heads * model,
        "kv_heads": kv_heads,
        "head_size": rng.randint(1, 256),
        "vocabulary": rng.randint(1, 2000) * model,
        "tokens": rng.randint(1, 20) * sequence * data * fsdp,
        "sequence": sequence,
        "recipe": rng.choice(list(RECIPES)),
        "gathers": rng.choice(["once", "twice"]),
        "recompute": rng.choice(["every layer", "nothing"]),
        "node": rng.choice([1, 4, 8]),
        "network": rng.randint(1, 500),
        "gated": rng.choice(["yes", "no"]),
    }


def random_adapters(rng: random.Random, chips: dict) -> dict:
    """The same, beside a frozen base."""
    more = {"rank": rng.choice([1, 4, 16, 300]), "base": rng.choice([*BASES])}
    return random_case(rng, chips) | {"for": "adapters"} | more


def count_random(browser, chapter, make, seed: int) -> list[tuple[dict, dict]]:
    """Random cases, each with what the script counts for it."""
    rng = random.Random(seed)
    cases = [make(rng, chapter.CHIPS) for _ in range(600)]
    return list(zip(cases, form.counted(browser, "calculator.js", COUNT, cases)))


@pytest.fixture(scope="module")
def counted(browser, chapter) -> list[tuple[dict, dict]]:
    return count_random(browser, chapter, random_case, 26)


@pytest.fixture(scope="module")
def adapted(browser, chapter) -> list[tuple[dict, dict]]:
    return count_random(browser, chapter, random_adapters, 31)


def test_chips_are_the_chapters(browser, chapter):
    question = "() => [Calculator.CHIPS, Calculator.RECIPES]"
    chips, recipes = form.asked(browser, "calculator.js", question)
    assert [name for name in chips if name not in chapter.CHIPS] == MORE_CHIPS
    for name, chip in chapter.CHIPS.items():
        assert chips[name] == list(chip)
    assert recipes == {name: list(sizes) for name, sizes in RECIPES.items()}
    assert RECIPES["Adam f32"] == chapter.Recipe()


def check_counted(chapter: ModuleType, case: dict, found: dict) -> None:
    """Check that the script counts for a case what the chapter does."""
    expected = vars(by_the_chapter(chapter, case))
    for parts in ("sent", "held", "times"):
        expected |= expected.pop(parts)
    assert found.keys() == expected.keys()
    for name, number in expected.items():
        number = number if name == "binds" else pytest.approx(number, rel=1e-12)
        assert found[name] == number, (name, case)


def test_counts_as_the_chapter_does(counted, chapter):
    seen = Counter()
    for case, found in counted:
        check_counted(chapter, case, found)
        seen[found["binds"]] += 1
        seen.update(axis for axis in AXES if found[axis])
        seen.update(case[name] for name in CHOSEN)
    kinds = {"arithmetic", "wires", "memory", *AXES, *chapter.CHIPS, *RECIPES}
    assert seen.keys() == kinds | {
        "once",
        "twice",
        "yes",
        "no",
        "every layer",
        "nothing",
    }
    assert min(seen.values()) >= 20, seen


def test_inequalities_are_those_of_the_tightest_pass(counted, chapter):
    """On many devices, in any mixture of the axes: sums of gradients hide behind the
    way back, the first gathers and an MLP's first sum behind the way forward."""
    holds = {axis: Counter() for axis in AXES}
    for case, found in counted:
        if not case["chip"].startswith("TPU"):
            continue  # whose axes may have wires of their own
        c, model = SimpleNamespace(**case), model_of(chapter, case)
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


REFUSED = [
    (
        {"model": 3},
        "devices",
        "× model = 192. Write 192, or change data, fsdp or model.",
    ),
    ({"axes": 3}, "axes", "Axes of links is 3, and TPU v5e has 2. Write 1 to 2."),
    ({"chip": "H100", "axes": 2}, "axes", "H100 has 1. Write 1."),
    ({"kv_heads": 5}, "heads", "many queries. Try 35, or change Key heads."),
    ({"heads": 5, "model": 3, "devices": 192}, "heads", "Try 24, or change Key heads."),
    ({"width": 10**9, "fsdp": 7, "devices": 7}, "width", "cut there. Change fsdp."),
    ({"model": 3, "devices": 192}, "heads", "Heads is 32, and model = 3 does not"),
    ({"model": 2, "devices": 128, "hidden": 3}, "hidden", "Try 4, or change model."),
    ({"model": 2, "devices": 128, "vocabulary": 7}, "vocabulary", "Try 8, or"),
    ({"fsdp": 12, "devices": 12}, "width", "Width is 4,096, and fsdp = 12 does not"),
    ({"sequence": 3000}, "tokens", "Sequence length × data × fsdp = 192,000 does"),
    ({"data": 8, "devices": 512}, "tokens", "Try 1,048,576, or change Sequence"),
    ({"layers": 0}, "layers", "Layers is 0. Write 1 or more."),
    ({"layers": "64.5"}, "layers", 'Layers: cannot read "64.5" as a whole number'),
    ({"layers": ""}, "layers", 'Layers: cannot read ""'),
    ({"layers": -2}, "layers", 'Layers: cannot read "-2"'),
    ({"layers": 10**10}, "layers", "Write at most 1,000,000,000."),
    ({"layers": 10**8}, "width", "Take a smaller width."),
    ({"layers": 10**6, "tokens": 2**29}, "tokens", "Take fewer tokens."),
]


def test_refusals_name_the_field_and_say_what_to_do(browser):
    form.check_refusals(browser, "calculator.js", COUNT, FIRST, REFUSED)


@pytest.fixture
def calculator(quiet_page) -> Page:
    return quiet_page("book/calculator.html")


def case_of(page: Page) -> dict:
    """What the fields hold, numbers as numbers."""
    texts = state(page).items()
    return {name: int(text) if text.isdigit() else text for name, text in texts}


def three(number: float) -> str:
    """A number with three digits that count."""
    return f"{float(f'{number:.3g}'):,.15g}"


def in_seconds(span: float) -> str:
    """Seconds as the page writes them: 502 ms."""
    units = {"s": 1, "ms": 1e-3, "µs": 1e-6}
    unit = next(unit for unit, size in units.items() if span >= size)
    return f"{three(span / units[unit])} {unit}"


def in_bytes(number: float) -> str:
    """Bytes as the page writes them: 47.4 GB."""
    power = 0 if number < 1000 else int(math.log10(number) // 3)
    unit = ["bytes", "kB", "MB", "GB", "TB"][power]
    return f"{three(number / 1000**power)} {unit}"


SHOWN = {
    "first": {},
    "mixed": {"data": 2, "fsdp": 2, "model": 16, "axes": 2, "recipe": "SGD"},
    "once": {"chip": "H100", "gathers": "once", "sequence": 8192, "gated": "no"},
    "tiny": {"layers": 1, "width": 64, "tokens": 8192, "sequence": 128},
    "adapters": {"for": "adapters", "rank": 8, "base": "int8", "gathers": "once"},
    "adapters, mixed": {"for": "adapters", "data": 2, "fsdp": 8, "model": 4},
}


@pytest.mark.parametrize("changes", SHOWN.values(), ids=SHOWN)
def test_page_shows_what_the_chapter_counts(calculator, chapter, changes):
    is_frozen = "for" in changes
    assert state(calculator) == {name: str(value) for name, value in FIRST.items()}
    type_in(calculator, **changes)
    case = FIRST | changes
    found = by_the_chapter(chapter, case)
    held, sent = sum(found.held.values()), sum(found.sent.values())
    memory = chapter.CHIPS[case["chip"]].memory
    names = ["Weights"] if not is_frozen else ["Frozen base", "Adapters"]
    names += ["Gradients", "Optimizer", "Kept gathered", "Kept for the way back"]
    names += ["The layer at work", "Logits, with gradient"]
    names = [f"{number} {name}" for number, name in enumerate(names, start=1)]
    names += ["Held", "A device has"]
    parts = [*found.held.values()][0 if is_frozen else 1 :]
    numbers = [f"{number:,.0f}" for number in (*parts, held, memory)]
    assert table(calculator, ".held") == [[*row] for row in zip(names, numbers)]
    bar = calculator.get_by_role("img", name="Of a device's memory")
    share = f"{names[0][2:]} {100 * parts[0] / max(held, memory):.0f} %"
    assert share in bar.get_attribute("aria-label")

    parts = {f"{n} {axis}": found.sent[axis] for n, axis in enumerate(AXES, start=1)}
    assert table(calculator, ".kinds") == [
        [name, f"{part:,.0f}", f"{100 * part / sent:.0f} %"]
        for name, part in (parts | {"All": sent}).items()
    ]
    spans = found.times | {"at best: the longest": found.best}
    spans["at worst: wires not hidden"] = found.worst
    assert table(calculator, ".times") == [
        [name, in_seconds(span), three(case["tokens"] / span)]
        for name, span in spans.items()
    ]
    *enough, ways = map(three, found.needs)
    needs = [f"over {tokens} tokens" for tokens in enough] + [f"under {ways} ways"]
    rows = zip(AXES, needs, [f"{has:,.0f}" for has in found.has])
    assert [row[:3] for row in table(calculator, ".limits")] == [[*row] for row in rows]
    expect(calculator.locator("#explorer .limits")).to_be_visible(visible=not is_frozen)

    weights = calculator.locator("#explorer .weights")
    flops = found.flops + found.attention + found.again
    for words in [
        f"has {found.weights:,} weights",
        f"multiplied with {found.multiplied:,} of them",
        f"mixing are {100 * found.attention / flops:.0f} % of the arithmetic",
        f"a second time {100 * found.again / flops:.0f} %.",
    ]:
        expect(weights).to_contain_text(words)
    expect(answer(calculator)).to_contain_text(f"best, where {found.binds} bind")
    if is_frozen:
        check_words_of_adapters(calculator, chapter, case, found)


def test_answer_follows_what_is_typed(calculator):
    said = (
        "Each of 64 devices holds 14.1 GB of its 16 GB. It sends 47.4 GB in a step,"
        " which takes 2.48 s at best, where arithmetic binds, and 2.95 s at worst:"
        " 212,000 to 178,000 tokens a second, with the arithmetic at 100 % to 84 % of"
        " its peak."
    )
    expect(answer(calculator)).to_have_text(said)
    verdicts = [row[3] for row in table(calculator, ".limits")]
    assert verdicts == ["unused", "yes", "unused"]
    type_in(calculator, data=2, fsdp=2, model=16)
    expect(answer(calculator)).to_contain_text("would hold 52 GB, and has 16 GB")
    assert [row[3] for row in table(calculator, ".limits")] == ["yes", "yes", "no"]
    type_in(calculator, tokens="524,288", data=1, fsdp=64, model=1)
    expect(answer(calculator)).to_have_text(said)


def test_rings_that_leave_a_node_wait_for_the_network(calculator):
    type_in(calculator, chip="H100", fsdp=8, model=8)
    expect(answer(calculator)).to_contain_text("What fsdp sends leaves the node of 8")
    wires = table(calculator, ".times")[1][1]
    type_in(calculator, network=450)
    assert table(calculator, ".times")[1][1] != wires
    expect(answer(calculator)).not_to_contain_text("leaves the node")


def test_little_room_is_said(calculator):
    type_in(calculator, sequence=1024, tokens=589824)
    expect(answer(calculator)).to_contain_text("less than a tenth is left")


@pytest.mark.parametrize("make", [random_case, random_adapters])
def test_no_proposal_is_refused(browser, chapter, make):
    """What a refusal tells one to try instead is accepted, at least in that field."""
    rng = random.Random(28)
    cases = []
    for _ in range(400):
        case = make(rng, chapter.CHIPS)
        case[rng.choice(["heads", "hidden", "vocabulary", "width", "tokens"])] = (
            rng.randint(1, 10**9)
        )
        cases.append(case)
    refused = []
    for case, said in zip(cases, form.counted(browser, "calculator.js", COUNT, cases)):
        if isinstance(said, list) and (cure := re.search(r"Try ([\d,]+)", said[1])):
            refused.append(case | {said[0]: cure[1]})
    again = form.counted(browser, "calculator.js", COUNT, refused)
    assert len(refused) > 100
    for case, said in zip(refused, again):
        assert not (isinstance(said, list) and "does not divide" in said[1]), said
        assert not (isinstance(said, list) and "larger than" in said[1]), (case, said)


def test_one_device_has_no_wires(calculator):
    type_in(calculator, devices=1, fsdp=1, tokens=2048)
    expect(answer(calculator)).to_contain_text("The one device would hold")
    expect(answer(calculator)).to_contain_text("It sends 0 bytes in a step")
    assert table(calculator, ".times")[1] == ["wires", "0 s", "no limit"]
    assert {row[3] for row in table(calculator, ".limits")} == {"unused"}
    bar = calculator.get_by_role("img", name="Of what a device sends")
    assert "data 0 %, fsdp 0 %, model 0 %" in bar.get_attribute("aria-label")


def test_models_to_try(calculator):
    first = state(calculator)
    models = {"70B": 70_552_387_584, "A small one": 162_201_600, "8B": 8_029_995_008}
    for name, weights in models.items():
        calculator.get_by_role("button", name=name).press("Enter")
        said = calculator.locator("#explorer .weights")
        expect(said).to_contain_text(f"has {weights:,} weights")
    assert state(calculator) == first


def test_links_of_the_page_open_what_they_promise(calculator, chapter):
    def sent(found: SimpleNamespace) -> float:
        return sum(found.sent.values())

    cases = form.opened(calculator, case_of)
    cases = [case for case in cases if case["for"] == "train"]
    few, many, whole, small, *ways, one, both, _ = [
        by_the_chapter(chapter, case) for case in cases
    ]
    assert few.binds == "arithmetic"
    assert 3.95 < few.best / many.best < 4.05 and 2.6 < few.worst / many.worst < 2.8

    assert np.isclose(sent(whole), sent(few) * 2 / 3)
    assert sum(small.held.values()) < 16e9 < sum(whole.held.values())

    batches = [(case["model"], case["tokens"]) for case in cases[4:8]]
    assert batches == [(8, 32768), (4, 32768), (8, 131072), (4, 131072)]
    assert ways[0].weights == 70_552_387_584
    assert sent(ways[0]) < sent(ways[1]) and sent(ways[2]) > sent(ways[3])

    flops = {name: chip.flops for name, chip in chapter.CHIPS.items()}
    assert round(flops["TPU v6e"] / flops["TPU v5e"], 1) == 4.7
    assert 2.5 < many.best / one.best < 2.7 and one.binds == "wires"
    assert 4.6 < many.best / both.best < 4.7
    assert cases[-1] == FIRST


def test_worked_example_is_right(chapter):
    found = by_the_chapter(chapter, FIRST)
    held, inputs = sum(found.held.values()), found.held["kept"]
    state = sum(found.held[name] for name in ("weight", "gradient", "state"))
    numbers = [found.weights, found.multiplied, state, inputs, held]
    numbers += [found.held["layer"], found.held["logits"]]
    numbers += [chapter.layer_parameters(model_of(chapter, FIRST)), found.sent["fsdp"]]
    text = form.section("calculator", "Work one out by hand")
    written = re.findall(r"\b\d{1,3}(?:,\d{3}){2,}", text)
    assert set(written) == {f"{number:,.0f}" for number in numbers}
    assert f"{found.flops + found.attention:.2e}" == "2.53e+16"
    speeds = [three(FIRST["tokens"] / span) for span in (found.best, found.worst)]
    for words in [
        r"$2.53 \cdot 10^{16}$",
        rf"${found.again / 1e15:.2f} \cdot 10^{{15}}$",
        f"{in_seconds(found.best)} at best and {in_seconds(found.worst)} at worst",
        " to ".join(speeds),
        *map(in_seconds, found.times.values()),
        f"= {three(found.needs[0])}.",
    ]:
        assert words in text


# ---------------------------------------------------------- a step that trains adapters


def test_adapters_count_as_the_page_says(adapted, chapter):
    """As the chapter counts, and gradients of adapters as in one ring of all shards."""
    seen = Counter()
    for case, found in adapted:
        check_counted(chapter, case, found)
        gathers = {"once": 1, "twice": 2}[case["gathers"]]
        base = beside(case).all / case["model"]
        gathered = gathers * chapter.all_gather_sent(base, case["fsdp"])
        ring = case["data"] * case["fsdp"]
        summed = chapter.all_reduce_sent(2 * beside(case).added, ring)
        assert found["data"] + found["fsdp"] == pytest.approx(gathered + summed)
        seen.update([found["binds"], case["base"], case["gathers"], case["recompute"]])
        seen.update(axis for axis in AXES if found[axis])
    assert {*BASES, *AXES, "arithmetic", "wires", "memory"} <= seen.keys()
    assert min(seen.values()) >= 20, seen


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
    args = browser, "calculator.js", COUNT
    [found] = form.counted(*args, [FIRST | SMALL | changes])
    state = found["weight"] + found["gradient"] + found["state"]
    count_and_tokens = 4 + 16 * 32 * 4 / 8
    assert given == found["frozen"] + 12 / 16 * state + more_given + count_and_tokens
    [ring] = form.counted(*args, [FIRST | SMALL | changes | WHOLE])
    gathered = found["data"] + found["fsdp"] - ring["data"]
    loss = 7 / 4 * 4
    assert sent == pytest.approx(gathered + 2 * ring["data"] + more_sent + loss)


def test_small_step_multiplies_as_compiled(browser):
    """All products of a compiled step; the first layer sends nothing to its table."""
    cases = [FIRST | SMALL | WHOLE | more for more in ({}, BF16)]
    every, adapters = form.counted(browser, "calculator.js", COUNT, cases)
    assert every["flops"] + every["attention"] == 692_060_160
    first = 512 * (2 * 64 * (64 + 2 * 16) + 3 * 2 * 64 * 4)
    assert adapters["flops"] + adapters["attention"] - first == 529_268_736


# Another model, on 2 x 4 devices: sums along `data` for a rank of 4, and what a rank of
# 16 adds to those along `model`, in float32.
BY_WAYS = {"layers": 2, "width": 256, "hidden": 1024, "heads": 8, "kv_heads": 4}
BY_WAYS |= {"head_size": 32, "vocabulary": 512, "tokens": 512, "sequence": 32}
BY_WAYS |= {"for": "adapters", "devices": 8, "data": 2, "fsdp": 1, "model": 4}


@pytest.mark.parametrize(
    "again, added", [("nothing", 258_048), ("every layer", 331_776)]
)
def test_adapters_send_along_model_as_compiled(browser, again, added):
    cases = [FIRST | BY_WAYS | {"rank": r, "recompute": again} for r in (4, 16)]
    few, many = form.counted(browser, "calculator.js", COUNT, cases)
    assert 2 * few["data"] == 88_064 and 2 * many["data"] == 352_256
    assert 2 * (many["model"] - few["model"]) == added


def check_words_of_adapters(page: Page, chapter: ModuleType, case: dict, found) -> None:
    """Check the sentences that a step of adapters has beside the others."""
    every = by_the_chapter(chapter, case | {"for": "train"})
    held, sent = sum(every.held.values()), sum(every.sent.values())
    for words in [
        f"To train all weights a device would hold {in_bytes(held)}",
        f"and send {in_bytes(sent)}, and a step would take {in_seconds(every.best)} at",
    ]:
        expect(answer(page)).to_contain_text(words)
    base, one = beside(case), beside(case | {"model": 1})
    gathers = {"once": 1, "twice": 2}[case["gathers"]]
    gathered = gathers * chapter.all_gather_sent(base.all / case["model"], case["fsdp"])
    summed = found.sent["data"] + found.sent["fsdp"] - gathered
    for words in [
        f"Frozen, they take {in_bytes(base.all)}. The adapters have {one.added:,.0f}",
        f"a device holds {base.added:,.0f} of these. It sends {in_bytes(gathered)} to",
        f"and {in_bytes(summed)} to all-reduce the gradients of adapters.",
    ]:
        expect(page.locator("#explorer .weights")).to_contain_text(words)


REFUSED_ADAPTERS = [
    ({"rank": 0}, "rank", "Rank is 0. Write 1 or more."),
    ({"rank": "low"}, "rank", 'Rank: cannot read "low" as a whole number'),
    ({"rank": 10**10}, "rank", "Write at most 1,000,000,000."),
    ({"rank": 10**9}, "rank", "Take a lower rank."),
    ({"fsdp": 12, "devices": 12}, "width", "Width is 4,096, and fsdp = 12 does not"),
]


def test_refusals_of_adapters(browser):
    args = browser, "calculator.js", COUNT
    form.check_refusals(*args, ADAPTERS, REFUSED_ADAPTERS)
    [found] = form.counted(*args, [FIRST | {"rank": "low"}])  # hidden, and not read
    assert not isinstance(found, list)


def test_links_to_adapters_open_what_they_promise(calculator, chapter):
    cases = form.opened(calculator, case_of)
    cases = [case for case in cases if case["for"] == "adapters"]
    _, found, single = (by_the_chapter(chapter, case) for case in cases)
    assert cases[0] == cases[1] == ADAPTERS
    every = by_the_chapter(chapter, FIRST)
    text = form.section("calculator", "Predict, then look")
    share = beside(ADAPTERS).added / every.weights
    assert f"Adapters of rank 16 are {100 * share:.1f} % of the weights" in text
    assert 0.92 < sum(found.held.values()) / sum(every.held.values()) < 0.93
    assert 0.66 < sum(found.sent.values()) / sum(every.sent.values()) < 0.68
    assert 0.74 < found.best / every.best < 0.76
    whole = by_the_chapter(chapter, cases[2] | {"for": "train"})
    assert sum(single.held.values()) < 0.9 * 80e9 and sum(whole.held.values()) > 80e9


# --------------------------------------------------------------- a step that generates

BY_ROWS, BY_POSITIONS = "by key heads and rows", "by key heads and positions"
CACHES = ["by key heads", BY_POSITIONS, BY_ROWS, "whole"]
COUNT_GENERATE = """
  const C = Calculator.generate;
  const at = C.read(texts);
  return {
    held: C.held(at), sent: C.sent(at), row: C.rowBytes(at), most: C.mostRows(at),
    critical: C.criticalRows(at),
    decode: C.decodeTimes(at), prefill: C.prefillTimes(at),
  };"""


def generates(chapter: ModuleType, case: dict) -> SimpleNamespace:
    """What the chapter's functions make of a case that generates, by the page."""
    c, model = SimpleNamespace(**case), model_of(chapter, case)
    chip, ways, rows = chapter.CHIPS[c.chip], c.ways, c.rows / c.replicas
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
    numbers = 2 * c.layers * c.head_size * np.prod(shard)
    found = SimpleNamespace(row=c.positions * c.kv_heads * c.head_size * 2 * c.layers)
    found.row *= c.cache_bytes
    found.held = {"weight": float(c.weight_bytes) * part(chapter.parameters(model))}
    found.held |= {"cache": c.cache_bytes * numbers}
    found.held |= {"logits": 4 * rows * c.vocabulary / ways}
    read = float(c.weight_bytes) * part(chapter.multiplied(model))
    looked_at = found.held["cache"] / (key if c.cache == "whole" else 1)

    q, k = (2 * rows * n * c.head_size for n in (c.heads, c.kv_heads))
    summed, gathered = chapter.all_reduce_sent, chapter.all_gather_sent
    per_layer = {  # [what the ring does, bytes, devices]; an all-to-all is as a gather
        "by key heads": [],
        BY_POSITIONS: [(gathered, q / key, group)] * 2
        + [(f, 4 * rows * c.heads / key, group) for f in (summed, gathered)],
        BY_ROWS: [(gathered, q / ways, group)] * 2,
        "whole": [(gathered, k, key)] * 2,
    }[c.cache] * c.layers
    places = dict(data=c.replicas, fsdp=1, model=ways, devices=c.replicas * ways)

    def sums(tokens: float) -> list[tuple]:
        return [(summed, 2 * tokens * c.width, ways)] * (2 * c.layers + 1)

    def times(flops: float, rings: list, touched: float, axes: int) -> NamedTuple:
        speed = wire_speed(chapter, case | places, "model", axes)
        seconds = sum(f(nbytes, n) for f, nbytes, n in rings) / speed
        for f, _, n in rings:  # a gather has half the hops of a sum
            seconds += chapter.hops_and_bytes(0, n)[0] / (1 if f is summed else 2)
        alone = chapter.estimate(flops, 0, chip, axes, touched)
        return alone._replace(wires=seconds)

    def both(flops: float, rings: list, touched: float) -> tuple:
        fast, slow = (times(flops, rings, touched, axes) for axes in (c.axes, 1))
        return fast, chapter.least_seconds(fast), chapter.most_seconds(slow)

    found.sent = {"sums": sum(f(b, n) for f, b, n in sums(rows))}
    found.sent["cache"] = sum(f(b, n) for f, b, n in per_layer)
    flops = chapter.step_flops(part(chapter.multiplied(model)), rows) / 3
    flops += chapter.attention_flops(model, rows, c.positions) / 3 / ways
    found.decode = both(flops, sums(rows) + per_layer, read + looked_at)
    layers = part(c.layers * chapter.layer_parameters(model))
    flops = chapter.step_flops(layers, c.prompt) / 3
    flops += chapter.step_flops(c.vocabulary * c.width / ways, 1) / 3
    flops += chapter.attention_flops(model, c.prompt, c.prompt) / 3 / ways
    found.prefill = both(flops / (c.used / 100), sums(c.prompt), read)
    return found


def random_generate(rng: random.Random, chips: dict) -> dict:
    """A chip, ways and replicas, and sizes that they divide."""
    replicas, ways = rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 3, 4, 8, 16])
    kv_heads = rng.choice([1, 2, 3, 4, 6, 8])
    positions = rng.choice([1, 1, 32, 4096]) * 48
    return random_case(rng, chips) | {
        "width": rng.choice([96, 1000, 9000]),
        "hidden": rng.randint(1, 2000) * ways,
        "heads": rng.randint(1, 4) * math.lcm(kv_heads, ways),
        "kv_heads": kv_heads,
        "vocabulary": rng.randint(1, 2000) * ways,
        "rows": rng.choice([1, 4, 60, 6000]) * replicas * ways,
        "positions": positions,
        "prompt": rng.randint(1, positions),
        "used": rng.randint(1, 100),
        "replicas": replicas,
        "ways": ways,
        "cache": rng.choice(CACHES),
        "weight_bytes": rng.choice([4, 2, 1, 0.5]),
        "cache_bytes": rng.choice([4, 2, 1]),
    }


@pytest.fixture(scope="module")
def generated(browser, chapter) -> list[tuple[dict, dict]]:
    """Random cases that generate, each with what the script counts for it."""
    rng = random.Random(30)
    cases = [random_generate(rng, chapter.CHIPS) for _ in range(600)]
    return list(
        zip(cases, form.counted(browser, "calculator.js", COUNT_GENERATE, cases))
    )


def test_generating_counts_as_the_chapter_does(generated, chapter):
    seen = Counter()
    for case, found in generated:
        expected = generates(chapter, case)
        for name, numbers in {
            "held": expected.held,
            "sent": expected.sent,
            "decode": expected.decode[0]._asdict(),
            "prefill": expected.prefill[0]._asdict(),
        }.items():
            assert found[name] == pytest.approx(numbers, rel=1e-12), (name, case)
        assert found["row"] == expected.row
        seen.update([chapter.binds(expected.decode[0]), case["cache"]])
        seen["first " + chapter.binds(expected.prefill[0])] += 1
        seen["repeated"] += case["kv_heads"] % case["ways"] > 0
    kinds = {"arithmetic", "wires", "memory"}
    kinds |= {f"first {kind}" for kind in kinds} | {*CACHES, "repeated"}
    assert seen.keys() == kinds
    assert min(seen.values()) >= 10, seen


def test_largest_and_critical_batch(browser, generated, chapter):
    """As many rows as are said fit, are accepted, and one more for each replica does
    not fit; arithmetic takes longer than the memory beyond the critical rows alone."""
    proposed, kinds = [], Counter()
    for case, found in generated:
        group = case["ways"] // math.gcd(case["kv_heads"], case["ways"])
        step = case["replicas"] * (group if case["cache"] == BY_ROWS else 1)

        def share(rows: int) -> float:
            held = generates(chapter, case | {"rows": rows}).held
            return sum(held.values()) / chapter.CHIPS[case["chip"]].memory

        assert found["most"] % step == 0
        assert share(found["most"] + step) > 0.9 * (1 - 1e-9), case
        if found["most"]:
            assert share(found["most"]) <= 0.9 * (1 + 1e-9), case
            proposed.append(case | {"rows": found["most"]})
        times = generates(chapter, case).decode[0]
        critical = found["critical"]
        over = case["rows"] / case["replicas"] > critical
        assert over == (times.arithmetic > times.memory), case
        kinds.update([over, critical < math.inf])
    assert min(len(proposed), *kinds.values()) > 30, kinds
    for case in form.counted(browser, "calculator.js", COUNT_GENERATE, proposed):
        assert not isinstance(case, list), case


# Llama 3 8B with 64 rows of 8,192 positions: what a device holds and sends, and times.
BY_HAND = {
    "8 TPU v5e": (
        {},
        [2 * 8_029_995_008 / 8, 64 * 2 * 2 * 32 * 1 * 128 * 8192, 4 * 64 * 128_256 / 8],
        [65 * 2 * 7 / 8 * 2 * 64 * 4096, 0],
        (2 * 7_504_658_432 + 4 * 32 * 8192 * 4096) * 8 / 197e12,
        (2 * 7_504_658_432 / 8 + 8_589_934_592) / 819e9,
        59_637_760 / 100e9 + 65 * 14e-6,
    ),
    "8 H100": (
        {"chip": "H100"},
        [2 * 8_029_995_008 / 8, 8_589_934_592, 4_104_192],
        [59_637_760, 0],
        (2 * 7_504_658_432 + 4 * 32 * 8192 * 4096) * 8 / 989e12,
        (2 * 7_504_658_432 / 8 + 8_589_934_592) / 3.35e12,
        59_637_760 / 450e9 + 65 * 14e-6,
    ),
    "8 H100, two key heads, rows cut": (
        {"chip": "H100", "kv_heads": 2, "cache": BY_ROWS},
        # 32 * 2 * 4096 * 2 * 128 weights of keys and values, each held by four
        [2 * (7_828_668_416 + 3 * 67_108_864) / 8, 16 * 2**27, 4_104_192],
        [59_637_760, 32 * 2 * 3 / 4 * 2 * 64 * 32 * 128 / 8],
        None,
        None,
        (59_637_760 + 3_145_728) / 450e9 + 65 * 14e-6 + 32 * 2 * 3e-6,
    ),
}


@pytest.mark.parametrize("words", BY_HAND)
def test_a_token_by_hand(browser, words):
    changes, held, sent, arithmetic, memory, wires = BY_HAND[words]
    args = browser, "calculator.js", COUNT_GENERATE
    [found] = form.counted(*args, [GENERATE | changes])
    assert [*found["held"].values()] == pytest.approx(held, rel=1e-12)
    assert [*found["sent"].values()] == pytest.approx(sent, rel=1e-12)
    times = {"arithmetic": arithmetic, "memory": memory, "wires": wires}
    for name, span in times.items():
        assert span is None or found["decode"][name] == pytest.approx(span), name


# Chapter 30's bill: what a layer holds of its cache and sends for it, without the sums.
BILL = {"whole": (524_288, 1_024), "by key heads": (262_144, 0)}
BILL |= {BY_POSITIONS: (65_536, 3_360), BY_ROWS: (65_536, 768)}


@pytest.mark.parametrize("cache", BILL)
def test_layouts_hold_and_send_as_chapter_30_measures(browser, cache):
    """The chapter sends float32; of what the page counts, the softmax alone does."""
    one = {"layers": 1, "width": 64, "hidden": 128, "heads": 8, "kv_heads": 2}
    one |= {
        "head_size": 16,
        "vocabulary": 320,
        "rows": 8,
        "positions": 256,
        "prompt": 1,
    }
    case = GENERATE | one | {"cache_bytes": 4, "cache": cache}
    [found] = form.counted(browser, "calculator.js", COUNT_GENERATE, [case])
    held, sent = BILL[cache]
    softmax = 288 if cache == BY_POSITIONS else 0
    assert found["held"]["cache"] == held
    assert found["sent"]["cache"] == (sent - softmax) / 2 + softmax
    assert found["sent"]["sums"] * 2 == 7_168 * 3 / 2  # and that of the embedding


REFUSED_GENERATE = [
    ({"prompt": 9000}, "prompt", "Positions is 8,192. Write at most that, or more"),
    ({"used": 101}, "used", "Write at most 100."),
    ({"ways": 3}, "heads", "Heads is 32, and Ways = 3 does not divide it."),
    ({"replicas": 3}, "rows", "equally many rows. Try 66, or change Replicas."),
    (
        {"kv_heads": 2, "cache": BY_ROWS, "rows": 9},
        "rows",
        "Try 12, or change Replicas or ways to a key head.",
    ),
    (
        {"kv_heads": 2, "positions": 8190, "cache": BY_POSITIONS},
        "positions",
        "ways to a key head = 4 does not divide it.",
    ),
    ({"replicas": 10**9, "rows": 10**9}, "ways", "Write at most 1 way"),
    ({"axes": 3}, "axes", "Write 1 to 2."),
    ({"rows": "many"}, "rows", 'Rows: cannot read "many" as a whole number'),
    ({"layers": 10**8}, "width", "Take a smaller width."),
    ({"layers": 10**5, "rows": 10**9, "cache": "whole"}, "rows", "Take fewer rows."),
]


def test_refusals_of_generating(browser, chapter):
    """They name the field, and what they propose is not refused there."""
    args = browser, "calculator.js", COUNT_GENERATE
    form.check_refusals(*args, GENERATE, REFUSED_GENERATE)
    rng, cases = random.Random(31), []
    for _ in range(400):
        case = random_generate(rng, chapter.CHIPS)
        name = rng.choice(["heads", "hidden", "vocabulary", "rows", "positions"])
        cases.append(case | {name: rng.randint(1, 10**9)})
    again = []
    for case, said in zip(cases, form.counted(*args, cases)):
        if isinstance(said, list) and (cure := re.search(r"Try ([\d,]+)", said[1])):
            again.append(case | {said[0]: cure[1]})
    assert len(again) > 100
    for case, said in zip(again, form.counted(*args, again)):
        said = said[1] if isinstance(said, list) else ""
        assert "does not divide" not in said and "larger" not in said, (said, case)


ONE_H100 = {"chip": "H100", "ways": 1, "rows": 32}
SHOWN_GENERATE = {
    "first": {},
    "h100": ONE_H100,
    "repeated": {"kv_heads": 2, "cache": BY_POSITIONS, "axes": 2},
    "rows": {"kv_heads": 2, "cache": BY_ROWS, "replicas": 2, "weight_bytes": 0.5},
}


@pytest.mark.parametrize("changes", SHOWN_GENERATE.values(), ids=SHOWN_GENERATE)
def test_page_shows_a_step_that_generates(calculator, chapter, changes):
    type_in(calculator, **{"for": "generate"}, **changes)
    case = GENERATE | changes
    found, chip = generates(chapter, case), chapter.CHIPS[case["chip"]]
    numbers = [*found.held.values(), sum(found.held.values()), chip.memory]
    names = ["1 Weights", "2 Cache", "3 Logits", "Held", "A device has"]
    rows = [[name, f"{number:,.0f}"] for name, number in zip(names, numbers)]
    assert table(calculator, ".held") == rows
    sent = [*found.sent.values(), sum(found.sent.values())]
    assert [row[1] for row in table(calculator, ".kinds")] == [
        f"{n:,.0f}" for n in sent
    ]
    (alone, best, worst), (_, first, late) = found.decode, found.prefill
    shown = {row[0]: row[1:] for row in table(calculator, ".times")}
    for name, tokens, span in [
        ("arithmetic", case["rows"], alone.arithmetic),
        ("at best: the longest", case["rows"], best),
        ("at worst: wires not hidden", case["rows"], worst),
        ("a prompt, at best", case["prompt"], first),
        ("a prompt, at worst", case["prompt"], late),
    ]:
        assert shown[name] == [in_seconds(span), three(tokens / span)], name
    for words in [
        f"best, where {chapter.binds(alone)} bind",
        f"{three(1 / best)} to {three(1 / worst)} tokens a second for each row",
        f"first token after {in_seconds(first)} to {in_seconds(late)}.",
    ]:
        expect(answer(calculator)).to_contain_text(words)
    repeats = calculator.get_by_text("the matrices of each are held 4 times")
    assert repeats.count() == ("kv_heads" in changes)
    if chapter.binds(alone) == "memory":
        speeds = {name: shown[f"memory: {name}"][1] for name in ("weights", "cache")}
        mostly = min(speeds, key=lambda name: float(speeds[name].replace(",", "")))
        expect(answer(calculator)).to_contain_text(f"binds, mostly for the {mostly}")
    expect(calculator.locator("#explorer [name=tokens]")).to_be_hidden()


def test_an_address_names_what_the_page_does_not_have(calculator):
    asked = "for=serve&cache=by+pages&weight_bytes=3&base=int3"
    calculator.goto(f"{calculator.url.partition('?')[0]}?{asked}")
    said = calculator.locator("#explorer > [role=status]")
    for name, value, shown in [
        ("for", "serve", "train"),
        ("cache", "by pages", "by key heads"),
        ("weight_bytes", "3", "2"),
        ("base", "int3", "bfloat16"),
    ]:
        expect(said).to_contain_text(f'The address says {name}="{value}", which')
        expect(said).to_contain_text(f"It shows {shown} instead")


def test_worked_token_is_right(calculator, chapter):
    """The numbers of the text, and the steps that its other links open."""
    found, gpu = (generates(chapter, GENERATE | more) for more in ({}, ONE_H100))
    numbers = [*found.held.values(), sum(found.held.values()), found.row]
    numbers += [chapter.parameters(model_of(chapter, GENERATE)), found.sent["sums"]]
    read = 2 * chapter.multiplied(model_of(chapter, GENERATE))
    numbers += [read / 8, read / 2, *gpu.held.values(), read]
    text = form.section("calculator", "Work a token out by hand")
    written = re.findall(r"\b\d{1,3}(?:,\d{3}){2,}", text)
    assert set(written) == {f"{number:,.0f}" for number in numbers}
    (alone, best, worst), (_, first, late) = found.decode, found.prefill
    for words in [
        f"{in_seconds(best)} at best and {in_seconds(worst)} at worst",
        f"{three(1 / best)} to {three(1 / worst)} tokens a second for each row",
        f"{three(64 / best)} to {three(64 / worst)} in all",
        f"after {in_seconds(first)} at best, at half the peak, and after",
        f"{in_seconds(late)} at worst",
        f"take {in_seconds(alone.arithmetic)}",
        f"That is {in_seconds(alone.wires)}",
        f"in {in_seconds(gpu.decode[1])}: {three(1 / gpu.decode[1])} tokens a second",
        f"{three(32 / gpu.decode[1])} in all",
        f"a prompt takes {in_seconds(gpu.prefill[1])}",
    ]:
        assert words in text, words

    cases = form.opened(calculator, case_of)
    cases = [case for case in cases if case["for"] == "generate"]
    _, *steps, shared, cut, first, h100 = [generates(chapter, case) for case in cases]
    assert cases[0] == cases[2] == cases[-2] == GENERATE
    assert cases[-1] == GENERATE | ONE_H100
    long, short = (steps[n + 1].decode[1] / steps[n].decode[1] for n in (0, 2))
    assert 5 < long < 5.5 and 1.1 < short < 1.2
    assert shared.row == first.row / 4 == cut.row
    assert shared.held["cache"] == first.held["cache"] == 4 * cut.held["cache"]
    calculator.goto(f"{calculator.url.partition('?')[0]}?for=generate")
    for words in ("at most 92 rows fit", "holds 10.6 GB of its 16 GB"):
        expect(answer(calculator)).to_contain_text(words)
    type_in(calculator, **ONE_H100)
    expect(answer(calculator)).to_contain_text("at most 52 rows fit")
