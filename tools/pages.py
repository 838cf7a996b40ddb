"""Run the pages that are stale, by nbmake, and hand their outputs to the builder.

`nox -s book` and `nox -s tests` both begin with this. Each stale page is copied as a
notebook into a temporary folder that mirrors the repository, nbmake runs the copies in
parallel, and the outputs of each page that passes go to the cache in which MyST-NB
looks, so that the site shows the very cells that were tested.

jupyter-cache compares the code of a page. A page is stale, too, when Python has
changed, a file that the page names under `reads` at its head, or a package that can
change a number or a figure.
"""

import hashlib
import os
import platform
import re
import sys
import tempfile
from contextlib import chdir
from glob import glob
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn, JupyterCacheAbstract
from jupyter_cache.cache.db import NbCacheRecord
from jupyter_cache.readers import get_reader
from nbformat import NotebookNode
from pair import ROOT

CACHE = ROOT / "_build/.jupyter_cache"
DOCTREES = ROOT / "_build/.doctrees"
LIMIT = yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]["timeout"]
PINS = re.compile(
    r"^(?:jax|jaxlib|numpy|flax|optax|orbax-checkpoint|grain|equinox|keras|matplotlib"
    r"|scikit-learn)==\S+",
    re.MULTILINE,
)
PROFILE = ROOT / "_build/ipython"  # so that no reader's own settings play a part
READ = get_reader({"name": "myst_nb_md", "type": "plugin"})
# A page with several processes waits for most of its time, so one more page than there
# are pairs of cores runs at once: three on two cores.
WORKERS = (os.cpu_count() or 2) * 3 // 2


def pages() -> list[Path]:
    """Return the pages with code, except the one that each build runs."""
    found = [*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.md")]
    texts = {path: path.read_text() for path in found}
    return sorted(
        path
        for path, text in texts.items()
        if "{code-cell}" in text and "execution_mode: force" not in text
    )


def digest(*parts: str) -> str:
    """Return a digest of some texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def inputs(page: Path) -> str:
    """Return a digest of what a page depends on, apart from its own code."""
    head = next(yaml.safe_load_all(page.read_text()))
    patterns = [str(page.parent / pattern) for pattern in head.get("reads", [])]
    files = sorted(file for pattern in patterns for file in glob(pattern))
    pins = PINS.findall((ROOT / "requirements.lock").read_text())
    texts = [Path(file).read_text() for file in files]
    return digest(platform.python_version(), *pins, *texts)


def mirror(folder: Path, stale: list[Path]) -> dict[str, Path]:
    """Write stale pages as notebooks, with links to all that a page may read.

    Return each notebook's page, by the notebook's path in the folder.
    """
    book = [path for path in (ROOT / "book").iterdir() if path.suffix != ".md"]
    for path in [ROOT / "lab", ROOT / "launch", *book]:
        link = folder / path.relative_to(ROOT)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path)
    (folder / "notebooks").mkdir()
    copies = {}
    for page in stale:
        copy = page.relative_to(ROOT).with_suffix(".ipynb")
        nbformat.write(READ(str(page)), folder / copy)
        copies[str(copy)] = page
    return copies


def stderr(notebook: NotebookNode) -> str:
    """Return what a page wrote to stderr, which the builder does not accept."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "".join(out.text for out in outputs if out.get("name") == "stderr")


class HandOver:
    """A plugin of pytest that keeps the outputs of each page as soon as it passes."""

    def __init__(self, folder: Path, copies: dict[str, Path]) -> None:
        self.folder, self.copies = folder, copies
        self.cache = get_cache(CACHE)
        self.warned: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not report.passed:
            return
        copy = report.nodeid.partition("::")[0]
        page = self.copies[copy]
        executed = nbformat.read(self.folder / copy, nbformat.NO_CONVERT)
        if text := stderr(executed):
            self.warned.append(f"{page} wrote to stderr:\n{text}")
            return
        notebook = READ(str(page))  # the cache's key is of its source and metadata
        notebook.metadata["language_info"] = executed.metadata["language_info"]
        for cell, ran in zip(notebook.cells, executed.cells, strict=True):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
        data = {"text": digest(page.read_text()), "inputs": inputs(page)}
        data["execution_seconds"] = report.duration
        bundle = CacheBundleIn(nb=notebook, uri=str(page), data=data)
        self.cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
        doctree = DOCTREES / page.relative_to(ROOT).with_suffix(".doctree")
        doctree.unlink(missing_ok=True)  # so that the builder reads the page again

    def pytest_keyboard_interrupt(self) -> None:
        for worker in psutil.Process().children():
            worker.kill()  # a kernel ends with its worker


def is_stale(cache: JupyterCacheAbstract, page: Path, kept: NbCacheRecord | None):
    """Return whether a page's code or its inputs are not those of its kept outputs.

    If the page's text has not changed, neither has its code: reading it takes time.
    """
    if kept is None or kept.data.get("text") != digest(page.read_text()):
        try:
            kept = cache.match_cache_notebook(READ(str(page)))
        except KeyError:
            return True
    if kept.data.get("inputs") == inputs(page):
        return False
    cache.remove_cache(kept.pk)
    return True


def main() -> int | str:
    """Run the stale pages; return pytest's status, or what was written to stderr."""
    cache = get_cache(CACHE)
    kept = {record.uri: record for record in cache.list_cache_records()}
    stale = [page for page in pages() if is_stale(cache, page, kept.get(str(page)))]
    print(f"{len(stale)} of {len(pages())} pages are stale.", flush=True)
    if not stale:
        return 0
    settings = PROFILE / "profile_default/ipython_kernel_config.py"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("c.IPKernelApp.log_level = 40  # no warning for each kernel\n")
    os.environ["IPYTHONDIR"] = str(PROFILE)
    with tempfile.TemporaryDirectory(prefix="pages-") as name:
        keep = HandOver(Path(name), mirror(Path(name), stale))
        nbmake = ["--nbmake", f"--nbmake-timeout={LIMIT}", "--overwrite"]
        parallel = [f"-n{min(WORKERS, len(stale))}", "--dist=worksteal"]
        shown = ["-v", "--durations=10", "-p", "no:cacheprovider"]
        with chdir(name):
            words = [*nbmake, *parallel, *shown, "--rootdir=.", "."]
            status = pytest.main(words, plugins=[keep])
    return "\n".join(keep.warned) or int(status)


if __name__ == "__main__":
    sys.exit(main())
