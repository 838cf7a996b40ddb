"""Connect pytest with the kernels of notebooks through Unix sockets instead of TCP.

Jupyter picks free TCP ports before the kernel binds them. If another kernel, or a
program that a page starts, takes one of them first, the kernel dies.
"""

import os
import tempfile
import uuid

import jupyter_client
from traitlets import default

FOLDER = tempfile.TemporaryDirectory(prefix="kernels-")  # removed at exit


class SocketKernelManager(jupyter_client.AsyncKernelManager):
    """A kernel manager whose kernel listens on sockets in FOLDER."""

    @default("transport")
    def _use_sockets(self) -> str:
        return "ipc"

    @default("ip")
    def _name_sockets(self) -> str:
        return f"{FOLDER.name}/{uuid.uuid4().hex[:8]}"


if os.name == "posix":
    jupyter_client.AsyncKernelManager = SocketKernelManager  # nbclient's default
