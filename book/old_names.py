"""List names that JAX removed or deprecated, and their replacements, for old_names.md.

Run as a program, it prints as JSON whether each old line fails, warns or runs on the
installed JAX; `nox -s lab -- since` does so on the releases between which it changed.
"""

import functools
import json
import sys
import warnings
from typing import NamedTuple

import numpy as np


@functools.cache
def names() -> dict[str, object]:
    """Return the names that lines use: JAX, Flax if installed, two meshes, an array."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    P = PartitionSpec
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("x",))
    grid = Mesh(devices.reshape(2, 4), ("x", "y"))
    split, copied = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    x = jnp.arange(8.0)
    folder = None  # no compilation cache here

    def f(v: jax.Array) -> jax.Array:
        """Double an array of any shape."""
        return 2 * v

    def total(v: jax.Array) -> jax.Array:
        """Add v over the devices of axis x."""
        return jax.lax.psum(v, "x")

    try:
        import flax.linen  # noqa: F401
        from flax import nnx  # noqa: F401
    except ImportError:
        pass  # old releases of JAX run without Flax
    return {"np": np} | locals()


class Row(NamedTuple):
    old: str  # a line, which is run
    fate: str  # its outcome today: "fails", "warns" or "runs"
    until: str  # last release with another outcome, or "" if not tested
    since: str  # first release with today's outcome, or a source, or a reason
    today: str  # the replacement, which is run
    gives: object  # the value of its last expression


def complaint(line: str) -> Exception | Warning | None:
    """Run a line; return its error or its first warning, if any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(line, dict(names()))
        except Exception as error:
            return error
    return caught[0].message if caught else None


def attempt(line: str) -> str:
    """Run a line; return "fails", "warns" or "runs"."""
    said = complaint(line)
    if said is None:
        return "runs"
    return "warns" if isinstance(said, Warning) else "fails"


def value(line: str) -> object:
    """Run a line, with warnings as errors; return the value of its last expression."""
    setup, _, expression = line.rpartition("; ")
    scope = dict(names())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(setup, scope)
        return eval(expression, scope)


DOUBLED, SUMS = 2 * np.arange(8), np.full(8, 28)
SPECS = 'mesh=mesh, in_specs=P("x"), out_specs=P("x")'
NESTED = 'jax.pmap(lambda v: jax.lax.psum(v, "y"), axis_name="y")'
PJIT = "from jax.experimental.pjit import pjit"
LOG = "the changelog"

ARRAYS = [
    Row("jax.tree_map(f, x)", "fails", "0.5.3", "0.6.0", "jax.tree.map(f, x)", DOUBLED),
    Row(
        "jax.tree_leaves([x])",
        "fails",
        "0.5.3",
        "0.6.0",
        "len(jax.tree.leaves([x]))",
        1,
    ),
    Row(
        "jax.tree_util.tree_multimap(jnp.add, x, x)",
        "fails",
        "",
        f"0.3.16, by {LOG}",
        "jax.tree.map(jnp.add, x, x)",
        DOUBLED,
    ),
    Row(
        "jax.ops.index_update(x, 0, 1.0)",
        "fails",
        "",
        f"0.3.2, by {LOG}",
        "x.at[0].set(1.0)[0]",
        1,
    ),
    Row(
        "jnp.DeviceArray",
        "fails",
        "0.4.13",
        "0.4.14",
        "isinstance(x, jax.Array)",
        True,
    ),
    Row(
        "from jax.interpreters.xla import _DeviceArray",
        "fails",
        "",
        "before 0.4.13",
        "isinstance(x, jax.Array)",
        True,
    ),
    Row(
        "jax.interpreters.pxla.ShardedDeviceArray",
        "fails",
        "0.4.13",
        "0.4.14",
        "isinstance(jax.pmap(f)(x), jax.Array)",
        True,
    ),
    Row(
        "jax.core.get_aval(x)",
        "fails",
        "0.9.2",
        "0.10.0",
        "str(jax.typeof(x))",
        "float32[8]",
    ),
    Row(
        "jax.random.KeyArray",
        "fails",
        "0.4.23",
        "0.4.24",
        "jax.dtypes.issubdtype(jax.random.key(0).dtype, jax.dtypes.prng_key)",
        True,
    ),
    Row(
        "x.device_buffers",
        "fails",
        "0.4.26",
        "0.4.27",
        "[shard.data for shard in x.addressable_shards][0]",
        np.arange(8),
    ),
    Row("x.device()", "fails", "0.4.26", "0.4.27", "x.devices() == {x.device}", True),
    Row("jax.host_id()", "warns", "", "before 0.4.13", "jax.process_index()", 0),
    Row("jax.host_count()", "warns", "", "before 0.4.13", "jax.process_count()", 1),
    Row(
        "from jax.config import config",
        "fails",
        "0.4.24",
        "0.4.25",
        "jax.config.jax_enable_x64",
        False,
    ),
    Row(
        "jax.experimental.enable_x64",
        "fails",
        "0.8.3",
        "0.9.0",
        "with jax.enable_x64(True): y = jnp.arange(8.0).dtype\n; y == 'float64'",
        True,
    ),
    Row(
        "from jax import linear_util",
        "fails",
        "0.4.23",
        "0.4.24",
        "import jax.extend.linear_util as lu; callable(lu.wrap_init)",
        True,
    ),
    Row(
        "from jax.lib import xla_bridge",
        "fails",
        "0.8.3",
        "0.9.0",
        "import jax.extend; jax.extend.backend.get_backend().platform"
        " == jax.default_backend()",
        True,
    ),
    Row(
        "from jaxlib.xla_extension import XlaRuntimeError",
        "fails",
        "0.6.0",
        "0.6.2",
        "issubclass(jax.errors.JaxRuntimeError, RuntimeError)",
        True,
    ),
    Row(
        "jax.clear_backends",
        "fails",
        "0.4.35",
        "0.4.36",
        "from jax.extend.backend import clear_backends; callable(clear_backends)",
        True,
    ),
    Row(
        "from jax.experimental.compilation_cache import compilation_cache as cc;"
        " cc.initialize_cache",
        "fails",
        "0.7.2",
        "0.8.0",
        'jax.config.update("jax_compilation_cache_dir", folder)',
        None,
    ),
    Row(
        "import jax.tools.colab_tpu", "fails", "0.9.1", "0.9.2", "jax.device_count()", 8
    ),
]

PLACING = [
    Row(
        "jax.device_put_replicated(x, jax.devices())",
        "fails",
        "0.9.2",
        "0.10.0",
        "jax.device_put(x, copied)",
        np.arange(8),
    ),
    Row(
        "jax.device_put_sharded([*x], jax.devices())",
        "fails",
        "0.9.2",
        "0.10.0",
        "jax.device_put(x, split)",
        np.arange(8),
    ),
    Row(
        "jax.sharding.PositionalSharding(jax.devices())",
        "fails",
        "0.6.2",
        "0.7.0",
        'jax.device_put(x, NamedSharding(mesh, P("x")))',
        np.arange(8),
    ),
    Row(
        "jax.sharding.PmapSharding",
        "fails",
        "0.9.2",
        "0.10.0",
        "jax.pmap(f)(x).sharding.num_devices",
        8,
    ),
    Row(
        "from jax.interpreters.pxla import PartitionSpec",
        "fails",
        "",
        "before 0.4.13",
        'jax.P("x") == PartitionSpec("x")',
        True,
    ),
    Row(
        "from jax.experimental import PartitionSpec",
        "fails",
        "",
        "before 0.4.13",
        'jax.P("x") == PartitionSpec("x")',
        True,
    ),
    Row(
        "from jax.experimental.global_device_array import GlobalDeviceArray",
        "fails",
        "",
        "before 0.4.13",
        "jax.make_array_from_callback((8,), split, lambda i: np.arange(8.0)[i])",
        np.arange(8),
    ),
    Row(
        "from jax.experimental.layout import DeviceLocalLayout",
        "fails",
        "0.6.2",
        "0.7.0",
        "from jax.experimental.layout import Layout; callable(Layout)",
        True,
    ),
    Row(
        "from jax._src.sharding_impls import TransferToMemoryKind",
        "fails",
        "0.7.0",
        "0.7.1",
        'jax.device_put(x, split.with_memory_kind("pinned_host")).sharding.memory_kind',
        "pinned_host",
    ),
]

MESHES = [
    Row(
        "with mesh: f(x)",
        "warns",
        "0.10.0",
        "0.10.1",
        "with jax.set_mesh(mesh): y = f(x)\n; y",
        DOUBLED,
    ),
    Row(
        "jax.sharding.use_mesh(mesh)",
        "fails",
        "0.7.0",
        "0.7.1",
        "with jax.set_mesh(mesh): y = jax.jit(f, in_shardings=P('x'))(x)\n; y",
        DOUBLED,
    ),
    Row(
        'jax.make_mesh(axis_shapes=(8,), axis_names=("x",))',
        "fails",
        "0.11.0",
        "0.11.1",
        'jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)).size',
        8,
    ),
    Row(
        'Mesh(jnp.array(jax.devices()), ("x",)).size',
        "fails",
        "",
        "always",
        'Mesh(np.array(jax.devices()), ("x",)).size',
        8,
    ),
    Row(
        "from jax.experimental.maps import Mesh",
        "fails",
        "",
        f"0.4.11, by {LOG}",
        'Mesh(np.array(jax.devices()), ("x",)).size',
        8,
    ),
    Row(
        "from jax.experimental.maps import mesh",
        "fails",
        "",
        "before 0.4.13",
        "with jax.set_mesh(mesh): y = f(x)\n; y",
        DOUBLED,
    ),
    Row(
        "from jax.experimental.maps import thread_resources",
        "fails",
        "0.4.30",
        "0.4.31",
        "with jax.set_mesh(mesh): y = jax.sharding.get_abstract_mesh().axis_names\n; y",
        ("x",),
    ),
    Row(
        "from jax.interpreters import pxla; pxla.thread_resources.env.physical_mesh",
        "warns",
        "0.8.0",
        "0.8.3",
        "with jax.set_mesh(mesh): y = jax.sharding.get_mesh() == mesh\n; y",
        True,
    ),
    Row(
        "from jax.experimental import mesh_utils;"
        ' Mesh(mesh_utils.create_device_mesh((2, 4)), ("x", "y")).size',
        "runs",
        "",
        "still works",
        'jax.make_mesh((2, 4), ("x", "y"),'
        " axis_types=(jax.sharding.AxisType.Auto,) * 2).size",
        8,
    ),
]

FUNCTIONS = [
    Row(f"{PJIT}; pjit(f)(x)", "warns", "0.7.2", "0.8.0", "jax.jit(f)(x)", DOUBLED),
    Row(
        f'{PJIT}; pjit(f, in_axis_resources=P("x"))',
        "fails",
        "0.4.13",
        "0.4.14",
        "jax.jit(f, in_shardings=split, out_shardings=split)(x)",
        DOUBLED,
    ),
    Row(
        "from jax.experimental.pjit import with_sharding_constraint",
        "fails",
        "0.4.23",
        "0.4.24",
        "jax.jit(lambda v: jax.lax.with_sharding_constraint(v, split))(x)",
        np.arange(8),
    ),
    Row(
        'jax.jit(f, in_shardings=P("x"))(x)',
        "fails",
        "",
        "always, without a mesh",
        "jax.jit(f, in_shardings=split)(x)",
        DOUBLED,
    ),
    Row(
        "from jax.interpreters.sharded_jit import sharded_jit",
        "fails",
        "",
        "before 0.4.13",
        "jax.jit(f, in_shardings=split, out_shardings=split)(x)",
        DOUBLED,
    ),
    Row(
        "from jax.experimental.shard_map import shard_map",
        "warns",
        "0.7.2",
        "0.8.0",
        f"jax.shard_map(f, {SPECS})(x)",
        DOUBLED,
    ),
    Row(
        f"jax.shard_map(f, {SPECS}, check_rep=False)",
        "fails",
        "",
        "always: check_rep belongs to the old shard_map",
        f"jax.shard_map(f, {SPECS}, check_vma=True)(x)",
        DOUBLED,
    ),
    Row(
        f"jax.shard_map(f, {SPECS}, auto=frozenset())",
        "fails",
        "",
        "always: auto belongs to the old shard_map",
        f'jax.shard_map(f, {SPECS}, axis_names={{"x"}})(x)',
        DOUBLED,
    ),
    Row(
        "from jax.experimental.maps import xmap",
        "fails",
        "0.4.30",
        "0.4.31",
        f"jax.shard_map(f, {SPECS})(x)",
        DOUBLED,
    ),
    Row(
        "jax.soft_pmap(f)(x)",
        "fails",
        "",
        "before 0.4.13",
        "jax.pmap(jax.vmap(f))(x.reshape(4, 2)).ravel()",
        DOUBLED,
    ),
    Row(
        f'jax.pmap({NESTED}, axis_name="x")(x.reshape(2, 4))',
        "fails",
        "0.7.2",
        "0.8.0",
        'jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "y"), mesh=grid,'
        ' in_specs=P("x", "y"), out_specs=P("x")))(x.reshape(2, 4)).ravel()',
        [6, 22],
    ),
    Row(
        'jax.pmap(lambda v: jax.lax.pvary(v, "x"), axis_name="x")(x)',
        "fails",
        "0.9.2",
        "0.10.0",
        'jax.pmap(total, axis_name="x")(x)',
        SUMS,
    ),
    Row(
        "jax.core.axis_frame",
        "fails",
        "0.6.2",
        "0.7.0",
        'jax.pmap(lambda v: v * jax.lax.axis_size("x"), axis_name="x")(x)',
        8 * np.arange(8),
    ),
    Row(
        "from jax.extend.core.primitives import xla_pmap_p",
        "fails",
        "0.9.2",
        "0.10.0",
        "from jax.extend.core.primitives import jit_p; "
        "jax.make_jaxpr(jax.pmap(f))(x).eqns[0].primitive is jit_p",
        True,
    ),
    Row(
        "jax.typeof(x).vma",
        "fails",
        "0.9.2",
        "0.10.0",
        "jax.typeof(x).manual_axis_type.varying",
        frozenset(),
    ),
    Row(
        'jax.config.update("jax_pmap_shmap_merge", True)',
        "fails",
        "0.9.2",
        "0.10.0",
        "jax.pmap(f)(x)",
        DOUBLED,
    ),
    Row(
        "from jax.experimental.shard import reshard",
        "fails",
        "0.6.2",
        "0.7.0",
        'typed = jax.make_mesh((8,), ("x",)); '
        'jax.sharding.reshard(x, NamedSharding(typed, P("x")))',
        np.arange(8),
    ),
    Row(
        "from jax.experimental.shard import auto_axes",
        "fails",
        "0.6.2",
        "0.7.0",
        'typed = jax.make_mesh((8,), ("x",)); '
        'jax.sharding.auto_axes(f, out_sharding=NamedSharding(typed, P("x")))'
        '(jax.device_put(x, NamedSharding(typed, P("x"))))',
        DOUBLED,
    ),
    Row(
        "jax.xla_computation(f)(x)",
        "fails",
        "0.4.31",
        "0.4.35",
        'jax.jit(f).lower(x).as_text("hlo").startswith("HloModule")',
        True,
    ),
    Row(
        "from jax.experimental import host_callback",
        "fails",
        "0.7.2",
        "0.8.0",
        "jax.jit(lambda v: jax.pure_callback(lambda u: 2 * np.asarray(u), v, v))(x)",
        DOUBLED,
    ),
]

FLAX = [
    Row(
        "from flax.jax_utils import replicate; replicate(x)",
        "runs",
        "",
        "still works, and makes a copy for each device by a leading axis",
        "jax.device_put(x, copied)",
        np.arange(8),
    ),
    Row(
        "from flax.training import checkpoints",
        "runs",
        "",
        "still works, on top of Orbax",
        'import orbax.checkpoint as ocp; hasattr(ocp, "CheckpointManager")',
        True,
    ),
    Row(
        'from flax.core import freeze, unfreeze; unfreeze(freeze({"w": x}))',
        "runs",
        "",
        "still works; init gives plain dictionaries",
        "isinstance(flax.linen.Dense(1).init(jax.random.key(0), x), dict)",
        True,
    ),
    Row(
        "from flax import optim",
        "fails",
        "",
        "before 0.11.2 of Flax",
        "import optax; optax.sgd(0.1).init(x)[0] == optax.EmptyState()",
        True,
    ),
    Row(
        "nnx.Param(jnp.ones(8)).value",
        "warns",
        "flax 0.12.0",
        "flax 0.12.1",
        "nnx.Param(jnp.ones(8))[...]",
        np.ones(8),
    ),
    Row(
        "w = nnx.Param(jnp.ones(8)); w += 1",
        "fails",
        "flax 0.11.2",
        "flax 0.12.0",
        "w = nnx.Param(jnp.ones(8)); w[...] += 1\n; w[...]",
        np.full(8, 2),
    ),
    Row(
        "nnx.with_sharding_constraint",
        "fails",
        "flax 0.11.0",
        "flax 0.11.2",
        "jax.jit(lambda v: jax.lax.with_sharding_constraint(v, split))(x)",
        np.arange(8),
    ),
]
EVERY = ARRAYS + PLACING + MESHES + FUNCTIONS + FLAX

if __name__ == "__main__":
    json.dump({row.old: attempt(row.old) for row in EVERY}, sys.stdout)
