"""Test that the sharding explorer agrees with JAX and that its page works."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from math import prod

import jax
import numpy as np
import pytest
from form import answer, check_rejected, counted, linked, state, table, type_in
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from playwright.sync_api import Browser, Page, expect
from test_widgets import STATES

jax.config.update("jax_num_cpu_devices", 8)

COUNT = """
  const parsed = Sharding.parse(texts);
  const { block, copies, devices } = Sharding.layout(...parsed);
  const blocks = devices.map(({ place, index }) => [place, index]);
  return { block, blocks, copies: block.includes(0) ? null : copies };"""


def answers(browser: Browser, cases: list[tuple[str, str, str]]) -> list[dict | list]:
    """Return the script's result for each (shape, mesh, spec), or [field, message]."""
    texts = [dict(zip(("shape", "mesh", "spec"), case)) for case in cases]
    return counted(browser, "explorer.js", COUNT, texts)


def as_text(shape: tuple, axes: dict[str, int], spec: tuple) -> tuple[str, str, str]:
    """Return the texts of the three fields for a case."""
    mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
    return str(shape), mesh, f"P({', '.join(map(repr, spec))})"


SHAPES = [(8,), (12, 6), (0, 16), (3, 4, 8)]
MESHES = [{"x": 2, "y": 4}, {"x": 4, "y": 2}, {"a_1": 1, "data": 7}, {"y": 2, "x": 3}]
MESHES += [{"x": 2, "data": 2, "model": 2}]


def all_cases() -> Iterator[tuple[tuple, dict[str, int], tuple]]:
    """Yield shape, mesh axes and spec, for all specs of two axes and an unknown one."""
    for shape, axes in itertools.product(SHAPES, MESHES):
        a, b, *_ = axes
        entries = [None, (), a, b, (a, b), (b, a), "unknown"]
        for length in range(len(shape) + 1):
            for spec in itertools.product(entries, repeat=length):
                yield shape, axes, spec
        yield shape, axes, (None,) * (len(shape) + 1)


def result_of_jax(shape: tuple, axes: dict[str, int], spec: tuple) -> dict | str:
    """Return the result of JAX for a case, or the name of the function that raises."""
    auto = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)
    try:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
    except Exception:
        return "NamedSharding"
    try:
        jax.device_put(np.zeros(shape, np.int8), sharding)
    except Exception:
        return "device_put"
    bounds = {
        device: [[*part.indices(size)[:2]] for part, size in zip(index, shape)]
        for device, index in sharding.devices_indices_map(shape).items()
    }
    different = len({str(block) for block in bounds.values()})
    return {
        "block": [*sharding.shard_shape(shape)],
        "blocks": [
            [[*place], bounds[device]] for place, device in np.ndenumerate(mesh.devices)
        ],
        "copies": mesh.size // different if prod(shape) else None,
    }


def test_results_equal_those_of_jax(browser):
    cases, errors = [*all_cases()], Counter()
    results = answers(browser, [as_text(*case) for case in cases])
    for case, found in zip(cases, results):
        expected = result_of_jax(*case)
        if isinstance(expected, str):
            assert isinstance(found, list) and f" in {expected}" in found[1], case
            message = re.sub(r"Dimension \d", "A dimension", found[1])
            errors[message[:15], expected] += 1
        else:
            assert found == expected, case
    assert len(errors) == 4, errors


PRINTED = """NamedSharding(mesh=Mesh('x': 2, 'y': 4, axis_types=(Auto, Auto)),
spec=P('x', 'y'), memory_kind=device)"""
NOTATIONS = [
    ("(8, 16)", "{'x': 2, 'y': 4}", "P('x', ('y',))"),
    (" 8, 16, ", "x: 2, y: 4,", "('x', 'y',)"),
    ("8,16", "x=2,y=4", "x, y"),
    ("8,16", "x=2,y=4", "jax.NamedSharding(mesh, P(('x',), 'y'))"),
    ("8,16", "x=2,y=4", PRINTED),
]


def test_notations_of_one_case(browser):
    plain = as_text((8, 16), {"x": 2, "y": 4}, ("x", "y"))
    expected, *results = answers(browser, [plain, *NOTATIONS])
    assert expected["block"] == [4, 4]
    for notation, found in zip(NOTATIONS, results):
        assert found == expected, notation


@pytest.fixture
def explorer(quiet_page) -> Page:
    return quiet_page("book/explorer.html")


def test_table_sentence_and_code_follow_the_fields(explorer):
    type_in(explorer, shape="16, 6", mesh="data=2, model=4", spec="P('data', None)")
    explorer.get_by_label("Element type").select_option("bfloat16")
    scope = {}
    exec(explorer.locator("#explorer pre").inner_text(), scope)
    x, mesh = scope["x"], scope["mesh"]
    assert (x.shape, x.dtype.name) == ((16, 6), "bfloat16")
    assert (dict(mesh.shape), x.sharding.spec[0]) == ({"data": 2, "model": 4}, "data")

    rows = table(explorer)
    assert len(rows) == mesh.size
    array = np.arange(x.size).reshape(x.shape)
    for shard, row in zip(x.addressable_shards, rows):
        block = eval(f"array{row[2]}", {"array": array})
        np.testing.assert_array_equal(block, array[shard.index])
    assert rows[5] == ["5", "data=1, model=1", rows[5][2], "(8, 6)"]

    shards = [shard.data.nbytes for shard in x.addressable_shards]
    assert sum(shards) == 4 * x.nbytes
    expect(answer(explorer)).to_have_text(
        f"Each of 8 devices has a block of 8 × 6: {shards[0]} bytes. Each block is on"
        " 4 devices, replicated over model: all devices together need 4 times the"
        f" array, {sum(shards)} bytes."
    )


def test_presets_use_the_axes_of_the_mesh(explorer):
    typed = {"shape": "24, 24", "mesh": "b=2, a=4"}
    type_in(explorer, **typed, spec="P(")
    specs = ["P()", 'P("b", None)', 'P(None, "a")', 'P("b", "a")', 'P("a", "b")']
    presets = explorer.locator("#explorer .presets button").all()
    for preset, spec in zip(presets, [*specs, 'P(("b", "a"), None)'], strict=True):
        preset.press("Enter")
        assert state(explorer) == typed | {"dtype": "float32", "spec": spec}


REJECTED = [
    ({"shape": "8, many"}, "shape", 'Cannot read "many" as a size'),
    ({"shape": "4,096"}, "shape", "Enter 4096 or 4_096."),
    ({"spec": 'P(P.UNCONSTRAINED, "y")'}, "spec", "partitioner, in with_sharding"),
    ({"spec": 'P("x", unreduced={"y"})'}, "spec", "Leave out unreduced="),
    ({"shape": f"8, {8**20}"}, "shape", "more elements"),
    ({"mesh": "x=2, y"}, "mesh", 'Cannot read "y"'),
    ({"mesh": "x=2, x=4"}, "mesh", 'Two axes of the mesh are named "x"'),
    ({"mesh": "x=0"}, "mesh", "at least one device"),
    ({"mesh": "x=8, y=9"}, "mesh", "72 devices"),
    ({"spec": 'P("x", "y"'}, "spec", "Cannot read this spec"),
    ({"spec": 'P(("x", None))'}, "spec", "A tuple inside a spec"),
    ({"spec": 'P("z")'}, "spec", 'has no axis "z". It has "x" and "y"'),
    ({"spec": 'P("x", "x")'}, "spec", 'names the axis "x" twice'),
    ({"spec": "P(None, None, None)"}, "spec", "more entries (3)"),
    ({"shape": "8, 10"}, "shape", "Pad it to 12"),
]


def test_errors_name_the_field_and_the_fix(browser):
    first = {"shape": "8, 8", "mesh": "x=2, y=4", "spec": 'P("x", "y")'}
    check_rejected(browser, "explorer.js", COUNT, first, REJECTED)


def test_table_and_drawing_mark_one_device(explorer):
    type_in(explorer, spec='P("x")')
    on = explorer.locator("#explorer .on")
    explorer.locator(".array [data-device='5']").hover()
    assert {e.get_attribute("data-device") for e in on.all()} == {"5"}
    assert on.count() == 3  # in the mesh, in the array and in the table
    sentence = explorer.locator("#explorer .held")
    expect(sentence).to_have_text(
        "Device 5 at x=1, y=1 has [4:8, :]. Copies on 4, 6 and 7."
    )
    explorer.locator("#explorer tbody tr").first.focus()
    explorer.keyboard.press("ArrowDown")
    expect(explorer.locator("#explorer tbody tr:focus th")).to_have_text("1")
    expect(sentence).to_contain_text("Device 1 at x=0, y=1")
    assert {e.get_attribute("data-device") for e in on.all()} == {"1"}


def test_links_of_the_page(browser):
    first = {"shape": "8, 8", "mesh": "x=2, y=4", "spec": 'P("x", "y")'}
    texts = [first | case for case in linked("explorer").values()]
    found = dict(zip(linked("explorer"), counted(browser, "explorer.js", COUNT, texts)))
    rejected = [text for text, each in found.items() if isinstance(each, list)]
    assert rejected == ["Check 12 rows"]


def test_every_device_is_drawn(explorer):
    for kind in ("copies", "rank-3", "rank-0", "wide", "64-copies"):
        explorer.goto(explorer.url.partition("?")[0] + STATES[f"explorer-{kind}"])
        devices = [row[0] for row in table(explorer)]
        for drawing in (".mesh", ".array"):
            numbers = explorer.locator(f"{drawing} .number").all_text_contents()
            assert sorted(numbers, key=int) == devices, kind
