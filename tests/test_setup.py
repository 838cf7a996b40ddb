"""Test that the setup cell finds eight devices or prints what to do."""

import os
import re
import subprocess
import sys

import pytest
from pair import ROOT

SETUP = (ROOT / "book/cells/setup.py").read_text()


def run(*parts: str) -> subprocess.CompletedProcess:
    """Run the parts in a new Python process without a configured device count."""
    unset = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env["JAX_PLATFORMS"] = "cpu"
    python = [sys.executable, "-c", "\n".join(parts)]
    return subprocess.run(python, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("", []),
        ("import jax; assert jax.device_count() == 1", ["Found 1 cpu: emulating 8"]),
        (f"{SETUP}\njax.pmap(lambda x: x)(jnp.arange(8.0))", []),
    ],
    ids=["fresh", "one seen", "eight used"],
)
def test_eight_devices(before, found):
    result = run(before, SETUP, "assert jax.device_count() == 8")
    assert result.returncode == 0, result.stderr
    assert re.findall("Found .*", result.stdout) == found
    assert "8 emulated CPU devices" in result.stdout.splitlines()[-1]


def test_setup_names_the_upgrade_of_an_old_jax():
    result = run("import jax; jax.__version_info__ = (0, 6, 2)", SETUP)
    assert result.returncode == 1
    assert "needs JAX 0.7.2 or newer" in result.stderr
    assert "pip install -U jax flax optax" in result.stderr
