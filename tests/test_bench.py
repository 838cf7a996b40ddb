"""What the benchmark computes from its clocks and lists, and what it has recorded."""

import json
import re

import pytest
from bench import PROGRAMS, ROUNDS, WIDE, lap, quartiles, total
from pair import ROOT

PAGE = (ROOT / "book/benchmarks.md").read_text()


def test_ratios_are_taken_round_by_round():
    # The third round is slow for both: a ratio of medians would not be 2.
    times = {"jit": [1, 1, 10, 1, 2], "pmap": [2, 2, 20, 6, 1]}
    assert quartiles(times) == {"jit": [1, 1, 1], "pmap": [2, 2, 2]}
    times = {"jit": [1, 1, 1, 10], "pmap": [4, 1, 2, 30]}
    assert quartiles(times)["pmap"] == pytest.approx([1.75, 2.5, 3.25])


def test_a_lap_leaves_one_part_at_home():
    # 12 bytes in 8 parts of 1.5: seven of them are sent, and seven again.
    assert 2 * lap(8, 12) == total(8, 3) == 21
    assert lap(4, 64) == 48
    assert lap(1, 64) == 0


def test_recorded_numbers_have_every_row_of_the_page():
    found = json.loads((ROOT / "book/measured/bench.json").read_text())
    ways = re.search(r"WAYS = (\[.*?\])", PAGE, re.DOTALL)
    programs = ["regression step", "classifier step", "wide MLP step"]
    assert list(found["ratios"]) == programs
    for row in found["ratios"].values():
        assert {*row} == {"jit", *json.loads(ways[1])}
        assert all(low <= median <= high for low, median, high in row.values())
        assert row["jit"] == [1, 1, 1]
    programs = {(str(p.chapter), p.name): p.least for p in PROGRAMS}
    programs |= {("14", f"wide MLP, {way}"): least for way, least in WIDE.items()}
    rows = {(row["chapter"], row["program"]): row for row in found["bytes"]}
    assert list(rows) == list(programs)
    for key, least in programs.items():
        assert rows[key]["counted"] >= rows[key]["bound"] == round(least)
    assert found["rounds"] == ROUNDS
    assert {"recorded", "jax", "cores", "load"} <= {*found}
