"""The explorer of layouts counts as chapter 22 does, and its page works."""

import ast
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

import jax
import nbformat
import numpy as np
import pytest
from form import answer, state, table, type_in
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pair import ROOT
from playwright.sync_api import Browser, Page, expect

SCRIPTS = [ROOT / "book/_static" / name for name in ("form.js", "layouts.js")]
CHAPTER = ROOT / "notebooks/22_transformer_3d.ipynb"
TAKEN = """Layers Params rng normal layers params LENGTH SEQUENCES AXES Setting specs_of
three settings leaves_with_specs share given all_reduce one_way sent_for_weights
sent_for_tokens bill all_settings""".split()
AXES = ["pipe", "data", "seq", "tensor"]
FIRST = {  # what the fields hold at first: chapter 22's model, at its cheapest setting
    "layers": 4,
    "width": 64,
    "hidden": 256,
    "heads": 8,
    "vocabulary": 64,
    "sequences": 16,
    "tokens": 32,
    "bytes": 4,
    "pipe": 4,
    "data": 2,
    "seq": 1,
    "tensor": 1,
    "microbatches": 8,
    "cut": "no",
    "room": "",
}
LEDGER = {  # what the chapter's compiled programs send and are given, batch included
    "data 8": (1_408_967, 805_632),
    "data 8, cut": (2_097_095, 103_168),
    "tensor 8": (4_139_520, 106_752),
    "seq 8": (3_243_975, 805_632),
    "pipe 4, data 2": (406_474, 215_808),
    "pipe 4, data 2, cut": (2_470_858, 109_312),
    "data 2, tensor 4, cut": (2_468_612, 104_704),
    "pipe, data, tensor": (1_163_656, 208_128),
    "data, seq, tensor, cut": (1_917_830, 204_032),
    "pipe, data, seq, cut": (2_963_402, 207_104),
}
COUNT = """cases => cases.map(texts => {
  try {
    const [at, room] = Layouts.read(texts);
    const { ticks, runs, tokens, micro } = Layouts.work(at);
    const blocks = Layouts.given(at).map(({ spec, block }) => [spec, block]);
    const state = Layouts.given(at).reduce((total, leaf) => total + leaf.bytes, 0);
    const ranking = Layouts.ranking(at, room).map(({ setting, sent, state }) =>
      ({ ...setting, sent, state }));
    const bill = Object.values(Layouts.bill(at));
    return { ticks, runs, tokens, micro, blocks, state, bill, ranking };
  } catch (error) {
    if (!error.field) throw error;
    return [error.field, error.message];
  }
})"""


def counted(browser: Browser, cases: list[dict]) -> list:
    """What the script answers to changes of FIRST, without the page."""
    texts = [
        {name: str(value) for name, value in (FIRST | case).items()} for case in cases
    ]
    with browser.new_context() as context:
        page = context.new_page()
        for script in SCRIPTS:
            page.add_script_tag(path=script)
        return page.evaluate(COUNT, texts)


@pytest.fixture(scope="module")
def chapter() -> SimpleNamespace:
    """What chapter 22 defines under the names in TAKEN; nothing is compiled."""
    cells = nbformat.read(CHAPTER, 4).cells
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node)
    assert found.keys() >= set(TAKEN), set(TAKEN) - found.keys()
    names = {"jax": jax, "np": np, "math": math, "P": P, "NamedTuple": NamedTuple}
    nodes = sorted([found[name] for name in TAKEN], key=lambda node: node.lineno)
    exec(compile(ast.Module(nodes, []), CHAPTER.name, "exec"), names)
    return SimpleNamespace(**names)


def as_case(setting: NamedTuple, **sizes: int) -> dict:
    """A chapter's setting as the fields of the page."""
    case = dict(zip(AXES, setting)) | {"microbatches": setting.batches}
    return case | {"cut": "yes" if setting.fsdp else "no"} | sizes


@pytest.mark.parametrize("sequences", [16, 48, 1024])
def test_counts_as_the_chapter_does(browser, chapter, sequences):
    settings = chapter.all_settings()
    assert len(settings) == 29
    cases = [as_case(setting, sequences=sequences) for setting in settings]
    for setting, found in zip(settings, counted(browser, cases)):
        assert found["bill"] == [*chapter.bill(setting, sequences)], setting
        assert found["state"] == chapter.given(setting), setting


def test_counts_what_the_programs_send(browser, chapter):
    settings = chapter.settings
    assert settings.keys() == LEDGER.keys()
    cases = [as_case(setting) for setting in settings.values()]
    for name, found in zip(settings, counted(browser, cases)):
        given = found["state"] + 2 * 4 * found["tokens"]
        assert (round(sum(found["bill"])), given) == LEDGER[name], name


def test_ranks_all_settings_of_the_chapter(browser, chapter):
    [found] = counted(browser, [{}])
    costs = {}
    for setting in chapter.all_settings():
        cost = sum(chapter.bill(setting, 16))
        costs[as_key(as_case(setting))] = cost, 4 * chapter.given(setting)
    rows = found["ranking"]
    assert {as_key(row): (row["sent"], row["state"]) for row in rows} == costs
    sent = [row["sent"] for row in rows]
    assert sent == sorted(sent)


def as_key(case: dict) -> tuple:
    """The setting of a case, or of a row of the ranking."""
    cut = case["cut"] in (True, "yes")
    return *[case[axis] for axis in AXES], cut, case["microbatches"]


def random_case(rng: random.Random) -> dict:
    """Sizes and a setting; about half of them do not divide."""
    case = {axis: rng.choice([1, 1, 1, 2, 3, 4]) for axis in AXES}
    case["microbatches"] = rng.choice([1, 2, 3, 8])
    case["cut"] = rng.choice(["yes", "no"])

    def size(most: int, *axes: str) -> int:
        """Most often a number that the axes divide."""
        cuts = math.prod(case[axis] for axis in axes)
        return rng.randint(1, most) * (cuts if rng.random() < 0.92 else 1)

    heads = size(3, "tensor")
    return case | {
        "layers": size(3, "pipe"),
        "heads": heads,
        "width": size(4, "data") * (heads if rng.random() < 0.95 else 1),
        "hidden": size(9, "tensor"),
        "vocabulary": size(9, "tensor"),
        "sequences": size(4, "data", "microbatches"),
        "tokens": size(9, "seq"),
        "bytes": rng.choice([2, 4]),
    }


def shapes(c: SimpleNamespace) -> list[tuple]:
    """The shapes of all leaves, in the order of jax.tree.leaves."""
    n, d, h = c.layers, c.width, c.hidden
    layers = [(n, d), (n, d, 3, d), (n, d, d), (n, d), (n, d, h), (n, h, d)]
    return [(c.vocabulary, d), *layers, (d,)]


def ask_jax(c: SimpleNamespace, specs: list[P]) -> list[tuple] | None:
    """The block of each leaf on a mesh of these sizes, or None if something of the
    model or the batch does not divide."""
    mesh = AbstractMesh(tuple(getattr(c, axis) for axis in AXES), tuple(AXES))

    def block(shape: tuple, spec: P) -> tuple:
        return NamedSharding(mesh, spec).shard_shape(shape)

    try:
        block((c.heads,), P("tensor"))
        rows, _ = block((c.sequences, c.tokens), P("data", "seq"))
        np.zeros((rows, 1)).reshape(c.microbatches, -1, 1)
        np.zeros(c.width).reshape(c.heads, -1)
        return [block(shape, spec) for shape, spec in zip(shapes(c), specs)]
    except ValueError:
        return None


def walk(c: SimpleNamespace, blocks: list[tuple]) -> Iterator[tuple[int, Fraction]]:
    """Every collective of one gradient as the program meets it: the place of its kind
    in a bill, and the bytes that a device sends."""

    def all_reduce(size: int, *axes: str) -> Fraction:
        n = math.prod(getattr(c, axis) for axis in axes)
        return Fraction(2 * (n - 1) * size, n)

    cut = c.cut == "yes"
    leaves = [c.bytes * math.prod(block) for block in blocks]
    table, norm1, wqkv, wo, norm2, w1, w2, norm = leaves
    tokens_here = (c.sequences // c.data) * (c.tokens // c.seq)
    micro = c.bytes * tokens_here // c.microbatches * c.width
    layers_here = c.layers // c.pipe
    ways = ["forward", "again", "back"] if cut else ["forward", "back"]
    for tick in range(c.microbatches + c.pipe - 1):
        for _ in range(layers_here):
            for way in ways:
                for _ in range(1 if way == "again" else 2):
                    yield 2, all_reduce(micro, "tensor")
                for _ in range(c.seq - 1):
                    yield 3, Fraction(2 * micro, c.tensor)  # keys and values
            if cut:  # gathered, gathered again and scattered
                visits = 3 if tick == 0 else 2
                for weights in (wqkv, wo, w1, w2):
                    yield 1, visits * (c.data - 1) * Fraction(weights, layers_here)
        if c.pipe > 1:
            yield 4, Fraction(2 * micro)  # forward, and its gradient back
    if cut:
        yield 1, Fraction(2 * (c.data - 1) * table)
    for leaf in (wqkv, wo, w1, w2):
        yield 0, all_reduce(leaf, *(["seq"] if cut else ["data", "seq"]))
    for leaf in (norm1, norm2):
        yield 0, all_reduce(leaf, "data", "seq")
    yield 0, all_reduce(table, "pipe", *(["seq"] if cut else ["data", "seq"]))
    yield 0, all_reduce(norm, "pipe", "data", "seq")
    for _ in range(2):  # the embedding's sum, and its gradient at the logits
        yield 2, all_reduce(micro * c.microbatches, "tensor")
    for _ in range(3):  # the largest logit, the sum, and the one that counts
        yield 2, all_reduce(c.bytes * tokens_here, "tensor")
    yield 5, all_reduce(4, "pipe") + all_reduce(4, "data", "seq")


def test_counts_other_sizes(browser, chapter):
    rng = random.Random(22)
    cases = [random_case(rng) for _ in range(300)]
    kinds, refused = Counter(), Counter()
    for case, found in zip(cases, counted(browser, cases)):
        c = SimpleNamespace(**case)
        specs = jax.tree.leaves(
            chapter.specs_of(c.cut == "yes"), is_leaf=lambda node: isinstance(node, P)
        )
        blocks = ask_jax(c, specs)
        if blocks is None:
            assert isinstance(found, list) and "does not divide it" in found[1], case
            refused[found[0]] += 1
            continue
        assert isinstance(found, dict), (case, found)
        assert found["blocks"] == [[[*s], [*b]] for s, b in zip(specs, blocks)], case
        bill = [Fraction(0)] * 6
        for kind, sent in walk(c, blocks):
            bill[kind] += sent
        np.testing.assert_allclose(found["bill"], [*map(float, bill)], rtol=1e-12)
        kinds.update(kind for kind, sent in enumerate(bill) if sent)
    assert len(kinds) == 6 and min(kinds.values()) >= 30, kinds
    sizes = "layers width hidden heads vocabulary sequences tokens".split()
    assert refused.keys() == set(sizes), refused


def test_ranking_holds_every_setting_that_divides(browser, chapter):
    """Twelve devices, and sizes that not all of their settings divide."""
    model = {"layers": 6, "width": 48, "heads": 4, "hidden": 24, "vocabulary": 12}
    model |= {"sequences": 36, "tokens": 18, "pipe": 3, "data": 4, "microbatches": 9}
    [found] = counted(browser, [model])
    here = SimpleNamespace(**FIRST | model)
    expected = set()
    for sizes in np.ndindex(12, 12, 12, 12):
        if math.prod(n + 1 for n in sizes) != 12:
            continue
        for cut in (False, True):
            mesh = {axis: n + 1 for axis, n in zip(AXES, sizes)}
            c = SimpleNamespace(**vars(here) | mesh | {"microbatches": 1})
            specs = jax.tree.leaves(
                chapter.specs_of(cut), is_leaf=lambda node: isinstance(node, P)
            )
            if ask_jax(c, specs) and (c.data > 1 or not cut):
                expected.add((*mesh.values(), cut))
    rows = {as_key(row)[:5]: row for row in found["ranking"]}
    assert rows.keys() == expected and len(rows) == len(found["ranking"])
    for row in rows.values():
        most = max(16, 4 * row["pipe"])
        allowed = [m for m in range(1, most + 1) if 36 // row["data"] % m == 0]
        assert row["microbatches"] == (1 if row["pipe"] == 1 else max(allowed))
    room = sorted(row["state"] for row in rows.values())[20]
    [fitting] = counted(browser, [model | {"room": room / 1e9}])
    fits = [row for row in found["ranking"] if row["state"] <= room]
    assert fitting["ranking"] == fits and 20 < len(fits) < len(rows)


def test_state_is_what_optax_keeps():
    """Adam's moments have the parameters' type, so the state is four times as large."""
    import optax

    params = {"w": jax.numpy.zeros((4, 4), jax.numpy.bfloat16)}
    moments = optax.adam(1e-3).init(params)[0]
    assert moments.mu["w"].nbytes + moments.nu["w"].nbytes == 2 * params["w"].nbytes


@pytest.fixture
def explorer(quiet_page) -> Page:
    return quiet_page("book/layouts.html")


def test_first_state_is_the_cheapest_of_the_chapter(explorer):
    assert state(explorer) == {name: str(value) for name, value in FIRST.items()}
    expect(answer(explorer)).to_contain_text("given 213,760 bytes (214 kB)")
    expect(answer(explorer)).to_contain_text("sends 406,474 bytes (406 kB)")
    expect(answer(explorer)).to_contain_text(
        "29 settings of 8 devices, none sends less"
    )
    assert table(explorer, ".kinds")[0] == ["1 gradients", "226,240", "56 %"]
    assert table(explorer, ".kinds")[6] == ["All", "406,474", "100 %"]
    assert table(explorer, ".state")[3:] == [
        ["State, the sum", "855,040"],
        ["Its part of the batch", "2,048"],
    ]
    bar = explorer.get_by_role("img", name="Of the state of a whole model")
    assert "Parameters 7 %, Gradient 7 %" in bar.get_attribute("aria-label")
    time = explorer.locator("#explorer .time")
    expect(time).to_contain_text("weighs 8,192 bytes")
    expect(time).to_contain_text("11 ticks forward, in which a device runs 11 layers")
    expect(time).to_contain_text("In 3 of the ticks")
    expect(time).to_contain_text("bubble is 27 %")


def test_answer_follows_what_is_typed(explorer):
    type_in(
        explorer, pipe=1, data=1, tensor=8, microbatches=1, cut="yes", vocabulary=96
    )
    wqkv = ["wqkv", 'P("pipe", "data", None, "tensor")', "(4, 64, 3, 64)"]
    assert table(explorer, ".leaves")[2] == [*wqkv, "(4, 64, 3, 8)", "24,576"]
    type_in(explorer, vocabulary=64, cut="no")
    sent = LEDGER["tensor 8"][0]
    expect(answer(explorer)).to_contain_text(f"sends {sent:,} bytes (4.14 MB)")
    expect(answer(explorer)).to_contain_text("the cheapest sends 406,474 bytes")
    expect(explorer.locator("#explorer .time")).to_contain_text("no pipeline")
    bar = explorer.get_by_role("img", name="Of what a device sends")
    assert "sums of tensor 100 %" in bar.get_attribute("aria-label")
    type_in(explorer, bytes=2)
    expect(answer(explorer)).to_contain_text(f"sends {sent // 2:,} bytes")


def test_ranking_is_taken_by_mouse_and_by_keyboard(explorer):
    def row(number: int):
        return explorer.locator("#explorer .ranking tr").nth(number)

    before = [cells[:3] for cells in table(explorer, ".ranking")]
    assert before[1][1] == "pipe 4, seq 2, 16 microbatches"
    row(1).locator("td").last.click()
    taken = {"pipe": "4", "data": "1", "seq": "2", "microbatches": "16"}
    assert state(explorer) == {n: str(v) for n, v in FIRST.items()} | taken
    expect(row(1)).to_have_attribute("aria-current", "true")
    expect(answer(explorer)).to_contain_text("it is number 2;")
    expect(row(1).get_by_role("button")).to_be_focused()
    explorer.keyboard.press("Tab")
    explorer.keyboard.press("Enter")
    expect(row(2)).to_have_attribute("aria-current", "true")
    assert state(explorer)["data"] == "4"
    explorer.go_back()
    assert state(explorer)["microbatches"] == "16"
    type_in(explorer, sequences=1024)
    explorer.get_by_role("button", name="data 8, cut", exact=True).click()
    taken = {"pipe": "1", "data": "8", "seq": "1", "cut": "yes", "microbatches": "1"}
    assert state(explorer).items() >= taken.items()


def test_own_setting_stands_behind_the_cheapest_five(explorer):
    type_in(explorer, pipe=1, data=1, tensor=8, microbatches=1)
    ranks = [int(cells[0]) for cells in table(explorer, ".ranking")]
    assert ranks[:5] == [1, 2, 3, 4, 5] and len(ranks) == 6 and ranks[5] > 20
    own = explorer.locator("#explorer .ranking tr[aria-current]")
    expect(own.locator("th")).to_have_text("tensor 8")


def test_room_limits_the_ranking(explorer):
    type_in(explorer, room="0.0005")
    expect(answer(explorer)).to_contain_text(
        "Its state does not fit. The cheapest that"
    )
    assert all(" kB" in cells[3] for cells in table(explorer, ".ranking"))
    assert not explorer.locator("#explorer .ranking tr[aria-current]").count()
    type_in(explorer, room="0.000001")
    expect(answer(explorer)).to_contain_text("No setting of these devices does.")
    type_in(explorer, room="0.001")
    expect(answer(explorer)).to_contain_text("whose state fits, none sends less")


def test_models_to_try(explorer):
    first = state(explorer)
    explorer.get_by_role("button", name="6.6 billion parameters").click()
    parameters = 32 * (2 * 4096 + 12 * 4096**2) + 32000 * 4096 + 4096
    assert state(explorer)["pipe"] == "4" and 6.5e9 < parameters < 6.65e9
    type_in(explorer, pipe=1, data=8, microbatches=1)
    expect(answer(explorer)).to_contain_text(f"given {2 * parameters:,} bytes")
    explorer.get_by_role("button", name="Chapter 22's model").click()
    changed = {"pipe": "1", "data": "8", "microbatches": "1"}
    assert state(explorer) == first | changed


def test_address_carries_the_state(explorer, browser):
    type_in(explorer, layers=8, sequences="1,024", cut="yes", bytes=2, room="0.5")
    expect(answer(explorer)).to_contain_text("Each of 8 devices is given")
    expect(explorer).to_have_url(re.compile(r"\?layers=8&.*&cut=yes&room=0.5$"))
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(explorer.url)
        assert state(other) == state(explorer)
        assert answer(other).inner_text() == answer(explorer).inner_text()
        assert table(other, ".ranking") == table(explorer, ".ranking")


def test_back_and_forward(explorer):
    first = state(explorer)
    explorer.get_by_label("Sequences", exact=True).press("Control+a")
    explorer.keyboard.type("1024")  # one step back, for all of its digits
    type_in(explorer, width=128)
    last = state(explorer)
    explorer.go_back()
    assert state(explorer) == first | {"sequences": "1024"}
    explorer.go_back()
    assert state(explorer) == first
    explorer.go_forward()
    explorer.go_forward()
    assert state(explorer) == last


@pytest.mark.parametrize(
    "values, field, words",
    [
        ({"layers": 6}, "layers", "Layers is 6, and pipe = 4 does not divide it"),
        ({"layers": 6}, "layers", "Try 8, or change pipe."),
        ({"heads": 7}, "width", "Try 70, or change heads."),
        ({"tensor": 3}, "heads", "Heads is 8, and tensor = 3 does not"),
        ({"tensor": 2, "hidden": 3}, "hidden", "Hidden size is 3, and tensor = 2"),
        ({"tensor": 2, "vocabulary": 7}, "vocabulary", "Try 8, or change tensor."),
        ({"data": 3, "sequences": 24, "cut": "yes"}, "width", "data = 3 does not"),
        ({"seq": 3}, "tokens", "Sequence length is 32, and seq = 3 does not"),
        ({"data": 3}, "sequences", "Sequences is 16, and data × microbatches = 24"),
        ({"data": 3}, "sequences", "Try 24, or change data or microbatches."),
        ({"heads": 0}, "heads", "Heads is 0. Write 1 or more."),
        ({"pipe": "four"}, "pipe", 'pipe: cannot read "four" as a whole number'),
        ({"width": "64.5"}, "width", 'Width: cannot read "64.5"'),
        ({"tokens": ""}, "tokens", 'Sequence length: cannot read ""'),
        ({"seq": "-2"}, "seq", 'seq: cannot read "-2"'),
        ({"microbatches": 10**9}, "microbatches", "Write at most 10,000,000."),
        ({"data": 10**6}, "data", "This page stops at 65,536"),
        ({"width": 8 * 10**6, "layers": 8 * 10**6}, "width", "smaller width"),
        ({"sequences": 8 * 10**6, "tokens": 10**7}, "sequences", "fewer sequences"),
        ({"room": "much"}, "room", 'Room: cannot read "much" as gigabytes'),
        ({"room": "0"}, "room", "Write a number above 0"),
    ],
)
def test_errors_say_what_to_do(explorer, values, field, words):
    type_in(explorer, **values)
    expect(answer(explorer)).to_contain_text(words)
    assert explorer.locator("#explorer [aria-invalid]").get_attribute("name") == field
    expect(explorer.locator("#explorer .result")).to_have_attribute("inert", "")
    type_in(explorer, **{name: FIRST[name] for name in values})
    expect(answer(explorer)).to_contain_text("sends 406,474 bytes")
    assert explorer.locator("#explorer [aria-invalid], #explorer [inert]").count() == 0


STATES = {
    "first": "",
    "one-device": "?pipe=1&data=1&microbatches=1",
    "mixed": "?pipe=2&data=2&seq=2&cut=yes&microbatches=4",
    "large": "?layers=96&width=12288&hidden=49152&heads=96&vocabulary=49152&bytes=2"
    "&sequences=2048&tokens=2048&pipe=8&data=32&seq=2&tensor=8&microbatches=64&room=80",
    "no-room": "?room=0.000001",
    "refused": "?tensor=3",
}


@pytest.mark.parametrize("query", STATES.values(), ids=STATES)
def test_fits_a_phone(explorer, query):
    explorer.set_viewport_size({"width": 360, "height": 740})
    explorer.goto(explorer.url + query)
    assert explorer.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.chromium  # it asks axe alone
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("query", STATES.values(), ids=STATES)
def test_is_accessible(explorer, barriers, query, scheme, width):
    explorer.set_viewport_size({"width": width, "height": 900})
    explorer.emulate_media(color_scheme=scheme)
    explorer.goto(explorer.url + query)
    found = barriers(explorer, "article")
    assert not found, "\n".join(found)


def test_links_of_the_page_lead_to_states(explorer):
    links = explorer.locator("article a[href^='?']").all()
    sent = {}
    for address in [link.get_attribute("href") for link in links]:
        explorer.goto(explorer.url.partition("?")[0] + address)
        assert explorer.locator("#explorer [aria-invalid]").count() == 0, address
        sent[address] = int(table(explorer, ".kinds")[-1][1].replace(",", ""))
    assert len(sent) == 10
    [small, large, cut, spread, narrow, wide_tensor, wide_data, *seqs, hand] = [
        *sent.values()
    ]
    assert small == 406_474 and large > 10 * small
    assert cut == LEDGER["pipe 4, data 2, cut"][0] and cut > spread > small
    assert narrow == LEDGER["tensor 8"][0] > 2 * LEDGER["data 8"][0]
    assert wide_tensor < wide_data
    assert seqs[0] < seqs[1]
    assert hand == LEDGER["data 8"][0]


def test_an_address_cannot_add_markup(explorer):
    explorer.goto(explorer.url + "?layers=<b>4</b>&cut=<b>&bytes=7")
    assert explorer.locator("#explorer b").count() == 0
    assert state(explorer)["cut"] == "no" and state(explorer)["bytes"] == "4"
    expect(answer(explorer)).to_contain_text('Layers: cannot read "<b>4</b>"')


def test_without_javascript(browser, site):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(site + "book/layouts.html")
        assert page.get_by_text("The explorer needs JavaScript").is_visible()
        assert not page.locator("#explorer").is_visible()
