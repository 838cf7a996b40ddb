"""The calculator of a step counts as chapter 26 does, and its page works."""

import ast
import random
import re
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import nbformat
import numpy as np
import pytest
from form import answer, state, table, type_in
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pair import ROOT
from playwright.sync_api import Browser, Page, expect

SCRIPTS = [ROOT / "book/_static" / name for name in ("form.js", "calculator.js")]
CHAPTER = ROOT / "notebooks/26_cost_models.ipynb"
TAKEN = """GB GiB Chip CHIPS step_flops all_reduce_sent all_gather_sent
data_parallel_sent fully_sharded_sent tensor_parallel_sent Recipe state_bytes Estimate
estimate binds least_seconds most_seconds flops_per_byte least_tokens most_ways
Transformer layer_parameters parameters multiplied attention_flops kept_bytes Layout
sent_bytes""".split()
SIZES = "layers width hidden heads kv_heads head_size vocabulary".split()
AXES = ["data", "fsdp", "model"]
RECIPES = {"Adam f32": (2, 2, 12), "Adam bf16": (2, 2, 4), "SGD": (2, 2, 0)}
FIRST = {  # what the fields hold at first, in the order of the address
    "layers": 32,
    "width": 4096,
    "hidden": 14336,
    "heads": 32,
    "kv_heads": 8,
    "head_size": 128,
    "vocabulary": 128256,
    "tokens": 524288,
    "sequence": 2048,
    "devices": 64,
    "axes": 1,
    "data": 1,
    "fsdp": 64,
    "model": 1,
    "chip": "TPU v5e",
    "recipe": "Adam f32",
    "gathers": "twice",
    "gated": "yes",
}
CHOICES = ["chip", "recipe", "gathers", "gated"]
COUNT = """cases => cases.map(texts => {
  const C = Calculator;
  try {
    const at = C.read(texts);
    const times = C.times(at);
    return {
      weights: C.weights(at), multiplied: C.multiplied(at),
      flops: [C.stepFlops(at), C.attentionFlops(at)],
      sent: C.sent(at), held: C.held(at), limits: C.limits(at), times,
      binds: C.binds(times), least: C.leastSeconds(times), most: C.mostSeconds(times),
    };
  } catch (error) {
    if (!error.field) throw error;
    return [error.field, error.message];
  }
})"""


def asked(browser: Browser, question: str, given: object = None) -> object:
    """What the script answers, without the page."""
    with browser.new_context() as context:
        page = context.new_page()
        for script in SCRIPTS:
            page.add_script_tag(path=script)
        return page.evaluate(question, given)


def counted(browser: Browser, cases: list[dict]) -> list:
    """What the script counts for changes of FIRST."""
    texts = [
        {name: str(value) for name, value in (FIRST | case).items()} for case in cases
    ]
    return asked(browser, COUNT, texts)


@pytest.fixture(scope="module")
def chapter() -> SimpleNamespace:
    """What chapter 26 defines under the names in TAKEN."""
    cells = nbformat.read(CHAPTER, 4).cells
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node)
    assert found.keys() >= set(TAKEN), set(TAKEN) - found.keys()
    names = {"NamedTuple": NamedTuple}
    nodes = sorted([found[name] for name in TAKEN], key=lambda node: node.lineno)
    exec(compile(ast.Module(nodes, []), CHAPTER.name, "exec"), names)
    return SimpleNamespace(**names)


def by_the_chapter(chapter: SimpleNamespace, case: dict) -> dict:
    """What the chapter's functions count for a case."""
    c = SimpleNamespace(**case)
    sizes = [case[name] for name in SIZES]
    model = chapter.Transformer(*sizes, gated=c.gated == "yes")
    chip = chapter.CHIPS[c.chip]
    gathers = {"once": 1, "twice": 2}[c.gathers]
    weights = chapter.parameters(model)
    here = c.tokens / (c.data * c.fsdp)
    held = {}
    for place, name in enumerate(["weight", "gradient", "state"]):
        one = np.where(np.arange(3) == place, RECIPES[c.recipe], 0)
        recipe = chapter.Recipe(*map(int, one))
        held[name] = chapter.state_bytes(weights, c.fsdp * c.model, recipe)
    held["gathered"] = 0
    if gathers == 1:  # weights that stay until the way back, beside a device's own
        held["gathered"] = chapter.all_gather_sent(2 * weights / c.model, c.fsdp)
    held["inputs"] = chapter.kept_bytes(c.layers, here, c.width)
    layout = chapter.Layout(c.data, c.fsdp, c.model)
    sent = chapter.sent_bytes(model, c.tokens, layout, gathers)
    flops = [
        chapter.step_flops(chapter.multiplied(model), c.tokens),
        chapter.attention_flops(model, c.tokens, c.sequence),
    ]
    all_sent = sum(sent.values())
    times = chapter.estimate(
        sum(flops) / c.devices, all_sent, chip, c.axes, 2 * sum(held.values())
    )
    enough = chapter.least_tokens(chip, c.axes)
    ways = chapter.most_ways(c.hidden, chip, c.axes)
    return {
        "weights": weights,
        "multiplied": chapter.multiplied(model),
        "flops": flops,
        "sent": sent,
        "held": held,
        "limits": {
            "data": {"has": c.tokens / c.data, "above": enough},
            "fsdp": {"has": here, "above": enough},
            "model": {"has": c.model, "below": ways},
        },
        "times": times._asdict(),
        "binds": chapter.binds(times),
        "least": chapter.least_seconds(times),
        "most": chapter.most_seconds(times),
    }


def assert_same(found: object, expected: object, where: str = "") -> None:
    """Numbers agree up to rounding, and everything else exactly."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for name in expected:
            assert_same(found[name], expected[name], f"{where} {name}")
    elif isinstance(expected, str):
        assert found == expected, where
    else:
        numbers = np.asarray(found, float), np.asarray(expected, float)
        np.testing.assert_allclose(*numbers, rtol=1e-12, err_msg=where)


def random_case(rng: random.Random, chips: dict) -> dict:
    """Sizes, a chip and a layout; about a third of them do not divide."""
    case = {axis: rng.choice([1, 1, 2, 3, 4, 8, 64]) for axis in AXES}
    chip = rng.choice(list(chips))

    def size(most: int, *cuts: int) -> int:
        """Most often a number that the cuts divide."""
        divides = rng.random() < 0.95
        return rng.randint(1, most) * (int(np.prod(cuts)) if divides else 1)

    kv_heads = rng.randint(1, 4)
    devices = case["data"] * case["fsdp"] * case["model"]
    sequence = rng.choice([1, 30, 2048])
    return case | {
        "devices": devices if rng.random() < 0.95 else rng.randint(1, 8),
        "chip": chip,
        "axes": rng.randint(1, chips[chip].axes if rng.random() < 0.95 else 4),
        "layers": rng.randint(1, 90),
        "width": size(900, case["fsdp"]),
        "hidden": size(2000, case["model"]),
        "heads": size(4, kv_heads, case["model"]),
        "kv_heads": kv_heads,
        "head_size": rng.randint(1, 256),
        "vocabulary": size(2000, case["model"]),
        "tokens": size(20, sequence, case["data"], case["fsdp"]),
        "sequence": sequence,
        "recipe": rng.choice(list(RECIPES)),
        "gathers": rng.choice(["once", "twice"]),
        "gated": rng.choice(["yes", "no"]),
    }


def refuses(c: SimpleNamespace, chips: dict) -> str | None:
    """The first field whose number does not go with the others: JAX says whether a
    size can be cut along an axis."""
    if c.data * c.fsdp * c.model != c.devices:
        return "devices"
    if c.axes > chips[c.chip].axes:
        return "axes"
    mesh = AbstractMesh((c.data, c.fsdp, c.model), tuple(AXES))
    sequences, rest = divmod(c.tokens, c.sequence)
    cut = [
        ("heads", c.heads, "model"),
        ("hidden", c.hidden, "model"),
        ("vocabulary", c.vocabulary, "model"),
        ("width", c.width, "fsdp"),
        ("tokens", sequences, ("data", "fsdp")),
    ]
    if c.heads % c.kv_heads:
        return "heads"
    for name, size, axes in cut:
        try:
            NamedSharding(mesh, P(axes)).shard_shape((size,))
        except ValueError:
            return name
        if name == "tokens" and rest:
            return name
    return None


def test_chips_are_the_chapters(browser, chapter):
    chips = asked(browser, "() => Calculator.CHIPS")
    assert chips == {name: list(chip) for name, chip in chapter.CHIPS.items()}
    recipes = asked(browser, "() => Calculator.RECIPES")
    assert recipes == {name: list(sizes) for name, sizes in RECIPES.items()}
    assert recipes[FIRST["recipe"]] == list(chapter.Recipe())


def test_counts_as_the_chapter_does(browser, chapter):
    rng = random.Random(26)
    cases = [FIRST | random_case(rng, chapter.CHIPS) for _ in range(600)]
    seen, refused = Counter(), Counter()
    for case, found in zip(cases, counted(browser, cases)):
        field = refuses(SimpleNamespace(**case), chapter.CHIPS)
        if field:
            assert isinstance(found, list) and found[0] == field, (case, found)
            refused[field] += 1
            continue
        assert isinstance(found, dict), (case, found)
        assert_same(found, by_the_chapter(chapter, case), str(case))
        seen[found["binds"]] += 1
        seen.update(axis for axis, size in found["sent"].items() if size)
        seen.update([case["chip"], case["recipe"], case["gathers"], case["gated"]])
    kinds = {"arithmetic", "wires", "memory", *AXES, *chapter.CHIPS, *RECIPES}
    assert seen.keys() == kinds | {"once", "twice", "yes", "no"}
    assert min(seen.values()) >= 20, seen
    fields = "devices axes heads hidden vocabulary width tokens".split()
    assert refused.keys() == set(fields) and min(refused.values()) >= 5, refused


def test_counts_the_models_to_try(browser, chapter):
    large = {"layers": 80, "width": 8192, "hidden": 28672, "heads": 64}
    found = counted(browser, [{}, large])
    assert [round(one["weights"] / 1e8) for one in found] == [80, 706]
    for one, case in zip(found, [FIRST, FIRST | large]):
        assert_same(one, by_the_chapter(chapter, case))


def test_inequalities_are_those_of_the_tightest_pass(browser, chapter):
    """On many devices, in any mixture of the axes: sums of gradients hide behind the
    way back, the first gathers and an MLP's first sum behind the way forward."""
    rng = random.Random(62)
    cases = [FIRST | random_case(rng, chapter.CHIPS) for _ in range(600)]
    holds = {axis: Counter() for axis in AXES}
    for case, found in zip(cases, counted(browser, cases)):
        if isinstance(found, list):
            continue
        c = SimpleNamespace(**case)
        chip = chapter.CHIPS[c.chip]
        model = chapter.Transformer(*[case[name] for name in SIZES], c.gated == "yes")
        weights = chapter.parameters(model)
        sent = chapter.sent_bytes(
            model, c.tokens, chapter.Layout(c.data, c.fsdp, c.model)
        )
        block = 2 * c.width * c.hidden  # weights of an MLP with two matrices
        passes = {  # FLOPs, and the bytes that have to hide behind them
            "data": (4 * weights, sent["data"]),
            "fsdp": (2 * weights, sent["fsdp"] / 3),
            "model": (2 * block, sent["model"] / (4 * c.layers)),
        }
        for axis, (flops, nbytes) in passes.items():
            n = case[axis]
            if n == 1:
                continue
            times = chapter.estimate(
                flops * c.tokens / c.devices, nbytes * n / (n - 1), chip, c.axes
            )
            limit = found["limits"][axis]
            if "above" in limit:
                fulfilled = limit["has"] > limit["above"]
            else:
                fulfilled = limit["has"] < limit["below"]
            assert fulfilled == (times.arithmetic > times.wires), (axis, case)
            holds[axis][fulfilled] += 1
    for axis, counts in holds.items():
        assert min(counts[True], counts[False]) >= 20, (axis, counts)


@pytest.fixture
def calculator(quiet_page) -> Page:
    return quiet_page("book/calculator.html")


def in_seconds(text: str) -> float:
    """The seconds that a text such as 502 ms stands for."""
    number, unit = text.split()
    return float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def test_first_state(calculator):
    assert state(calculator) == {name: str(value) for name, value in FIRST.items()}
    expect(answer(calculator)).to_have_text(
        "Each of 64 devices holds 4.15 GB of its 16 GB. It sends 47.4 GB in a step,"
        " which takes 2.01 s at best, where arithmetic binds, and 2.48 s at worst:"
        " 261,000 to 211,000 tokens a second, with the arithmetic at 100 % to 81 % of"
        " its peak."
    )
    assert table(calculator, ".held") == [
        ["1 Weights", "250,937,344"],
        ["2 Gradients", "250,937,344"],
        ["3 Optimizer", "1,505,624,064"],
        ["4 Kept gathered", "0"],
        ["5 Layers' inputs", "2,147,483,648"],
        ["Held", "4,154,982,400"],
        ["A device has", "16,000,000,000"],
    ]
    assert table(calculator, ".kinds")[1:] == [
        ["2 fsdp", "47,427,158,016", "100 %"],
        ["3 model", "0", "0 %"],
        ["All", "47,427,158,016", "100 %"],
    ]
    assert table(calculator, ".times") == [
        ["arithmetic", "2.01 s", "261,000"],
        ["wires", "474 ms", "1,110,000"],
        ["memory", "10.1 ms", "51,700,000"],
        ["at best: the longest", "2.01 s", "261,000"],
        ["at worst: wires not hidden", "2.48 s", "211,000"],
    ]
    assert table(calculator, ".limits") == [
        ["data", "over 1,970 tokens", "524,288", "unused"],
        ["fsdp", "over 1,970 tokens", "8,192", "yes"],
        ["model", "under 7.28 ways", "1", "unused"],
    ]
    weights = calculator.locator("#explorer .weights")
    expect(weights).to_contain_text("has 8,029,995,008 weights")
    expect(weights).to_contain_text("multiplied with 7,504,658,432 of them")
    expect(weights).to_contain_text("mixing are 7 % of the arithmetic")
    bar = calculator.get_by_role("img", name="Of a device's memory")
    assert "Weights 2 %, Gradients 2 %, Optimizer 9 %" in bar.get_attribute(
        "aria-label"
    )
    bar = calculator.get_by_role("img", name="Of what a device sends")
    assert "data 0 %, fsdp 100 %, model 0 %" in bar.get_attribute("aria-label")


def test_answer_follows_what_is_typed(calculator):
    type_in(calculator, data=2, fsdp=2, model=16)
    shares = [row[2] for row in table(calculator, ".kinds")]
    assert shares == ["0 %", "1 %", "99 %", "100 %"]
    expect(answer(calculator)).to_contain_text("where wires bind,")
    binds = [row[2:] for row in table(calculator, ".limits")]
    assert binds == [["262,144", "yes"], ["131,072", "yes"], ["16", "no"]]
    type_in(calculator, axes=2)
    assert table(calculator, ".limits")[2][1:] == ["under 14.6 ways", "16", "no"]
    expect(answer(calculator)).to_contain_text("would hold 38.4 GB, and has 16 GB")
    type_in(calculator, recipe="SGD")
    expect(answer(calculator)).to_contain_text("would hold 35.4 GB")
    type_in(calculator, chip="H100", axes=1)
    expect(answer(calculator)).to_contain_text("holds 35.4 GB of its 80 GB")
    type_in(calculator, fsdp=1, data=8, gathers="once")
    assert table(calculator, ".held")[3] == ["4 Kept gathered", "0"]
    type_in(calculator, data=1, model=1, fsdp=64)
    assert table(calculator, ".held")[3] == ["4 Kept gathered", "15,809,052,672"]
    assert table(calculator, ".kinds")[1][1] == "31,618,105,344"
    type_in(calculator, sequence=8192)
    weights = calculator.locator("#explorer .weights")
    expect(weights).to_contain_text("mixing are 22 % of the arithmetic")


def test_beyond_a_server_the_answer_warns(calculator):
    type_in(calculator, chip="H100", devices=8, fsdp=8)
    expect(answer(calculator)).to_contain_text("of its peak.")
    expect(answer(calculator)).not_to_contain_text("NVLink")
    type_in(calculator, devices=16, fsdp=16)
    expect(answer(calculator)).to_contain_text("NVLink joins 8 of them")
    type_in(calculator, chip="TPU v5e")
    expect(answer(calculator)).not_to_contain_text("NVLink")


def test_one_device_has_no_wires(calculator):
    type_in(calculator, devices=1, fsdp=1, tokens=2048, gated="no")
    expect(answer(calculator)).to_contain_text("The one device would hold")
    expect(answer(calculator)).to_contain_text("It sends 0 bytes in a step")
    assert table(calculator, ".times")[1] == ["wires", "0 s", "no limit"]
    assert {row[3] for row in table(calculator, ".limits")} == {"unused"}
    label = "data 0 %, fsdp 0 %, model 0 %"
    bar = calculator.get_by_role("img", name="Of what a device sends")
    assert label in bar.get_attribute("aria-label")


def test_memory_can_bind(calculator):
    calculator.get_by_role("button", name="A small one").click()
    type_in(calculator, tokens=1024, sequence=128, devices=8, fsdp=1, data=8)
    expect(answer(calculator)).to_contain_text("where memory binds")
    expect(answer(calculator)).to_contain_text("ms at worst")
    type_in(calculator, recipe="SGD", layers=1, width=8, hidden=8, vocabulary=8)
    assert table(calculator, ".times")[0][1].endswith(" µs")


def test_models_to_try_by_keyboard(calculator, chapter):
    first = state(calculator)
    calculator.get_by_role("button", name="Llama 3 8B").focus()
    calculator.keyboard.press("Tab")
    calculator.keyboard.press("Enter")
    weights = calculator.locator("#explorer .weights")
    expect(weights).to_contain_text("The model has 70,552,387,584 weights")
    expect(answer(calculator)).to_contain_text("would hold 28.4 GB")
    calculator.keyboard.press("Tab")
    calculator.keyboard.press("Space")
    expect(weights).to_contain_text("The model has 162,201,600 weights")
    assert state(calculator)["gated"] == "no" and state(calculator)["fsdp"] == "64"
    calculator.go_back()
    expect(weights).to_contain_text("The model has 70,552,387,584 weights")
    calculator.get_by_role("button", name="Llama 3 8B").click()
    assert state(calculator) == first


def test_chips_are_chosen_by_keyboard(calculator, chapter):
    options = calculator.locator("[name=chip] option").all_inner_texts()
    assert options == list(chapter.CHIPS)
    options = calculator.locator("[name=recipe] option").all_inner_texts()
    assert options == list(RECIPES)
    calculator.locator("[name=chip]").focus()
    calculator.keyboard.press("ArrowDown")
    assert state(calculator)["chip"] == "TPU v5p"
    expect(answer(calculator)).to_contain_text("of its 102 GB")
    assert table(calculator, ".held")[-1][1] == f"{95 * 2**30:,}"


def test_address_carries_the_state(calculator, browser):
    changed = {"recipe": "SGD", "gathers": "once", "gated": "no", "chip": "TPU v6e"}
    type_in(calculator, layers=8, tokens="1,048,576", axes=2, **changed)
    expect(calculator).to_have_url(
        re.compile(
            r"\?layers=8&.*&chip=TPU\+v6e&recipe=SGD&gathers=once&gated=no(#.*)?$"
        )
    )
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(calculator.url)
        assert state(other) == state(calculator)
        assert answer(other).inner_text() == answer(calculator).inner_text()
        for name in ("held", "kinds", "times", "limits"):
            assert table(other, f".{name}") == table(calculator, f".{name}")


def test_back_and_forward(calculator):
    first = state(calculator)
    calculator.get_by_label("Sequence length").press("Control+a")
    calculator.keyboard.type("1024")  # one step back, for all of its digits
    type_in(calculator, width=8192)
    last = state(calculator)
    calculator.go_back()
    assert state(calculator) == first | {"sequence": "1024"}
    calculator.go_back()
    assert state(calculator) == first
    calculator.go_forward()
    calculator.go_forward()
    assert state(calculator) == last


@pytest.mark.parametrize(
    "values, field, words",
    [
        ({"devices": 32}, "devices", "Devices is 32, and data × fsdp × model = 64."),
        ({"model": 3}, "devices", "Write 192, or change data, fsdp or model."),
        ({"axes": 3}, "axes", "Axes of links is 3, and TPU v5e has 2. Write 1 to 2."),
        ({"chip": "H100", "axes": 2}, "axes", "H100 has 1. Write 1."),
        (
            {"kv_heads": 5},
            "heads",
            "Heads is 32, and Key heads = 5 does not divide it.",
        ),
        (
            {"kv_heads": 5},
            "heads",
            "equally many queries. Try 35, or change Key heads.",
        ),
        ({"model": 3, "devices": 192}, "heads", "Heads is 32, and model = 3 does not"),
        (
            {"model": 2, "devices": 128, "hidden": 3},
            "hidden",
            "Try 4, or change model.",
        ),
        ({"model": 2, "devices": 128, "vocabulary": 7}, "vocabulary", "Try 8, or"),
        (
            {"fsdp": 12, "devices": 12},
            "width",
            "Width is 4,096, and fsdp = 12 does not",
        ),
        ({"sequence": 3000}, "tokens", "Sequence length × data × fsdp = 192,000 does"),
        ({"data": 8, "devices": 512}, "tokens", "Try 1,048,576, or change Sequence"),
        ({"heads": 0}, "heads", "Heads is 0. Write 1 or more."),
        ({"devices": "many"}, "devices", 'Devices: cannot read "many" as a whole'),
        ({"width": "64.5"}, "width", 'Width: cannot read "64.5"'),
        ({"tokens": ""}, "tokens", 'Tokens: cannot read ""'),
        ({"model": "-2"}, "model", 'model: cannot read "-2"'),
        ({"layers": 10**10}, "layers", "Write at most 1,000,000,000."),
        ({"layers": 10**8}, "width", "Take a smaller width."),
        ({"layers": 10**6, "tokens": 2**29}, "tokens", "Take fewer tokens."),
    ],
)
def test_errors_say_what_to_do_and_lose_nothing(calculator, values, field, words):
    type_in(calculator, **values)
    for _ in range(2):
        expect(answer(calculator)).to_contain_text(words)
        invalid = calculator.locator("#explorer [aria-invalid]")
        assert invalid.get_attribute("name") == field
        typed = FIRST | values
        assert state(calculator) == {name: str(value) for name, value in typed.items()}
        expect(calculator.locator("#explorer .result")).to_have_attribute("inert", "")
        calculator.reload()
    type_in(calculator, **{name: FIRST[name] for name in values})
    expect(answer(calculator)).to_contain_text("It sends 47.4 GB")
    assert not calculator.locator("#explorer [aria-invalid], #explorer [inert]").count()


STATES = {
    "first": "",
    "one-device": "?devices=1&fsdp=1",
    "mixed": "?data=2&fsdp=8&model=4&gathers=once",
    "large": "?layers=126&width=16384&hidden=53248&heads=128&tokens=16777216&chip=TPU7x"
    "&sequence=8192&devices=16384&data=16&fsdp=128&model=8&axes=3",
    "refused": "?model=3",
}


@pytest.mark.parametrize("query", STATES.values(), ids=STATES)
def test_fits_a_phone(calculator, query):
    calculator.set_viewport_size({"width": 360, "height": 740})
    calculator.goto(calculator.url + query)
    assert calculator.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.chromium  # it asks axe alone
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("query", STATES.values(), ids=STATES)
def test_is_accessible(calculator, barriers, query, scheme, width):
    calculator.set_viewport_size({"width": width, "height": 900})
    calculator.emulate_media(color_scheme=scheme)
    calculator.goto(calculator.url + query)
    found = barriers(calculator, "article")
    assert not found, "\n".join(found)


def test_links_of_the_page_lead_to_states(calculator):
    links = calculator.locator("article a[href^='?']").all()
    pages = []
    for address in [link.get_attribute("href") for link in links]:
        calculator.goto(calculator.url.partition("?")[0] + address)
        assert calculator.locator("#explorer [aria-invalid]").count() == 0, address
        seconds = [in_seconds(row[1]) for row in table(calculator, ".times")]
        sent = int(table(calculator, ".kinds")[-1][1].replace(",", ""))
        pages.append((seconds, sent, answer(calculator).inner_text()))
    [few, many, replicas, small, *large, newer, both_axes, hand] = pages
    [four, two, four_later, two_later] = large
    assert hand == few
    best, worst = np.divide(few[0], many[0])[3:]
    assert 3.95 < best < 4.05 and 2.4 < worst < 2.6
    assert np.isclose(replicas[1], few[1] * 2 / 3)
    assert "does not fit" in replicas[2] and "does not fit" not in small[2]
    assert four[1] < two[1] and four_later[1] > two_later[1]
    assert "70,552" not in hand[2] and "of its 102 GB" in four[2]
    assert 2 < many[0][3] / newer[0][3] < 2.2 and "wires bind" in newer[2]
    assert 4 < many[0][3] / both_axes[0][3] < 4.3


def test_worked_example_is_right(calculator, chapter):
    found = by_the_chapter(chapter, FIRST)
    state_bytes = sum(found["held"].values()) - found["held"]["inputs"]
    model = chapter.Transformer(*[FIRST[name] for name in SIZES])
    numbers = [chapter.layer_parameters(model), found["weights"], found["multiplied"]]
    numbers += [state_bytes, found["held"]["inputs"], sum(found["held"].values())]
    numbers += [found["sent"]["fsdp"]]
    section = calculator.locator("section#work-one-out-by-hand")
    written = re.findall(r"\b\d{1,3}(?:,\d{3}){2,}", section.inner_text())
    assert set(written) == {f"{number:,.0f}" for number in numbers}
    assert round(sum(found["flops"]) / 1e14) == 253  # 2.53e16
    for text in [
        "2.01 s",
        "474 ms",
        "10.1 ms",
        "2.48 s",
        "261,000 to 211,000",
        "1,970",
    ]:
        expect(section).to_contain_text(text)
        expect(calculator.locator("#explorer")).to_contain_text(text)


def test_an_address_cannot_add_markup(calculator):
    calculator.goto(calculator.url + "?layers=<b>4</b>&chip=<b>&recipe=<b>&gated=<b>")
    assert calculator.locator("#explorer b").count() == 0
    kept = {name: FIRST[name] for name in CHOICES}
    assert state(calculator).items() >= kept.items()
    expect(answer(calculator)).to_contain_text('Layers: cannot read "<b>4</b>"')


def test_without_javascript(browser, site):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(site + "book/calculator.html")
        assert page.get_by_text("The calculator needs JavaScript").is_visible()
        assert not page.locator("#explorer").is_visible()
        assert page.get_by_text("8,029,995,008").first.is_visible()
