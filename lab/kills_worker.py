"""Be one of two processes that repeat a collective until process 1 kills itself.

lab/kills.py starts it by the book's `launch`, and reads what it writes into RESULT.
"""

import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STEPS, PROCESS = 30, int(os.environ["PROCESS"])


def tell(**values: object) -> None:
    """Write what lab/kills.py is to know of this process."""
    Path(os.environ["RESULT"]).write_text(json.dumps(values))


beat = {"heartbeat_timeout_seconds": int(os.environ["HEARTBEAT"])}
jax.distributed.initialize(os.environ["COORDINATOR"], 2, PROCESS, **beat)
assert jax.local_device_count() == int(os.environ["JAX_NUM_CPU_DEVICES"])
devices = np.array(jax.devices())
if "IN_TURN" in os.environ:
    devices = devices.reshape(2, -1).T.ravel()
ring = [(i, (i + 1) % devices.size) for i in range(devices.size)]
collective = {
    "all-reduce": lambda x: jax.lax.psum(x, "x"),
    "all-gather": lambda x: jax.lax.all_gather(x, "x", tiled=True),
    "ppermute": lambda x: jax.lax.ppermute(x, "x", ring),
}[os.environ["COLLECTIVE"]]
mesh, rows = jax.sharding.Mesh(devices, "x"), P("x")
step = jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=rows, out_specs=rows))
ones = np.ones(8 * devices.size, np.float32)
where = NamedSharding(mesh, rows)
x = jax.make_array_from_callback(ones.shape, where, ones.__getitem__)
try:
    for done in range(1, STEPS + 2):
        step(x).block_until_ready()
        tell(done=done)
        if done == STEPS and PROCESS == int(os.environ["LATE"]):
            time.sleep(0.5)
        if done == STEPS and PROCESS == 1:
            tell(killed=time.time())
            os.kill(os.getpid(), signal.SIGKILL)
except Exception as error:
    tell(heard=time.time(), error=str(error))
    os._exit(1)  # at once: an ordinary exit waits for the others
