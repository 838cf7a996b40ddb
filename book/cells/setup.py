# @title Setup: eight devices
import time

try:
    import jax
except ImportError as error:
    time.sleep(3)  # JupyterLab has asked for all cells by then, and drops the rest
    raise RuntimeError(
        f"This book needs JAX, and: {error}. "
        "Run  pip install -U jax flax optax  and restart the kernel."
    ) from None
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib_inline.backend_inline import set_matplotlib_formats

set_matplotlib_formats("svg")
plt.rcParams["svg.fonttype"] = "none"

if jax.__version_info__ < (0, 7, 2):
    raise RuntimeError(
        f"This book needs JAX 0.7.2 or newer and found {jax.__version__}. "
        "Run  pip install -U jax flax optax  and restart the kernel."
    )
try:
    jax.config.update("jax_num_cpu_devices", 8)
except RuntimeError:
    pass  # devices are already in use: the count below decides
if jax.device_count() != 8:
    from jax.extend.backend import clear_backends

    print(f"Found {jax.device_count()} {jax.devices()[0].device_kind}: emulating 8")
    clear_backends()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")  # no bfloat16, no TF32
device = jax.devices()[0]
if device.platform == "cpu":  # compiling takes longer than running programs this small
    jax.config.update("jax_disable_most_optimizations", True)
kind = "emulated CPU" if device.platform == "cpu" else device.device_kind
print(f"JAX {jax.__version__}, {jax.device_count()} {kind} devices")
