"""Run each chapter as a reader does, alone in a folder and offline: `nox -s colab`.

A chapter is skipped if, by the record of the same versions, its present text passed.
RUNS=1 runs every chapter; RUNS=2 runs each twice in one kernel.
"""

import os

import nbformat
import pytest
from nbclient import NotebookClient
from pair import ROOT
from versions import passed_as_recorded

pytestmark = pytest.mark.reader
RUNS = int(os.environ.get("RUNS", "1"))
PASSED = set() if "RUNS" in os.environ else passed_as_recorded("colab")
OFFLINE = """
import socket
def _local_only(connect):
    def connect_locally(self, address):
        if self.family != socket.AF_UNIX and not address[0].startswith("127."):
            raise OSError(f"offline: {address}")
        return connect(self, address)
    return connect_locally
def _no_names(host, *args, **kwargs):
    raise socket.gaierror(f"offline: {host}")
socket.socket.connect = _local_only(socket.socket.connect)
socket.getaddrinfo = _no_names
del _local_only, _no_names
"""


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_chapter_runs_alone_and_offline(path, tmp_path):
    if path.stem in PASSED:
        pytest.skip("passed and unchanged, by book/measured/versions.json")
    notebook = nbformat.read(path, as_version=4)
    cells = [nbformat.v4.new_code_cell(OFFLINE)]
    for run in range(RUNS):
        for number, cell in enumerate(notebook.cells):
            copy = nbformat.from_dict(cell)
            copy.id = f"run-{run}-{number}"
            cells.append(copy)
    notebook.cells = cells
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
