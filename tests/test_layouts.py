"""The explorer of layouts counts as chapter 22 does, and its page works."""

import itertools
import math
import random
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import form
import jax
import numpy as np
import optax
import pytest
from form import answer, state, table, type_in
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from playwright.sync_api import Browser, Page, expect

TAKEN = """Layers Params rng normal layers params LENGTH SEQUENCES AXES Setting specs_of
three settings leaves_with_specs share given all_reduce one_way sent_for_weights
sent_for_tokens bill all_settings"""
AXES = ("pipe", "data", "seq", "tensor")
SIZES = {  # where the chapter writes a size of its model, and a name for it here
    "ticks * 4 //": "ticks * LAYERS //",
    "4 * sequences * LENGTH * 64": "BYTES * sequences * LENGTH * WIDTH",
    "3 * activation / 64": "3 * activation / WIDTH",
}
CHOSEN = {"bytes": 4, "cut": "no", "room": ""}
FIRST = form.sizes_at_first("layouts") | CHOSEN
COUNT = """
  const [at, room] = Layouts.read(texts);
  const leaves = Layouts.given(at);
  const ranking = Layouts.ranking(at, room).map(({ setting, sent, state }) =>
    ({ ...setting, sent, state }));
  return { blocks: leaves.map(({ spec, block }) => [spec, block]), ranking,
           given: leaves.reduce((total, leaf) => total + leaf.bytes, 0),
           tokens: Layouts.work(at).tokens, bill: Object.values(Layouts.bill(at)) };"""


@pytest.fixture
def chapter() -> ModuleType:
    """What chapter 22 defines under the names in TAKEN; nothing is compiled."""
    given = {"jax": jax, "np": np, "math": math, "P": P, "NamedTuple": NamedTuple}
    given |= {"LAYERS": 4, "WIDTH": 64, "BYTES": 4}
    return form.defined("22_transformer_3d", TAKEN, SIZES, **given)


def take_sizes(chapter: ModuleType, c: SimpleNamespace) -> None:
    """Give the chapter's functions a model of other sizes."""
    n, d, h = c.layers, c.width, c.hidden
    shapes = [(n, d), (n, d, 3, d), (n, d, d), (n, d), (n, d, h), (n, h, d)]
    shapes = [(c.vocabulary, d), *shapes, (d,)]
    leaves = [np.broadcast_to(np.zeros((), f"f{c.bytes}"), shape) for shape in shapes]
    chapter.params = jax.tree.unflatten(jax.tree.structure(chapter.params), leaves)
    chapter.LAYERS, chapter.WIDTH, chapter.BYTES = c.layers, c.width, c.bytes
    chapter.LENGTH = c.tokens


def as_setting(chapter: ModuleType, case: dict) -> NamedTuple:
    """The fields of the page, or a row of its ranking, as a chapter's setting."""
    axes = [case[axis] for axis in AXES]
    return chapter.Setting(*axes, case["cut"] in (True, "yes"), case["microbatches"])


def counted(browser: Browser, cases: list[dict]) -> list[dict | list]:
    """What the script counts for each case, or the field and words of its refusal."""
    return form.counted(browser, "layouts.js", COUNT, cases)


def test_ranks_all_settings_of_the_chapter(browser, chapter):
    [found] = counted(browser, [FIRST])
    rows = {as_setting(chapter, row): row for row in found["ranking"]}
    costs = {setting: (row["sent"], row["state"]) for setting, row in rows.items()}
    assert costs == {
        setting: (sum(chapter.bill(setting, 16)), 4 * chapter.given(setting))
        for setting in chapter.all_settings()
    }
    sent = [row["sent"] for row in found["ranking"]]
    assert sent == sorted(sent)


def random_case(rng: random.Random) -> dict:
    """A setting, and sizes that it divides."""
    axes = {axis: rng.choice([1, 1, 1, 2, 3, 4]) for axis in AXES}
    c = SimpleNamespace(**axes, microbatches=rng.choice([1, 2, 3, 8]), room="")
    c.cut = rng.choice(["yes", "no"])
    c.layers = rng.randint(1, 3) * c.pipe
    c.heads = rng.randint(1, 3) * c.tensor
    c.width = rng.randint(1, 4) * c.heads * c.data
    c.hidden = rng.randint(1, 9) * c.tensor
    c.vocabulary = rng.randint(1, 9) * c.tensor
    c.sequences = rng.randint(1, 4) * c.data * c.microbatches
    c.tokens = rng.randint(1, 9) * c.seq
    c.bytes = rng.choice([2, 4])
    return vars(c)


def test_counts_other_sizes(browser, chapter):
    rng = random.Random(22)
    cases = [random_case(rng) for _ in range(200)]
    kinds = Counter()
    for case, found in zip(cases, counted(browser, cases)):
        c = SimpleNamespace(**case)
        take_sizes(chapter, c)
        setting = as_setting(chapter, case)
        mesh = AbstractMesh(setting[:4], AXES)
        specs = chapter.specs_of(c.cut == "yes")
        assert found["blocks"] == [
            [[*spec], [*NamedSharding(mesh, spec).shard_shape(leaf.shape)]]
            for leaf, spec in chapter.leaves_with_specs(chapter.params, specs)
        ], case
        bill = chapter.bill(setting, c.sequences)
        assert found["given"] == chapter.given(setting, chapter.params), case
        assert found["tokens"] == c.sequences * c.tokens / (c.data * c.seq), case
        np.testing.assert_allclose(found["bill"][:5], bill[:5], rtol=1e-12)
        assert int(found["bill"][5] + 1e-9) == bill[5], case  # the chapter's is whole
        kinds.update(kind for kind, sent in enumerate(bill) if sent)
    assert len(kinds) == 6 and min(kinds.values()) >= 30, kinds


def test_ranking_holds_every_setting_that_divides(browser, chapter):
    """Twelve devices, and sizes that not all of their settings divide."""
    model = {"layers": 6, "width": 48, "heads": 4, "hidden": 24, "vocabulary": 12}
    model |= {"sequences": 36, "tokens": 18, "pipe": 3, "data": 4, "microbatches": 9}
    model = FIRST | model
    cases = [
        model | dict(zip(AXES, axes), cut=cut, microbatches=1)
        for *axes, cut in itertools.product(*[range(1, 13)] * 4, ("no", "yes"))
        if math.prod(axes) == 12 and (axes[1] > 1 or cut == "no")
    ]
    [found, *others] = counted(browser, [model, *cases])
    divides = [case for case, other in zip(cases, others) if isinstance(other, dict)]
    rows = {as_setting(chapter, row)[:5]: row for row in found["ranking"]}
    assert rows.keys() == {as_setting(chapter, case)[:5] for case in divides}
    assert len(rows) == len(found["ranking"]) and len(divides) < len(cases)
    for row in rows.values():
        most = max(16, 4 * row["pipe"])
        allowed = [m for m in range(1, most + 1) if 36 // row["data"] % m == 0]
        assert row["microbatches"] == (1 if row["pipe"] == 1 else max(allowed))
    room = sorted(row["state"] for row in rows.values())[20]
    [fitting] = counted(browser, [model | {"room": room / 1e9}])
    fits = [row for row in found["ranking"] if row["state"] <= room]
    assert fitting["ranking"] == fits and 20 < len(fits) < len(rows)


REFUSED = [
    ({"layers": 6}, "layers", "Layers is 6, and pipe = 4 does not divide it"),
    ({"heads": 7}, "width", "Try 70, or change heads."),
    ({"tensor": 3}, "heads", "Heads is 8, and tensor = 3 does not"),
    ({"tensor": 2, "hidden": 3}, "hidden", "Hidden size is 3, and tensor = 2"),
    ({"tensor": 2, "vocabulary": 7}, "vocabulary", "Try 8, or change tensor."),
    ({"data": 3, "sequences": 24, "cut": "yes"}, "width", "data = 3 does not"),
    ({"seq": 3}, "tokens", "Sequence length is 32, and seq = 3 does not"),
    ({"data": 3}, "sequences", "Try 24, or change data or microbatches."),
    ({"microbatches": 10**9}, "microbatches", "Write at most 10,000,000."),
    ({"data": 10**6}, "data", "This page stops at 65,536"),
    ({"width": 8 * 10**6, "layers": 8 * 10**6}, "width", "smaller width"),
    ({"sequences": 8 * 10**6, "tokens": 10**7}, "sequences", "fewer sequences"),
    ({"room": "much"}, "room", 'Room: cannot read "much" as gigabytes'),
    ({"room": "0"}, "room", "Write a number above 0"),
]


def test_refusals_name_the_field_and_say_what_to_do(browser):
    form.check_refusals(browser, "layouts.js", COUNT, FIRST, REFUSED)


def test_state_is_what_optax_keeps():
    """Adam's moments have the parameters' type, so the state is four times as large."""
    params = jax.numpy.zeros(4, jax.numpy.bfloat16)
    moments = optax.adam(1e-3).init(params)[0]
    assert moments.mu.dtype == moments.nu.dtype == params.dtype


@pytest.fixture
def explorer(quiet_page) -> Page:
    return quiet_page("book/layouts.html")


def test_first_state_is_the_cheapest_of_the_chapter(explorer, chapter):
    assert state(explorer) == {name: str(value) for name, value in FIRST.items()}
    setting = chapter.settings["pipe 4, data 2"]
    bill, given = chapter.bill(setting, 16), chapter.given(setting)
    expect(answer(explorer)).to_have_text(
        f"Each of 8 devices is given {given:,} bytes (214 kB) of parameters and sends"
        f" {sum(bill):,.0f} bytes (406 kB) for one gradient."
        " Of 29 settings of 8 devices, none sends less."
    )
    rows = table(explorer, ".kinds")
    assert [row[1] for row in rows] == [f"{n:,.0f}" for n in (*bill, sum(bill))]
    assert rows[0] == ["1 gradients", f"{bill[0]:,.0f}", "56 %"]
    assert [row[1] for row in table(explorer, ".state")] == [
        f"{n:,}" for n in (given, given, 2 * given, 4 * given, 2_048)
    ]
    bar = explorer.get_by_role("img", name="Of the state of a whole model")
    assert "Parameters 7 %, Gradient 7 %" in bar.get_attribute("aria-label")
    expect(explorer.locator("#explorer .time")).to_have_text(
        "The activation of one microbatch weighs 8,192 bytes (8.19 kB) on a device."
        " A gradient takes 11 ticks forward, in which a device runs 11 layers."
        " In 3 of the ticks no microbatch is there for it: the bubble is 27 %."
    )


def test_answer_follows_what_is_typed(explorer, chapter):
    type_in(explorer, pipe=1, data=1, tensor=8, microbatches=1, cut="yes")
    wqkv = ["wqkv", 'P("pipe", "data", None, "tensor")', "(4, 64, 3, 64)"]
    assert table(explorer, ".leaves")[2] == [*wqkv, "(4, 64, 3, 8)", "24,576"]
    type_in(explorer, cut="no")
    cost = round(sum(chapter.bill(chapter.settings["tensor 8"], 16)))
    least = round(sum(chapter.bill(chapter.settings["pipe 4, data 2"], 16)))
    expect(answer(explorer)).to_contain_text(f"sends {cost:,} bytes (4.14 MB)")
    expect(answer(explorer)).to_contain_text(f"the cheapest sends {least:,} bytes")
    expect(explorer.locator("#explorer .time")).to_contain_text("no pipeline")
    bar = explorer.get_by_role("img", name="Of what a device sends")
    assert "sums of tensor 100 %" in bar.get_attribute("aria-label")
    ranks = [int(cells[0]) for cells in table(explorer, ".ranking")]
    assert ranks[:5] == [1, 2, 3, 4, 5] and len(ranks) == 6 and ranks[5] > 20
    own = explorer.locator("#explorer .ranking tr[aria-current]")
    expect(own.locator("th")).to_have_text("tensor 8")
    type_in(explorer, bytes=2)
    expect(answer(explorer)).to_contain_text(f"sends {cost // 2:,} bytes")


def test_ranking_is_taken_by_mouse_and_by_keyboard(explorer):
    row = explorer.locator("#explorer .ranking tr").nth
    assert table(explorer, ".ranking")[1][1] == "pipe 4, seq 2, 16 microbatches"
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


def test_room_limits_the_ranking(explorer):
    for room, words in {
        "0.0005": "Its state does not fit. The cheapest that fits sends",
        "0.000001": "No setting of these devices does.",
        "0.001": "whose state fits, none sends less",
    }.items():
        type_in(explorer, room=room)
        expect(answer(explorer)).to_contain_text(words)
        own = explorer.locator("#explorer .ranking tr[aria-current]").count()
        assert own == (room == "0.001")


def test_models_to_try(explorer):
    first = state(explorer)
    explorer.get_by_role("button", name="6.6 billion parameters").click()
    parameters = 32 * (2 * 4096 + 12 * 4096**2) + 32000 * 4096 + 4096
    assert 6.55e9 < parameters < 6.65e9
    type_in(explorer, pipe=1, data=8, microbatches=1)
    expect(answer(explorer)).to_contain_text(f"given {2 * parameters:,} bytes")
    explorer.get_by_role("button", name="Chapter 22's model").click()
    changed = {"pipe": "1", "data": "8", "microbatches": "1"}
    assert state(explorer) == first | changed


def test_links_of_the_page_open_what_they_promise(browser, chapter):
    def cost(name: str, sequences: int = 16) -> int:
        return round(sum(chapter.bill(chapter.settings[name], sequences)))

    linked = counted(browser, form.linked("layouts", FIRST))
    sent = [round(sum(found["bill"])) for found in linked]
    few, many, cut, no_pipe, *wide, seq, tensor, by_hand = sent
    assert few == cost("pipe 4, data 2")
    assert many == cost("pipe 4, data 2", 1024)
    assert cut == cost("pipe 4, data 2, cut")
    assert no_pipe == cost("data 8, cut")
    assert by_hand == cost("data 8")
    assert wide[0] == cost("tensor 8")
    assert 2.8 * by_hand < wide[0] < 3 * by_hand
    assert wide[1] < wide[2] and seq < tensor


def test_worked_example_is_right(chapter):
    setting = chapter.settings["data 8"]
    gradients, *_ = bill = chapter.bill(setting, 16)
    given = chapter.given(setting)
    numbers = [given // 4, given, gradients, sum(bill)]
    form.check_worked("layouts", "Work one out by hand", 10**5, numbers)
