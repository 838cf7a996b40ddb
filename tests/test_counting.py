"""`collectives` counts the bytes that a compiled program sends, or raises an error.

book/counting.md asserts, whenever it is built, what the CPU's compiler prints for each
kind, every format of groups, nested loops, branches, and one form of each other
compiler. The tests here have more forms, reduced to what `collectives` reads: those of
a TPU (libtpu 0.0.50.1) and a GPU (jax-cuda12-plugin 0.12.0.1), and those that cannot be
counted.
"""

import re
from types import SimpleNamespace

import pytest
from pair import ROOT

NAMES = {}
exec((ROOT / "book/cells/collectives.py").read_text(), NAMES)

FOURS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
SUM = f"%a = f32[256]{{0}} all-reduce(%p), {FOURS}, to_apply=%add"
PAIRS = "source_target_pairs="
RING = "{{0,1},{1,2},{2,3},{3,0}}"
PERMUTE = f"%a = f32[256]{{0}} collective-permute(%p), {PAIRS}"


def read(text: str) -> dict:
    """Count the collectives of a program that is given as text."""
    return NAMES["collectives"](SimpleNamespace(as_text=lambda: text))


def block(name: str, *lines: str) -> str:
    """Return the text of a computation with these lines."""
    return "\n  ".join([f"{name} (p: f32[]) -> f32[] {{", *lines]) + "\n}\n\n"


def counted(*lines: str, others: str = "") -> dict:
    """Count a program with these lines in its ENTRY, and with other computations."""
    return read(others + "\n\n" + block("ENTRY %main", *lines))


@pytest.mark.parametrize(
    "of_1024_bytes",
    [
        "(f32[64]{0}, /*index=1*/f32[192]{0})",
        "bf16[512]{0:T(8,128)(2,1)S(1)}",
        "f8e4m3fn[1024]{0}",
        "pred[1024]{0}",
        "u2[4095]{0:E(2)}",
    ],
)
def test_types_have_their_bytes(of_1024_bytes):
    line = f"ROOT %a.1 = {of_1024_bytes} all-gather(%p), {FOURS}, dimensions={{0}}, "
    line += 'metadata={op_name="jit(f)/all-reduce(x)"}'
    assert counted(line) == {("all-gather", 4): (1, 768)}


def test_axes_may_have_any_name():
    groups = "replica_groups=mesh['my axis'=2,'b-c'=4] {'b-c'}"
    assert counted(SUM.replace(FOURS, groups)) == {("all-reduce", 4): (1, 1536)}


def test_data_that_stays_on_its_device_is_not_counted():
    for groups in "[8,1]<=[8]", "mesh['x'=8,'z'=1] {'z'}":
        assert counted(SUM.replace(FOURS, f"replica_groups={groups}")) == {}
    assert counted(PERMUTE + "{}") == {}
    host = "%s = (f32[8], u32[], token[]) send(%p, %t), is_host_transfer=true"
    assert counted(host) == {}


@pytest.mark.parametrize(
    ("kind", "types", "result", "sent"),
    [
        ("all-reduce", "((f32[], f32[9]), (f32[], f32[9]))", "(f32[], f32[9])", 60),
        ("all-gather", "((f32[64]{0}), f32[256]{0})", "f32[256]{0}", 768),
        ("collective-permute", "(f32[8], f32[8], u32[]{:S(2)}, u32[])", "f32[8]", 32),
    ],
)
def test_start_and_done_are_counted_once_by_their_result(kind, types, result, sent):
    groups = f"{PAIRS}{RING}" if "permute" in kind else FOURS
    lines = [
        f"%s.1 = {types} {kind}-start(%p), {groups}, use_global_device_ids=true",
        "%work = f32[8]{0} add(%p, %p)",
        f"ROOT %d.1 = {result} {kind}-done(%s.1)",
    ]
    assert counted(*lines) == {(kind, 4): (1, sent)}


def part(name: str, chain: int, target: str) -> str:
    """Return a computation with a part of the all-gather of this chain, as on a TPU."""
    gather = f"%g = bf16[512]{{0}} all-gather(%p), {FOURS}, "
    gather += f'frontend_attributes={{chain_id="{chain}"}}, '
    gather += 'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    call = f'ROOT %c = (f32[]) custom-call(%g), custom_call_target="{target}"'
    return block(f"%{name}", gather, call)


def test_parts_of_two_gathers_are_two_gathers():
    others = part("one", 0, "AsyncCollectiveStart") + part("two", 0, "Work")
    others += part("three", 0, "AsyncCollectiveDone")
    others += part("four", 1, "AsyncCollectiveStart")
    others += part("five", 1, "AsyncCollectiveDone")
    order = ("one", "two", "four", "three", "five")
    lines = [f"%f.{name} = f32[] fusion(%p), calls=%{name}" for name in order]
    assert counted(*lines, others=others) == {("all-gather", 4): (2, 2 * 768)}
    with pytest.raises(ValueError, match="cannot count: no line starts it: %g"):
        counted(*lines, others=others.replace('"0"', '"7"', 1))


TRIPS = ', backend_config={"known_trip_count":{"n":"5"}}'
BRANCH = "%c = f32[] conditional(%x, %p), branch_computations={%one, %two}"
TWICE = ["%c = f32[] call(%p), to_apply=%two", "%f = f32[] fusion(%c), calls=%two"]
ASYNC = [
    "%s = ((), (), (s32[1])) call-start(), to_apply=%two",
    "%u = ((f32[256]), f32[256]) call-update(%s, %p), to_apply=%two",
    "%d = f32[256] call-done(%u), to_apply=%two",
]


@pytest.mark.parametrize(
    ("times", "lines"),
    [
        (2, TWICE),
        (1, ASYNC),
        (6, [SUM, "%w = f32[] while(%p), condition=%one, body=two" + TRIPS]),
        (0, ["%w = f32[] while(%p), condition=%two, body=%one" + TRIPS]),
        (0, ["%c = conditional(%x), true_computation=%two, false_computation=%one"]),
        (0, ["%c = f32[] custom-call(%x, %p), something_new=%two"]),
        (0, [SUM, BRANCH]),
    ],
)
def test_a_computation_runs_as_often_as_it_is_called(times, lines):
    """0 means that the number of runs is unknown; then the kind has no count."""
    others = block("%one", "ROOT %gt = pred[] compare(%p, %p)") + block("two", SUM)
    assert counted(*lines, others=others) == {("all-reduce", 4): (times, times * 1536)}


LOOP = re.search(
    r'^loop = """\n(.*?)^}"""', (ROOT / "book/counting.md").read_text(), re.M | re.S
)[1]
FIRST, LAST, STEP = "constant(0)", "constant(4)", "constant(2)"
START = "%start = (s32[], f32[256]) tuple(%first, %v)"
COPIED = START.replace("%first", "%copy")


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({FIRST: "constant(-2)"}, 3),
        ({FIRST: "constant(3)", LAST: "constant(10)"}, 4),
        ({START: "%copy = s32[]{:T(128)} copy(%first)\n  " + COPIED}, 2),
        ({FIRST: "parameter(1)"}, 0),
        ({LAST: "parameter(1)"}, 0),
        ({LAST: "constant(0.5)"}, 0),
        ({STEP: "constant(0)"}, 0),
        ({STEP: "constant(-1)"}, 0),
        ({"add(%index, %step)": "multiply(%index, %step)"}, 0),
        ({"add(%index, %step)": "add(%value, %step)"}, 0),
        ({"tuple(%first, %v)": "fusion(%first, %v)"}, 0),
        ({"condition=%condition, ": ""}, 0),
    ],
)
def test_trip_count_of_the_loop_on_the_page_is_known_or_not(changes, times):
    text = LOOP + "}"
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    assert read(text) == {("all-reduce", 4): (times, times * 1536)}


BROADCAST = f"%b.7 = f32[8]{{0}} collective-broadcast(%p), {FOURS}"
BEGUN = f"%s = ((f32[8]), f32[8]) all-reduce-start(%p), {FOURS}"


@pytest.mark.parametrize(
    ("why", "lines"),
    [
        ("its bytes are not known: %b.7 = f32[8]{0} collective-b", [BROADCAST]),
        ("not known", ["%s = (f32[8], u32[], token[]) send(%p, %t), channel_id=1"]),
        ("not known", ["%r = (f32[8], u32[], token[]) recv(%t), channel_id=1"]),
        ("not known", [PERMUTE + "{{0,1}}, slice_sizes={{8}}"]),
        ("groups are not listed", [SUM.replace(FOURS, "replica_groups={}")]),
        ("of replicas", [SUM + ", channel_id=1"]),
        ("f32[<=8] has no known size", [SUM.replace("f32[256]", "f32[<=8]")]),
        ("token[] has no", [SUM.replace("f32[256]{0}", "(f32[8], token[])")]),
        (
            "no all-reduce-done takes its result: %s",
            [BEGUN, "%d = f32[8] all-reduce-done(%x)"],
        ),
    ],
)
def test_what_cannot_be_counted_raises_an_error(why, lines):
    with pytest.raises(ValueError, match="^cannot count: .*" + re.escape(why)):
        counted(*lines)


@pytest.mark.parametrize("entries", [0, 2])
def test_a_text_without_one_entry_raises_an_error(entries):
    with pytest.raises(ValueError, match=f"{entries} ENTRY computations"):
        read("module @jit_f {\n}\n" + entries * block("ENTRY %main", SUM))
