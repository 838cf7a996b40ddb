"""Be one of two processes that all-reduce until something stops them.

lab/hosts.py starts it in a host and reads what it prints: a time, a word, and the rest.
"""

import json
import sys
import time

COORDINATOR = "192.0.2.1:47000"  # host 0; nobody else has an address of this range
HEARTBEAT = 10  # seconds; the default is 100
PAUSE = 0.05  # seconds between two all-reduces
EVERY = 25  # steps from one checkpoint to the next


def note(word: str, *rest: object) -> None:
    """Print a line of the diary."""
    print(f"{time.time():.3f}", word, *rest, flush=True)


def work(
    process: int,
    options: dict = {},
    steps: tuple[int, int] = (100_000, 100_000),
    floats: int = 256,
    poll: bool = False,
    checkpoints: str | None = None,
) -> None:
    """All-reduce f32[floats] until all steps are done or all processes told to stop."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    note("initializing")
    options = {"heartbeat_timeout_seconds": HEARTBEAT} | options
    jax.distributed.initialize(COORDINATOR, 2, process, **options)
    note("initialized")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    mine = jnp.ones((1, floats), jnp.float32)
    x = jax.make_array_from_process_local_data(rows, mine)
    all_reduce = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)
    manager = None
    if checkpoints:
        import orbax.checkpoint as ocp

        often = ocp.CheckpointManagerOptions(save_interval_steps=EVERY)
        manager = ocp.CheckpointManager(checkpoints, options=often)
    for step in range(steps[process]):
        begun = time.monotonic()
        total = all_reduce(x)
        total.block_until_ready()
        note("step", step, f"{time.monotonic() - begun:.4f}")
        if manager:  # it saves every 25th step, and at the sync point
            manager.save(step, args=ocp.args.StandardSave({"total": total}))
        if poll and multihost_utils.reached_preemption_sync_point(step):
            break
        time.sleep(PAUSE)
    if manager:
        manager.close()  # waits until all is written
    note("done")


if __name__ == "__main__":
    try:
        work(**json.loads(sys.argv[1]))
    except Exception as error:
        note("complaint", f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise
