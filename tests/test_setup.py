"""The setup cell finds eight devices, or says what to do, wherever it runs."""

import os
import subprocess
import sys

import pytest
from pair import ROOT

SETUP = (ROOT / "book/cells/setup.py").read_text()
COUNT = "import jax; assert jax.device_count() == 8"


HAVE = "import jax; jax.config.update('jax_num_cpu_devices', {0}); jax.devices()"


def run(*parts: str) -> subprocess.CompletedProcess:
    """Run the parts in a fresh Python that has asked for no number of devices."""
    asks = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    env = {name: value for name, value in os.environ.items() if name not in asks}
    env["JAX_PLATFORMS"] = "cpu"
    script = "\n".join(parts)
    return subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "before",
    [
        "",
        SETUP,
        "import jax",
        "import jax; assert jax.device_count() == 1",  # as one accelerator would
        f"{SETUP}\njax.pmap(lambda x: x)(jnp.arange(8.0))",
        *(HAVE.format(count) for count in (4, 16)),
    ],
    ids=["fresh", "twice", "late import", "one seen", "eight used", "four", "sixteen"],
)
def test_eight_devices(before):
    result = run(before, SETUP, COUNT)
    assert result.returncode == 0, result.stderr
    assert "8 emulated CPU devices" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_another_number_of_devices_is_named(count):
    result = run(HAVE.format(count), SETUP)
    assert result.stdout.startswith(f"Found {count} cpu: emulating 8\n")


def test_old_jax_is_told_how_to_upgrade():
    result = run("import jax; jax.__version_info__ = (0, 6, 2)", SETUP)
    assert result.returncode == 1
    assert "needs JAX 0.7.2 or newer" in result.stderr
    assert "pip install -U jax flax optax" in result.stderr
