"""Run notebooks of others on parallel JAX on three releases of it.

FOLDER has clones of Git repositories. A notebook counts when its code imports JAX and
names a way to use several devices; of those with the same code one is kept, and of a
repository at most two, drawn at random. Each is run in a copy of its folder, on eight
devices that the CPU emulates and without a network, in the environments that uv makes
in _build/field. What has been run is kept there too, so that a survey that was cut off
goes on; to begin anew, delete that folder. A release is a part. Notebooks are programs
of strangers: run those that you would open. It needs Linux.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import record

STATE = record.ROOT / "_build/field"
RELEASES = {  # on each the book's own chapters run too: the legs tests, kaggle, colab
    "0.12": ["-c", "requirements.lock"],
    "0.10.2": ["jax==0.10.2", "jaxlib==0.10.2"],
    "0.7.2": ["-c", "tests/colab.txt"],
}
# What the notebooks import that is released and light; no PyTorch and no TensorFlow.
PACKAGES = """
    jax absl-py chex clu dm-haiku einops equinox etils evosax flax frozendict
    google-metrax grain gymnax huggingface-hub humanize ipython ipywidgets jaxdecomp
    jaxopt jaxtyping jraph matplotlib ml-collections nest-asyncio numpy optax
    orbax-checkpoint orbax-export pandas penzai pillow qwix requests rlax scikit-image
    scikit-learn scipy seaborn tensorflow-probability tensorstore tiktoken tqdm
    treescope xarray
""".split()
OF_EACH = 2  # notebooks of one repository
SECONDS = 120  # of one processor, so that other work on the machine changes nothing
PATIENCE = 5 * SECONDS  # of the clock
GIB = 8
IMPORTS_JAX = re.compile(r"^\s*(?:import|from) jax\b", re.MULTILINE)
SEVERAL_DEVICES = re.compile(
    r"\b(pmap|shard_map|pjit|xmap|NamedSharding|PositionalSharding|make_mesh"
    r"|create_device_mesh)\b|\b(sharding|maps)(\.| import .*\b)Mesh\b"
)
INSTALLS = re.compile(
    r"^([ \t]*)[!%][ \t]*(?:uv |python\S* -m )?(?:pip3?|conda|apt|apt-get)\b.*",
    re.MULTILINE,
)
TEMPORARY = re.compile(r"(?<![\w.])/tmp\b")
NO_GIT = shutil.ignore_patterns(".git")
NOWHERE = "http://127.0.0.1:9"  # a proxy that is not there
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MPLBACKEND": "agg",
    "TQDM_DISABLE": "1",
    **{f"{scheme}_proxy": NOWHERE for scheme in ("http", "https", "all")},
}
EIGHT = "--xla_force_host_platform_device_count=8"
# Eight devices share few cores. JAX 0.7.2 stops at flags that it does not know.
WAIT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"

# Why a notebook cannot be judged here, by what its error says.
BLOCKED = {
    "Colab": r"No module named '(google\.colab|google)'",
    "an accelerator": r"(?i)unknown backend|unable to initialize backend|no (tpu|gpu)"
    r"|backend '(tpu|gpu|cuda)'|only supported on (tpu|gpu)|requires? .*\b(tpu|gpu)s?\b"
    r"|interpret mode is supported on CPU",
    "another number of devices": r"reshape array of size 8 |[Nn]umber of devices 8 "
    r"|divisible by 8\b|partitioned 8 times",
    "the network": r"(?i)proxy|urlopen|connection (refused|error)|name resolution"
    r"|cannot connect|connect to the server|offline|LocalEntryNotFound",
    "a file": r"^FileNotFoundError|^NotADirectoryError|No such file or directory",
    "more memory": r"^MemoryError|Out of memory|bad_alloc|Unable to allocate",
    "more time": r"^TimeoutError: over",
    "a person": r"^EOFError|raw_input was called|^StdinNotImplementedError",
    "another package": r"^ModuleNotFoundError: No module named '(?!jax\b|flax\.)"
    r"|need to install",
}
MODULE = r"(?P<where>(?:jax|jaxlib|flax)\b[\w.]*)"
ABSENT = [  # how Python and JAX say that a name is not there, or not any longer
    rf"[Mm]odule '?{MODULE}'? has no attribute '(?P<name>\w+)'",
    rf"cannot import name '(?P<name>\w+)' from '{MODULE}'",
    rf"No module named '{MODULE}\.(?P<name>\w+)'",
    rf"{MODULE}\.(?P<name>\w+)(\(\))? (was|is|has been) (removed|deprecated|required)",
]


class Notebook(NamedTuple):
    """A notebook of a clone: where it comes from, its last change, and its file."""

    repository: str
    commit: str
    path: str
    edited: str
    clone: Path


def code(path: Path) -> str:
    """The text of a notebook's code cells."""
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def find(folder: Path) -> list[Notebook]:
    """The notebooks on parallel JAX of all clones in a folder, no code twice."""
    found = {}
    for clone in sorted(path.parent for path in folder.resolve().glob("*/.git")):
        git = partial(record.ask_git, "-C", str(clone))
        origin = git("remote", "get-url", "origin").removesuffix(".git")
        name = "/".join(re.split("[/:]", origin)[-2:])
        commit = git("rev-parse", "HEAD")
        for path in git("ls-files", "-z", "*.ipynb").split("\0")[:-1]:
            try:
                text = code(clone / path)
            except (OSError, ValueError, KeyError):
                continue  # absent, or of a format that is older than cells
            if IMPORTS_JAX.search(text) and SEVERAL_DEVICES.search(text):
                edited = git("log", "-1", "--format=%cs", "--", path)
                found.setdefault(text, Notebook(name, commit, path, edited, clone))
    return list(found.values())


def draw(notebooks: list[Notebook]) -> list[Notebook]:
    """At most OF_EACH notebooks of each repository; its name is the seed."""
    drawn = []
    for name in sorted({notebook.repository for notebook in notebooks}):
        own = [notebook for notebook in notebooks if notebook.repository == name]
        drawn += sorted(random.Random(name).sample(own, min(OF_EACH, len(own))))
    return drawn


def environment(release: str) -> tuple[Path, list[str]]:
    """The Python of a release with PACKAGES, and what is installed there."""

    def uv(*words: str) -> str:
        command = [os.environ.get("UV", "uv"), *words]
        return subprocess.check_output(command, text=True, cwd=record.ROOT)

    place = STATE / release
    python = place / "bin/python"
    uv("venv", "--quiet", "--allow-existing", "--python", sys.executable, str(place))
    own = ("--quiet", "--python", str(python))
    uv("pip", "install", *own, *PACKAGES, *RELEASES[release])
    return python, uv("pip", "freeze", *own).split()


def execute(path: str) -> str | None:
    """Run a notebook's cells in this process, and return the error that stops it.

    A cell may fail that is tagged so, or whose saved output is an error. What installs
    packages is left out, and /tmp is a folder of the notebook's own.
    """
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.enable_gui = lambda shell, gui=None: None  # no windows here
    sys.path[0] = ""
    sys.argv[1:] = []
    shell = InteractiveShell.instance()
    for cell in json.loads(Path(path).read_text())["cells"]:
        kinds = {output["output_type"] for output in cell.get("outputs", [])}
        tags = cell["metadata"].get("tags", [])
        may_fail = "error" in kinds or "raises-exception" in tags
        if cell["cell_type"] == "code":
            source = INSTALLS.sub(r"\1pass", "".join(cell["source"]))
            source = TEMPORARY.sub(os.environ["TMPDIR"], source)
            result = shell.run_cell(source, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error and not may_fail:
                return f"{type(error).__name__}: {error}"
    return None


def last_words(told: str, code: int) -> str:
    """Why a process ended that gave no answer, by what it printed or how it ended."""
    if code in (124, -signal.SIGXCPU) or "Termination timeout" in told:
        return f"TimeoutError: over {SECONDS} seconds"
    if code == 1:
        raise SystemExit(f"The notebook could not be run:\n{told}")
    fatal = re.search(r"\S*bad_alloc|Check failed:.*|RESOURCE_EXHAUSTED.*", told)
    return fatal[0] if fatal else f"exit {code}: {told.strip()[-200:]}"


def attempt(release: str, python: Path, notebook: Notebook) -> str | None:
    """Run a notebook in a copy of its folder: the error, if any."""
    original = notebook.clone / notebook.path
    flags = [] if "jax_num_cpu_devices" in code(original) else [EIGHT]
    flags += [] if release == "0.7.2" else [WAIT]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        inside = Path(place, "clone", notebook.path)
        shutil.copytree(original.parent, inside.parent, symlinks=True, ignore=NO_GIT)
        answer, told = Path(place, "answer.json"), Path(place, "told")
        own = {"XLA_FLAGS": " ".join(flags), "PATH": os.environ["PATH"]}
        own |= dict.fromkeys(("HOME", "TMPDIR"), place)
        limits = ["timeout", "--kill-after=5", str(PATIENCE)]
        limits += ["prlimit", f"--data={GIB * 2**30}", f"--cpu={SECONDS}:{SECONDS + 5}"]
        process = subprocess.Popen(
            [*limits, python, __file__, inside.name, answer],
            cwd=inside.parent,
            env=ENVIRONMENT | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=told.open("w"),
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left running
        if answer.exists():
            error = json.loads(answer.read_text())
        else:
            error = last_words(told.read_text(errors="replace"), status)
        return error and error.replace(place, "...")


def judge(error: str | None) -> dict[str, str]:
    """What an error says of a notebook: it passes, fails or is blocked, and why."""
    if error is None:
        return {"outcome": "passes"}
    first = re.sub(r" \(\S*site-packages\S*\)", "", error.splitlines()[0])[:200]
    for pattern in ABSENT:
        if absent := re.search(pattern, error):
            name = f"{absent['where']}.{absent['name']}"
            return {"outcome": "fails", "absent": name, "error": first}
    for need, pattern in BLOCKED.items():
        if re.search(pattern, error):
            return {"outcome": "blocked", "by": need, "error": first}
    return {"outcome": "fails", "error": first}


def measure(folder: str) -> Iterator[tuple[str, dict]]:
    """Run what is drawn from the clones in a folder on each release.

    What is blocked on one release is not tried on the next.
    """
    found, blocked = find(Path(folder)), set()
    drawn = draw(found)
    print(f"{len(found)} notebooks found, {len(drawn)} drawn", flush=True)
    for release in RELEASES:
        python, installed = environment(release)
        kept, rows = STATE / release / "errors.json", []
        known = json.loads(kept.read_text()) if kept.exists() else {}
        for notebook in drawn:
            key = " ".join(notebook[:3])
            if key in blocked:
                continue
            if key not in known:
                known[key] = attempt(release, python, notebook)
                kept.write_text(json.dumps(known, indent=1))
            result = judge(known[key])
            print(f"{release}: {key}: {' '.join(result.values())}", flush=True)
            if result["outcome"] == "blocked":
                blocked.add(key)
            rows.append(dict(zip(Notebook._fields[:4], notebook)) | result)
        yield release, {"found": len(found), "installed": installed, "notebooks": rows}


def files(release: str) -> list[str]:
    return []  # what was measured is of others, and named with its commit


def versions() -> dict[str, str]:
    return {}  # of each release, what is installed is among what was found


if __name__ == "__main__":
    _, path, answer = sys.argv
    Path(answer).write_text(json.dumps(execute(path)))
    os._exit(0)  # whatever threads it left
