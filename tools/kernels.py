"""Kernels that begin with the imports done: each is forked from one process.

To import JAX, Flax, Orbax and Matplotlib takes a kernel some seconds, and there are
forty pages. No device is touched before the fork, so a page still sets up its own.
"""

import os
import signal
import sys
from multiprocessing import get_context

from jupyter_client import AsyncKernelManager

# Matplotlib looks for it when it is imported, and a kernel would set it too late.
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
FORKS = get_context("forkserver")
IMPORTS = """
    __main__ flax.linen flax.nnx ipykernel.kernelapp jax matplotlib.pyplot optax
    orbax.checkpoint sklearn.datasets
""".split()


def become_kernel(file: str, folder: str, settings: dict[str, str]) -> None:
    """Turn this process into a kernel that is reached as a file says."""
    from ipykernel.kernelapp import launch_new_instance

    os.setsid()  # a signal to the group reaches the kernel's own processes too
    os.chdir(folder)
    os.environ.update(settings)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    launch_new_instance(argv=["-f", file], parent_handle=os.getppid())


class Forked:
    """A kernel's process, asked as one asks a subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, *about):
        FORKS.set_forkserver_preload(IMPORTS)  # heard once, before the first fork
        self.process = FORKS.Process(target=become_kernel, args=about)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PreparedKernelManager(AsyncKernelManager):
    """Starts the kernel of a notebook by a fork."""

    transport_encryption = "auto"  # without, each kernel warns

    async def _async_launch_kernel(self, command, *, cwd, env, **options):
        process = Forked(self.connection_file, cwd, env)
        self.provisioner.process = process
        self.provisioner.pid = self.provisioner.pgid = process.pid
        self._reconcile_connection_info(self.provisioner.connection_info)
