"""Run the pages that have changed, two at a time, and keep what comes out of them.

`nox -s book` does this before it renders: MyST-NB finds the results in its cache, and
what stands there it does not run. jupyter-cache compares the code of a page. Here a
page is also run again when Python has changed, a file that it names under `reads` at
its head, or a package that can change a number.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import re
import signal
import sys
from glob import glob
from pathlib import Path

import yaml
from jupyter_cache import get_cache
from jupyter_cache.executors import load_executor
from jupyter_cache.executors.basic import REPORT_LEVEL
from jupyter_cache.readers import get_reader
from nbformat import NotebookNode
from pair import ROOT

CACHE = ROOT / "_build/.jupyter_cache"
LIMIT = yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]["timeout"]
READER = {"name": "myst_nb_md", "type": "plugin"}
PROFILE = ROOT / "_build/ipython"  # so that no reader's own settings play a part
PINS = r"^(?:jax|jaxlib|numpy|flax|optax|orbax-checkpoint|grain|equinox|keras)==\S+"


def pages() -> list[Path]:
    """The pages with code, but the one that each build runs."""
    found = [*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.md")]
    texts = {path: path.read_text() for path in found}
    return sorted(
        path
        for path, text in texts.items()
        if "{code-cell}" in text and "execution_mode: force" not in text
    )


def inputs(page: Path) -> str:
    """A digest of what a page depends on beside its own code."""
    head = next(yaml.safe_load_all(page.read_text()))
    patterns = [str(page.parent / pattern) for pattern in head.get("reads", [])]
    files = sorted(file for pattern in patterns for file in glob(pattern))
    pins = re.findall(PINS, (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    parts = [platform.python_version(), *pins, *(Path(f).read_text() for f in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def complaints(notebook: NotebookNode) -> str:
    """What a page wrote to stderr, which the builder would not take."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "".join(out.text for out in outputs if out.get("name") == "stderr")


def main() -> str | None:
    """Run what the cache does not have; name the pages that fail."""
    cache, read = get_cache(CACHE), get_reader(READER)
    noted = CACHE / "inputs.json"
    known = json.loads(noted.read_text()) if noted.exists() else {}
    wanted = {}
    for page in pages():
        try:
            kept = cache.match_cache_notebook(read(str(page)))
            if known.get(page.name) == inputs(page):
                continue
            cache.remove_cache(kept.pk)
        except KeyError:
            pass
        wanted[str(page)] = page
        cache.add_nb_to_project(str(page), read_data=READER)
    print(f"{len(wanted)} of {len(pages())} pages are to be run.", flush=True)
    if not wanted:
        return None
    settings = PROFILE / "profile_default/ipython_kernel_config.py"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("c.IPKernelApp.log_level = 40  # no warning for each kernel\n")
    os.environ["IPYTHONDIR"] = str(PROFILE)
    multiprocessing.log_to_stderr(REPORT_LEVEL)  # say which page begins and ends
    executor = load_executor("local-parallel", cache)
    executor.run_and_cache(filter_uris=[*wanted], timeout=LIMIT)
    failed = []
    for uri, page in wanted.items():
        try:
            kept = cache.match_cache_notebook(read(uri))
        except KeyError:
            failed.append(f"{page}\n{cache.get_project_record(uri).traceback}")
            continue
        if said := complaints(cache.get_cache_bundle(kept.pk).nb):
            cache.remove_cache(kept.pk)
            failed.append(f"{page} wrote to stderr:\n{said}")
            continue
        print(f"{page.stem}: {kept.data['execution_seconds']:.1f} s", flush=True)
        known[page.name] = inputs(page)
        page.touch()  # so that the builder reads it again
    noted.write_text(json.dumps(known))
    return "\n".join(failed) or None


def leave(number: int, frame: object) -> None:
    """End at once, with the workers; a kernel ends when its worker is gone."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main())
