# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]>=2026.8.10"]
# ///
"""Build, test and publish the book; `uvx nox -l` lists the sessions."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = (
    ">=2026.8.10"  # older ones ignore the Python version asked for above
)
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests", "book"]

# Some images set it; then each process compiles all that it imports, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

KAGGLE = ["jax==0.10.2", "jaxlib==0.10.2"]
# Eight devices share few cores: a collective may wait long for the last of them.
# JAX 0.7.2 stops at flags it does not know, so only the locked versions get these.
PATIENCE = {
    "XLA_FLAGS": "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    " --xla_cpu_collective_call_terminate_timeout_seconds=300",
    # A restore that Orbax refuses may leave a coroutine that nobody awaits, by chance.
    "PYTHONWARNINGS": "ignore:coroutine:RuntimeWarning",
}
# To optimise the machine code of small programs takes longer than to run them once,
# and wide vectors do not pay.
# The sessions that run the chapters on other versions leave that as readers have it.
CHEAPLY = "--xla_backend_optimization_level=1 --xla_cpu_prefer_vector_width=128"
ONCE = PATIENCE | {
    "XLA_FLAGS": f"{PATIENCE['XLA_FLAGS']} {CHEAPLY}",
    # What a page compiled, it need not compile again when one of its cells is edited.
    "JAX_COMPILATION_CACHE_DIR": str(Path("_build/compiled").resolve()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
}
HOUSE_RULES = "tests/test_book.py"
EXECUTE = ["--nbmake", "--nbmake-timeout=300", "-n2", "notebooks"]
SELF_TESTS = [
    f"tests/test_{name}.py"
    for name in (
        "checks",
        "setup",
        "cells",
        "aot",
        "counting",
        "mutants",
        "measured",
        "execute",
        "bench",
        "hosts",
        "since",
        "field",
        "pytorch",
        "script",
    )
]
WORKFLOW_TESTS = [
    "tests/test_workflows.py",
    "tests/test_lock.py",
    "tests/test_launch.py",
]
IN_BROWSER = [
    "tests/test_browser.py",
    "tests/test_search.py",
    "tests/test_explorer.py",
    "tests/test_layouts.py",
    "tests/test_calculator.py",
    "tests/test_jupyterlab.py",
]


def where_present(version: str) -> str | None:
    """The Python of this version if the machine has it; otherwise any will do."""
    python = shutil.which(f"python{version}")
    found = (
        python and not subprocess.run([python, "-V"], capture_output=True).returncode
    )
    return version if found else None


def install_lock(session: nox.Session, *more: str) -> None:
    locks = [part for lock in ("requirements.lock", *more) for part in ("-r", lock)]
    session.install("--require-hashes", *locks)


def build(session: nox.Session, *options: str) -> None:
    install_lock(session)
    session.run("pytest", "-q", HOUSE_RULES)
    fresh = "--all" in options
    if not fresh:
        session.run("python", "tools/execute.py", env=ONCE)
    strict = ["--warningiserror", "--nitpick", "--keep-going"]
    session.run("jupyter-book", "build", ".", *strict, *options, env=PATIENCE)
    # A page taken from the cache offers its notebook without outputs.
    wanted = [] if fresh else ["-k not download"]
    session.run("pytest", "-q", "tests/test_site.py", *wanted)


@nox.session(reuse_venv=True)  # every build installs the lock again, which is fast
def book(session: nox.Session) -> None:
    """Render the site into _build/html; what has not changed is not run again."""
    build(session, *session.posargs)


def run_chapters(session: nox.Session, *also: str) -> None:
    """Run the tests named in also and every chapter, and leave a report for `legs`."""
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    leg = f"_build/legs/{session.name}"
    session.run("python", "lab/versions.py", f"{leg}.json")
    session.run("pytest", *also, *EXECUTE, f"--junitxml={leg}.xml")


@nox.session
def tests(session: nox.Session) -> None:
    """Check the house rules and the tools, and run what `book` has not run already."""
    install_lock(session)
    wanted = session.posargs or ["-n2", HOUSE_RULES, *SELF_TESTS]
    session.run("pytest", *wanted, env=PATIENCE)
    if not session.posargs:
        session.run("python", "tools/execute.py", env=ONCE)


@nox.session(python=where_present("3.13"))
def colab(session: nox.Session) -> None:
    """Run every chapter on the versions that Colab has, and once more as a reader."""
    session.install("-r", "tests/colab.txt", "nbmake", "pytest-xdist")
    run_chapters(session, "tests/test_reader.py", "tests/test_script.py")


@nox.session
def kaggle(session: nox.Session) -> None:
    """Run every chapter on the JAX that Kaggle has."""
    session.install("-r", "requirements.txt", *KAGGLE)
    run_chapters(session)


@nox.session
def next(session: nox.Session) -> None:
    """Run every chapter on the newest releases, previews included; it may fail.

    Nothing waits for this session: it tells what the next upgrade will need.
    """
    session.install("--pre", "-r", "requirements.txt")
    run_chapters(session)


@nox.session(venv_backend="none")
def legs(session: nox.Session) -> None:
    """Keep the last run of each of the four sessions above for the status page."""
    session.run("python3", "lab/versions.py", external=True)


@nox.session
def repeat(session: nox.Session) -> None:
    """Run all chapters ten times, each time in another order; `-- 3` for three."""
    install_lock(session)
    session.run("python", "tools/repeat.py", *session.posargs, env=PATIENCE)


@nox.session
def bench(session: nox.Session) -> None:
    """Time the book's ways as ratios; `-- --record` keeps the numbers."""
    install_lock(session)
    env = PATIENCE | {"MPLBACKEND": "agg"}
    session.run("python", "tools/bench.py", *session.posargs, env=env)


@nox.session
def since(session: nox.Session) -> None:
    """Try old names on the releases of JAX between which they are said to change."""
    install_lock(session)
    env = {"UV": nox.virtualenv.UV, "PYTHONPATH": "book"}
    session.run("python", "lab/since.py", env=env)


@nox.session(python=where_present("3.12"))
def field(session: nox.Session) -> None:
    """Run notebooks of others on three releases: `-- FOLDER`, where clones lie."""
    install_lock(session)
    env = {"UV": nox.virtualenv.UV}
    session.run("python", "lab/field.py", *session.posargs, env=env)


@nox.session(python=where_present("3.11"))
def pytorch(session: nox.Session) -> None:
    """Run the PyTorch programs that a page translates; `-- --record` keeps the results.

    Nothing else needs PyTorch, which is large.
    """
    install_lock(session)
    session.install("torch==2.13.0")
    session.run("python", "lab/pytorch.py", *session.posargs)


@nox.session
def hosts(session: nox.Session) -> None:
    """Break what joins two simulated hosts and record what JAX does; root and Linux.

    `-- "link down"` causes that fault only, and records nothing.
    """
    install_lock(session)
    time = {"interrupt_timeout": 30, "terminate_timeout": 30}  # to remove the hosts
    session.run("python", "lab/hosts.py", *session.posargs, **time)


@nox.session
def launchers(session: nox.Session) -> None:
    """Start the script by Open MPI and by Slurm, as root on Debian or Ubuntu.

    `-- --sudo` becomes root by sudo, and `-- --record` keeps the numbers.
    """
    install_lock(session)
    words = ["python", "lab/launchers.py", *session.posargs]
    # After Ctrl-C it ends what it started, and that takes a while.
    session.run(*words, env=PATIENCE, interrupt_timeout=30, terminate_timeout=30)


@nox.session
def aot(session: nox.Session) -> None:
    """Compile for TPUs and a GPU that are not here; `-- --record` keeps the results.

    It installs libtpu, which is Google's and under the terms of its cloud. Nothing
    else needs it.
    """
    install_lock(session)
    ask = "from importlib.metadata import version; print(version('jax'), end='')"
    jax = session.run("python", "-c", ask, silent=True)
    session.install("jax[tpu]")
    # The compiler alone: NVIDIA's libraries are large, and only running needs them.
    cuda = (f"jax-cuda12-plugin=={jax}", f"jax-cuda12-pjrt=={jax}")
    session.install("--no-deps", *cuda)
    env = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MPLBACKEND": "agg"}
    session.run("python", "lab/aot.py", *session.posargs, env=env)


@nox.session
def mutants(session: nox.Session) -> None:
    """Break each chapter one thing at a time, and expect its checks to notice."""
    install_lock(session)
    session.run("python", "tools/mutants.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and spelling, and that workflows and locks keep their rules."""
    install_lock(session, "tests/requirements.lock")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")
    env = {"UV": nox.virtualenv.UV}  # it may lie beside nox and on no path
    session.run("pytest", "-q", "-n2", "-rs", *WORKFLOW_TESTS, env=env)


def read_site(session: nox.Session, *options: str) -> None:
    """Read the built site in a browser."""
    if shutil.which("npm") is None:
        session.error("there is no npm: run apt-get install npm, or install Node.js")
    install_lock(session, "tests/requirements.lock")
    session.run("npm", "ci", "--prefix", "tests", "--ignore-scripts", external=True)
    session.run("pytest", "-q", *options, *IN_BROWSER, *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """Read the built site in headless Chromium; `-- --record` keeps the numbers."""
    read_site(session, "-n0" if "--record" in session.posargs else "-n2")


@nox.session
def firefox(session: nox.Session) -> None:
    """Read the built site in headless Firefox, as `site` does in Chromium."""
    read_site(session, "-n2", "--browser=firefox", "-m", "not chromium")


@nox.session
def pdf(session: nox.Session) -> None:
    """Print the built site as one PDF, _build/html/parallel-jax.pdf."""
    install_lock(session, "tests/requirements.lock")
    session.run("python", "tools/pdf.py")


@nox.session
def pair(session: nox.Session) -> None:
    """Write each chapter's notebook, links included, from its Markdown source."""
    install_lock(session)
    session.run("python", "tools/pair.py")


@nox.session
def publish(session: nox.Session) -> None:
    """Render the site from a fresh run, so that its downloads carry outputs."""
    config = Path(session.create_tmp(), "config.yml")
    text = Path("_config.yml").read_text()
    fresh, changed = re.subn(
        "execute_notebooks: cache", "execute_notebooks: force", text
    )
    if changed != 1:
        session.error("_config.yml no longer says 'execute_notebooks: cache'")
    config.write_text(fresh)
    build(session, "--all", "--config", str(config))
    session.notify("pdf")


@nox.session(venv_backend="none")
def serve(session: nox.Session) -> None:
    """Show the built site at http://localhost:8000."""
    if not Path("_build/html/index.html").exists():
        session.error("there is no site yet: run nox -s book first")
    session.run(
        "python3", "-m", "http.server", "8000", "-d", "_build/html", external=True
    )


# Colab and Kaggle answer every address alike; a test compares those links instead.
# GitHub draws the anchors of its pages in the browser.
LINKCHECK = r"""
    linkcheck_retries: 3
    linkcheck_ignore: ['https://colab\.research\.google\.com/', 'https://kaggle\.com/']
    linkcheck_anchors_ignore_for_url: ['https://github\.com/']
"""


@nox.session
def links(session: nox.Session) -> None:
    """Ask for every address that the site links to; runs no chapter."""
    install_lock(session)
    text = Path("_config.yml").read_text()
    text = text.replace("execute_notebooks: cache", "execute_notebooks: 'off'")
    text = text.replace("  config:\n", f"  config:{LINKCHECK}", 1)
    folder = session.create_tmp()
    config = Path(folder, "config.yml")
    config.write_text(text)
    options = ["--config", str(config), "--path-output", folder]
    session.run("jupyter-book", "build", ".", "--builder", "linkcheck", *options)


@nox.session
def audit(session: nox.Session) -> None:
    """Look up the locked packages among the known vulnerabilities."""
    install_lock(session, "tests/requirements.lock")
    options = ["--disable-pip", "--require-hashes", "-r", "requirements.lock"]
    # Without --strict, what the service does not know passes.
    session.run("pip-audit", "--strict", *options, *session.posargs)
