"""Each chapter as a reader runs it: alone, offline, and then all of it once more."""

import nbformat
import pytest
from nbclient import NotebookClient
from pair import ROOT

OFFLINE = """
import socket
def _local_only(connect):
    def connect_or_refuse(self, address):
        if self.family != socket.AF_UNIX and not address[0].startswith("127."):
            raise OSError(f"offline: {address}")
        return connect(self, address)
    return connect_or_refuse
def _no_names(host, *args, **kwargs):
    raise socket.gaierror(f"offline: {host}")
socket.socket.connect = _local_only(socket.socket.connect)
socket.getaddrinfo = _no_names
del _local_only, _no_names
"""


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_chapter_runs_alone_offline_and_twice(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    copies = [nbformat.from_dict(cell) for cell in notebook.cells]
    for number, cell in enumerate(copies):
        cell.id = f"again-{number}"
    offline = nbformat.v4.new_code_cell(OFFLINE)
    notebook.cells = [offline, *notebook.cells, *copies]
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
