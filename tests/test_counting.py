"""The reader of compiled programs counts what a program sends, or refuses.

The programs written here follow the forms that compilers print, cut to what a reader
needs: the CPU's of JAX 0.7.2 and 0.12.0.1, a TPU's (libtpu 0.0.50.1) and a GPU's
(jax-cuda12-plugin 0.12.0.1), the latter two compiled ahead of time.
"""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from pair import ROOT

jax.config.update("jax_num_cpu_devices", 8)

NAMES = {"jax": jax, "jnp": jnp, "np": np}
exec((ROOT / "book/cells/collectives.py").read_text(), NAMES)
collectives = NAMES["collectives"]

FOURS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
ALL = "replica_groups=[1,8]<=[8]"
KB = 1024


def counted(*lines: str, others: str = "") -> dict:
    """What a program is counted as, from the lines of its ENTRY and other blocks."""
    entry = "\n".join(["ENTRY %main (p: f32[]) -> f32[] {", *lines, "}"])
    text = f"HloModule jit_f, num_partitions=8\n\n{others}\n\n{entry}\n"
    return collectives(SimpleNamespace(as_text=lambda: text))


def refused(fragment: str, *lines: str, others: str = "") -> None:
    """Fail unless a program is refused, with the fragment in the message."""
    with pytest.raises(ValueError, match="^cannot count: ") as error:
        counted(*lines, others=others)
    assert fragment in str(error.value)


# One line in one run.


@pytest.mark.parametrize(
    ("line", "key", "sent"),
    [
        (f"f32[256]{{0}} all-reduce(%p), {FOURS}", ("all-reduce", 4), 1536),
        (f"f32[256]{{0}} all-gather(%p), {FOURS}", ("all-gather", 4), 768),
        (f"f32[64]{{0}} reduce-scatter(%p), {FOURS}", ("reduce-scatter", 4), 768),
        (f"f32[4,64]{{1,0}} all-to-all(%p), {FOURS}", ("all-to-all", 4), 768),
        (
            f"(f32[128]{{0}}, bf16[256]{{0}}) all-reduce(%p, %q), {FOURS}",
            ("all-reduce", 4),
            1536,
        ),
        (
            f"(f32[64]{{0}}, /*index=1*/f32[192]{{0}}) all-gather(%p, %q), {FOURS}",
            ("all-gather", 4),
            768,
        ),
        (f"(f32[64], f32[64]) reduce-scatter(%p), {ALL}", ("reduce-scatter", 8), 3584),
        (f"f32[] all-reduce(%p), {ALL}", ("all-reduce", 8), 7),
        (f"pred[1024]{{0}} all-gather(%p), {FOURS}", ("all-gather", 4), 768),
        (f"s4[2048]{{0:E(4)}} all-gather(%p), {FOURS}", ("all-gather", 4), 768),
        (f"u2[4095]{{0:E(2)}} all-gather(%p), {FOURS}", ("all-gather", 4), 768),
        (f"f8e4m3fn[1024]{{0}} all-gather(%p), {FOURS}", ("all-gather", 4), 768),
        (f"bf16[512]{{0}} all-gather(%p), {FOURS}", ("all-gather", 4), 768),
        (f"c64[128]{{0}} all-gather(%p), {FOURS}", ("all-gather", 4), 768),
        (
            f"bf16[512]{{0:T(8,128)(2,1)S(1)}} all-gather(%p), {FOURS}, "
            'metadata={op_name="jit(f)/all-reduce(x)"}',
            ("all-gather", 4),
            768,
        ),
    ],
)
def test_a_line_is_priced_for_a_ring(line: str, key: tuple, sent: int):
    assert counted(f"  ROOT %a.1 = {line}, dimensions={{0}}") == {key: (1, sent)}


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("{{0,1,2,3,4,5,6,7}}", 8),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['x'=2,'y'=4] {'y'}", 4),
        ("mesh['x'=2,'y'=4] {'x','y'}", 8),
        ("mesh['x'=8] {'x':(2)4}", 4),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", 4),
        ("mesh['my axis'=2,'b-c'=4] {'b-c'}", 4),
    ],
)
def test_every_spelling_of_groups_is_read(groups: str, size: int):
    line = f"  %a = f32[8]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add"
    assert counted(line) == {("all-reduce", size): (1, 64 * (size - 1) // size)}


PERMUTE = "  %a = f32[256]{0} collective-permute(%p), source_target_pairs="


def test_a_permute_counts_the_devices_that_send_to_another():
    key = "collective-permute"
    assert counted(PERMUTE + "{{0,1},{1,2},{2,3}}, x={1}") == {(key, 3): (1, KB)}
    assert counted(PERMUTE + "{{0,1}}") == {(key, 1): (1, KB)}
    assert counted(PERMUTE + "{{0,0},{1,2},{2,1},{3,3}}") == {(key, 2): (1, KB)}


def test_what_stays_at_home_is_not_listed():
    assert counted(PERMUTE + "{{0,0},{1,1},{2,2}}, channel_id=1") == {}
    assert counted(PERMUTE + "{}") == {}
    for groups in ("{{0},{1}}", "[8,1]<=[8]", "mesh['x'=8,'z'=1] {'z'}"):
        line = f"  %a = f32[8]{{0}} all-reduce(%p), replica_groups={groups}"
        assert counted(line) == {}


# Lines that start and end.


@pytest.mark.parametrize(
    ("kind", "types", "result", "sent"),
    [
        ("all-reduce", "((f32[256]{0}), f32[256]{0})", "f32[256]{0}", 1536),
        ("all-reduce", "f32[256]{0}", "f32[256]{0}", 1536),
        (
            "all-reduce",
            "((f32[], f32[255]{0}), (f32[], f32[255]{0}))",
            "(f32[], f32[255]{0})",
            1536,
        ),
        ("all-gather", "(bf16[128]{0}, bf16[512]{0})", "bf16[512]{0}", 768),
        ("all-gather", "((f32[64]{0}), f32[256]{0})", "f32[256]{0}", 768),
        (
            "all-gather",
            "((f32[32]{0}, f32[32]{0}), (f32[128]{0}, f32[128]{0}))",
            "(f32[128]{0}, f32[128]{0})",
            768,
        ),
        ("reduce-scatter", "((f32[256]{0}), f32[64]{0})", "f32[64]{0}", 768),
        (
            "reduce-scatter",
            "((f32[128]{0}, f32[128]{0}), (f32[32]{0}, f32[32]{0}))",
            "(f32[32]{0}, f32[32]{0})",
            768,
        ),
        ("all-to-all", "((f32[4,64]{1,0}), f32[4,64]{1,0})", "f32[4,64]{1,0}", 768),
    ],
)
def test_an_asynchronous_collective_is_counted_once_by_its_result(
    kind: str, types: str, result: str, sent: int
):
    lines = [
        f"  %s.1 = {types} {kind}-start(%p), {FOURS}, use_global_device_ids=true",
        "  %work = f32[8]{0} add(%p, %p)",
        f"  ROOT %d.1 = {result} {kind}-done(%s.1)",
    ]
    assert counted(*lines) == {(kind, 4): (1, sent)}


def test_a_permute_that_starts_prints_input_output_and_context():
    types = "(f32[256]{0:T(1024)}, f32[256]{0:T(1024)}, u32[]{:S(2)}, u32[]{:S(2)})"
    start = f"  %s = {types} collective-permute-start(%p), source_target_pairs="
    done = "  %d = f32[256]{0:T(1024)} collective-permute-done(%s)"
    assert counted(start + "{{0,1},{1,0}}", done) == {
        ("collective-permute", 2): (1, KB)
    }


def test_a_call_that_starts_is_made_once():
    block = f"%sum (p: f32[]) -> f32[] {{\n  %a = f32[256] all-reduce(%p), {FOURS}\n"
    block += '}, execution_thread="sparsecore"'
    lines = [
        "  %s = ((), (), (s32[1])) call-start(), to_apply=%sum",
        "  %u = ((f32[256]), f32[256]) call-update(%s, %p), to_apply=%sum",
        "  %d = f32[256] call-done(%u), to_apply=%sum",
    ]
    assert counted(*lines, others=block) == {("all-reduce", 4): (1, 1536)}


# What a TPU's compiler makes of a gather and of a scatter.

ASYNC = 'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'


def piece(name: str, chain: int, target: str) -> str:
    """A computation that works on the gather with this number."""
    gather = f"  %g = bf16[512]{{0}} all-gather(%p), {FOURS}, "
    gather += f'frontend_attributes={{chain_id="{chain}"}}, {ASYNC}'
    call = f'  ROOT %c = (f32[]) custom-call(%g), custom_call_target="{target}"'
    return f"%{name} (p: f32[]) -> f32[] {{\n{gather}\n{call}\n}}\n\n"


def test_pieces_of_one_gather_are_counted_once():
    others = piece("one", 0, "AsyncCollectiveStart") + piece("two", 0, "Work")
    others += piece("three", 0, "AsyncCollectiveDone")
    others += piece("four", 1, "AsyncCollectiveStart")
    others += piece("five", 1, "AsyncCollectiveDone")
    lines = [
        f"  %f.{name} = f32[] fusion(%p), kind=kCustom, calls=%{name}"
        for name in ("one", "two", "four", "three", "five")
    ]
    assert counted(*lines, others=others) == {("all-gather", 4): (2, 2 * 768)}


def test_a_piece_that_nothing_starts_is_refused():
    others = piece("one", 0, "AsyncCollectiveStart")
    others += piece("two", 7, "AsyncCollectiveDone")
    lines = [
        "  %f = f32[] fusion(%p), calls=%one",
        "  %h = f32[] fusion(%p), calls=%two",
    ]
    refused("no line starts it: %g", *lines, others=others)


def test_an_all_reduce_in_a_scatter_fusion_is_a_reduce_scatter():
    others = "%all-reduce-scatter.2 (input: f32[8,32]) -> f32[2,32] {\n"
    others += f"  %r = f32[8,32]{{1,0}} all-reduce(%input), {FOURS}, to_apply=%add\n"
    others += "  ROOT %s = f32[2,32]{1,0} dynamic-slice(%r, %i, %z)\n}"
    line = "  ROOT %f = f32[2,32] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2"
    assert counted(line, others=others) == {("reduce-scatter", 4): (1, 768)}


# Loops, branches and calls.

SUM = f"  %a = f32[256]{{0}} all-reduce(%p), {FOURS}, to_apply=%add"
TRIPS = ', backend_config={{"known_trip_count":{{"n":"{}"}}}}'


def test_loops_in_loops_multiply():
    others = f"%inner (p: f32[]) -> f32[] {{\n{SUM}\n}}\n\n"
    others += "%outer (p: f32[]) -> f32[] {\n"
    others += "  %w = f32[] while(%p), condition=%c, body=%inner" + TRIPS.format(5)
    others += "\n}"
    loop = "  %w = f32[] while(%p), condition=%d, body=%outer" + TRIPS.format(3)
    assert counted(loop, SUM, others=others) == {("all-reduce", 4): (16, 16 * 1536)}
    others = others.replace("%inner", "inner")
    assert counted(loop, others=others) == {("all-reduce", 4): (15, 15 * 1536)}


LOOP = f"""%body.1 (s: (f32[256], s32[])) -> (f32[256], s32[]) {{
  %step = s32[]{{:T(128)}} constant(1)
  %s = (f32[256]{{0}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=1
  %next = s32[]{{:T(128)}} add(%i, %step)
  %v = f32[256]{{0}} get-tuple-element(%s), index=0
  %a = f32[256]{{0}} all-reduce(%v), {FOURS}, to_apply=%region
  ROOT %t = (f32[256]{{0}}, s32[]{{:T(128)}}) tuple(%a, %next)
}}

%condition.1 (s: (f32[256], s32[])) -> pred[] {{
  %last = s32[]{{:T(128)}} constant(4)
  %s = (f32[256]{{0}}, s32[]{{:T(128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%s), index=1
  ROOT %lt = pred[]{{:T(512)}} compare(%j, %last), direction=LT
}}

ENTRY %main (p: f32[256]) -> f32[256] {{
  %first = s32[]{{:T(128)}} constant(0)
  %copy = s32[]{{:T(128)}} copy(%first)
  %t = (f32[256]{{0}}, s32[]{{:T(128)}}) tuple(%p, %copy)
  %w = (f32[256]{{0}}, s32[]) while(%t), condition=%condition.1, body=%body.1
}}"""


def trips(*changes: tuple[str, str]) -> int:
    """Trips of a loop that does not print them, after changes of its text."""
    text = LOOP
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    found = collectives(SimpleNamespace(as_text=lambda: text))
    times, sent = found[("all-reduce", 4)]
    assert sent == times * 1536
    return times


STEP, FIRST, LAST = "constant(1)", "constant(0)", "constant(4)"


def test_trips_that_are_not_printed_are_worked_out():
    assert trips() == 4
    assert trips((STEP, "constant(2)")) == 2
    assert trips((STEP, "constant(2)"), (FIRST, "constant(1)")) == 2
    assert trips((FIRST, "constant(3)"), (LAST, "constant(10)")) == 7
    assert trips((FIRST, "constant(-2)")) == 6


@pytest.mark.parametrize(
    "change",
    [
        ("direction=LT", "direction=NE"),
        ("add(%i, %step)", "multiply(%i, %step)"),
        ("add(%i, %step)", "add(%v, %step)"),
        (LAST, "constant(0.5)"),
        (LAST, "parameter(1)"),
        (STEP, "constant(0)"),
        (STEP, "constant(-1)"),
        (FIRST, "parameter(1)"),
        ("tuple(%p, %copy)", "fusion(%p, %copy)"),
        ("%i = s32[]{:T(128)} get-tuple-element(%s)", "%i = s32[] add(%s, %s)"),
        ("get-tuple-element(%s), index=1\n  %next", "custom-call(%s)\n  %next"),
        ("%s), index=1\n  %next", "%step), index=1\n  %next"),
        ("condition=%condition.1, ", ""),
        ("condition=%condition.1", "condition=%elsewhere"),
    ],
)
def test_a_loop_that_cannot_be_worked_out_is_not_known(change: tuple[str, str]):
    assert trips(change) == 0


def test_a_loop_that_stops_on_its_data_is_not_known():
    others = f"%body (p: f32[]) -> f32[] {{\n{SUM}\n}}\n\n"
    others += "%test (p: f32[]) -> pred[] {\n  %m = f32[] all-reduce(%p), "
    others += f"{ALL}\n  ROOT %gt = pred[] compare(%m, %p), direction=GT\n}}"
    loop = "  ROOT %w = f32[] while(%p), condition=%test, body=%body"
    not_known = {("all-reduce", 4): (0, 0), ("all-reduce", 8): (0, 0)}
    assert counted(loop, others=others) == not_known


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%one, %two}",
        "true_computation=%two, false_computation=%one",
    ],
)
def test_a_branch_is_not_known(branches: str):
    others = f"%two (p: f32[]) -> f32[] {{\n{SUM}\n}}\n\n"
    others += "%one (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}"
    line = f"  ROOT %c = f32[] conditional(%x, %p, %p), {branches}"
    assert counted(line, others=others) == {("all-reduce", 4): (0, 0)}
    gather = f"  %g = f32[256]{{0}} all-gather(%p), {FOURS}"
    both = {("all-gather", 4): (1, 768), ("all-reduce", 4): (0, 0)}
    assert counted(line, gather, others=others) == both


def test_one_that_is_not_known_hides_those_of_its_kind_that_are():
    others = f"%two (p: f32[]) -> f32[] {{\n{SUM}\n}}"
    line = "  %c = f32[] conditional(%x, %p), branch_computations={%two}"
    assert counted(SUM, line, others=others) == {("all-reduce", 4): (0, 0)}


def test_a_computation_that_nothing_calls_is_not_known():
    others = f"%two (p: f32[]) -> f32[] {{\n{SUM}\n}}"
    line = "  %c = f32[] custom-call(%x, %p), something_new=%two"
    assert counted(line, others=others) == {("all-reduce", 4): (0, 0)}


def test_a_computation_that_is_also_a_branch_is_not_known():
    others = f"%two (p: f32[]) -> f32[] {{\n{SUM}\n}}"
    call = "  %f = f32[] call(%p), to_apply=%two"
    branch = "  %c = f32[] conditional(%x, %p), branch_computations={%two, %two}"
    assert counted(call, branch, others=others) == {("all-reduce", 4): (0, 0)}


def test_a_computation_that_is_called_twice_runs_twice():
    others = f"%two (p: f32[]) -> f32[] {{\n{SUM}\n}}"
    lines = [
        "  %c = f32[] call(%p), to_apply=%two",
        "  %f = f32[] fusion(%c), calls=%two",
    ]
    assert counted(*lines, others=others) == {("all-reduce", 4): (2, 2 * 1536)}


def test_a_program_that_sends_nothing_has_an_empty_list():
    assert counted("  ROOT %a = f32[8]{0} add(%p, %p)") == {}


# What is refused.


def test_what_has_no_price_is_refused():
    line = "  %a = f32[8]{0} "
    refused("no price", line + "ragged-all-to-all(%p, %q), " + FOURS)
    refused("no price", line + "collective-broadcast(%p), " + FOURS)
    refused("no price", "  %s = (f32[8], u32[], token[]) send(%p, %t), channel_id=1")
    refused("no price", "  %r = (f32[8], u32[], token[]) recv(%t), channel_id=1")
    refused("no price", PERMUTE + "{{0,1}}, slice_sizes={{8}}")
    host = "  %s = (f32[8], u32[], token[]) send(%p, %t), is_host_transfer=true"
    assert counted(host) == {}


def test_a_refusal_names_the_line():
    line = "%b.7 = f32[8]{0} collective-broadcast(%p)"
    refused(
        f"there is no price for it: {line}", f"  {line}, replica_groups={{{{0,1}}}}"
    )


def test_groups_that_have_no_size_are_refused():
    line = "  %a = f32[8]{0} all-reduce(%p), to_apply=%add"
    refused("groups are not listed", line)
    refused("groups are not listed", line + ", replica_groups={}")
    refused("differ in size", line + ", replica_groups={{0,1,2},{3}}")
    refused("of replicas", line + ", channel_id=1, replica_groups={{0}}")


def test_types_that_have_no_size_are_refused():
    refused(
        "f32[<=8] has no known size", f"  %a = f32[<=8]{{0}} all-reduce(%p), {FOURS}"
    )
    refused("token[] has no", f"  %a = (f32[8], token[]) all-reduce(%p), {FOURS}")


def test_a_start_without_an_end_is_refused():
    start = f"  %s = ((f32[8]), f32[8]) all-reduce-start(%p), {FOURS}"
    refused("no all-reduce-done takes its result: %s", start)
    refused("no all-reduce-done", start, "  %d = f32[8] all-reduce-done(%other)")


def test_a_text_without_one_entry_is_refused():
    with pytest.raises(ValueError, match="0 ENTRY computations"):
        collectives(SimpleNamespace(as_text=lambda: "module @jit_f {\n}\n"))
    another = f"ENTRY %other (p: f32[]) -> f32[] {{\n{SUM}\n}}"
    refused("2 ENTRY computations", SUM, others=another)


# Programs of the CPU's compiler, on 2 by 4 devices with a block of 1,024 bytes each.

P = PartitionSpec


def compiled(body: Callable, axes: tuple = ("x", "y"), sizes: tuple = (2, 4)) -> dict:
    """What a body, mapped over blocks f32[16, 16], is counted as."""
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * 2)
    shape = (16 * sizes[0], 16 * sizes[1])
    specs = dict(in_specs=P(*axes), out_specs=P(*axes), check_vma=False)
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    return collectives(mapped.lower(np.ones(shape, np.float32)).compile())


def in_loops(v: jax.Array) -> jax.Array:
    """Average f32[16, 16] over y, five times within three times."""

    def once(_: int, u: jax.Array) -> jax.Array:
        return v + lax.pmean(u, "y")

    return lax.fori_loop(0, 3, lambda _, u: lax.fori_loop(0, 5, once, u), v)


def in_scan(v: jax.Array) -> jax.Array:
    """Pass f32[16, 16] around the ring of y."""
    ring = [(d, (d + 1) % 4) for d in range(4)]

    def hop(u: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(lax.ppermute(u, "y", ring)), None

    return lax.scan(hop, v, length=4)[0]


def two_sums(v: jax.Array) -> jax.Array:
    """Sum f32[16, 16] and its first row over y: one line with a tuple."""
    whole, row = lax.psum((v, v[:1]), "y")
    return whole + row


@pytest.mark.parametrize(
    ("body", "list_"),
    [
        (lambda v: lax.psum(v, "x"), {("all-reduce", 2): (1, KB)}),
        (lambda v: lax.psum(v, "y"), {("all-reduce", 4): (1, 1536)}),
        (lambda v: lax.psum(v, ("x", "y")), {("all-reduce", 8): (1, 1792)}),
        (
            lambda v: lax.all_gather(v, "y", tiled=True),
            {("all-gather", 4): (1, 3 * KB)},
        ),
        (
            lambda v: lax.psum_scatter(v, "y", tiled=True),
            {("reduce-scatter", 4): (1, 768)},
        ),
        (
            lambda v: lax.all_to_all(v, "y", 0, 1, tiled=True),
            {("all-to-all", 4): (1, 768)},
        ),
        (
            lambda v: lax.ppermute(v, "y", [(0, 1), (1, 2), (2, 3)]),
            {("collective-permute", 6): (1, KB)},
        ),
        (
            lambda v: lax.ppermute(v, "y", [(0, 0), (1, 2), (2, 1), (3, 3)]),
            {("collective-permute", 4): (1, KB)},
        ),
        (in_loops, {("all-reduce", 4): (15, 15 * 1536)}),
        (in_scan, {("collective-permute", 8): (4, 4 * KB)}),
    ],
)
def test_programs_of_the_cpu_are_counted(body: Callable, list_: dict):
    assert compiled(body) == list_


def test_a_tuple_of_sums_is_counted_whole():
    sums = compiled(two_sums)
    assert sum(sent for _, sent in sums.values()) == 1536 + 96
    assert sums.keys() == {("all-reduce", 4)}


def test_a_ring_of_one_device_sends_nothing():
    one = {"axes": ("x", "z"), "sizes": (8, 1)}
    assert compiled(lambda v: lax.ppermute(v, "z", [(0, 0)]), **one) == {}
    assert compiled(lambda v: lax.psum(v, "z"), **one) == {}


def test_what_the_cpu_cannot_know_is_not_known():
    def until(v: jax.Array) -> jax.Array:
        """Subtract means of f32[16, 16] until none of the numbers is above 1."""
        above = lambda u: lax.pmax(u.max(), ("x", "y")) > 1  # noqa: E731
        return lax.while_loop(above, lambda u: u - lax.pmean(u, "y"), v)

    def either(v: jax.Array) -> jax.Array:
        """Sum f32[16, 16] over y, or double it."""
        return lax.cond(v[0, 0] > 0, lambda u: lax.psum(u, "y"), lambda u: 2 * u, v)

    assert compiled(until)[("all-reduce", 4)] == (0, 0)
    assert compiled(either) == {("all-reduce", 4): (0, 0)}


# The cells of Part III: the cast, and the ledger.


def test_cast_marks_a_tree_as_varying_and_sums_on_the_way_back():
    names = {"jax": jax}
    exec((ROOT / "book/cells/varying.py").read_text(), names)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    cast = names["cast"]

    row, whole = PartitionSpec("x"), PartitionSpec()

    def returned(axes, spec):
        """A tree f32[1] that is cast along axes, as spec returns it."""
        body = lambda w: cast({"w": w}, axes)  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=spec)(ones)

    def loss(w):
        return lax.psum(cast(w, ("x", "y")) * 1.0, ("x", "y"))

    ones = np.ones(1, "f")
    assert returned("x", row)["w"].shape == (2,)
    for axes, spec in ("x", whole), (("x", "y"), row):
        with pytest.raises(ValueError, match="out_specs"):
            returned(axes, spec)
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=whole, out_specs=whole)
    assert jax.grad(mapped)(1.0) == 8


def test_ledger_enters_what_is_sent_given_and_needed(capsys):
    names = dict(NAMES)
    exec((ROOT / "book/cells/ledger.py").read_text(), names)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    row = PartitionSpec("x")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=row, out_specs=PartitionSpec())
    def total(x):  # f32[1, 256] of f32[8, 256]
        return lax.psum(x, "x")

    x = jax.device_put(np.ones((8, 256), "f"), jax.NamedSharding(mesh, row))
    compiled = total.lower(x).compile()
    entry = names["enter"]("a sum", compiled, 1.5)
    needed = compiled.memory_analysis().temp_size_in_bytes
    assert entry == (2 * 7 * KB // 8, KB, needed)
    line = capsys.readouterr().out
    assert line.split() == [
        *("a", "sum", "sent", "1,792", "given", "1,024"),
        *("scratch", f"{needed:,}", "1.500000"),
    ]
