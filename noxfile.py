# /// script
# requires-python = ">=3.12"
# dependencies = ["nox[uv]>=2026.8.10"]
# ///
"""Build, test and publish the book; `uvx nox -l` lists the sessions."""

import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2026.8.10"  # older versions ignore requires-python above
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"  # reinstalling an unchanged lock is fast
nox.options.sessions = ["tests", "book"]

# Some images set it, and then every process spends seconds on recompiling its imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["UV"] = nox.virtualenv.UV  # it may be installed next to nox and not on PATH

# Eight emulated devices share few cores, so a collective may wait long for the slowest.
# Optimising the machine code of small programs takes longer than running them once, and
# wide vectors do not pay off. JAX 0.7.2 rejects unknown flags, so only sessions with
# the locked versions set these. All runs share one compilation cache.
LOCKED_ENV = {
    "XLA_FLAGS": "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    " --xla_cpu_collective_call_terminate_timeout_seconds=300"
    " --xla_backend_optimization_level=1 --xla_cpu_prefer_vector_width=128",
    "JAX_COMPILATION_CACHE_DIR": str(Path("_build/compiled").resolve()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    # A restore that Orbax rejects sometimes leaves a coroutine that is never awaited.
    "PYTHONWARNINGS": "ignore:coroutine:RuntimeWarning",
}
CHAPTERS = ["--nbmake", "--nbmake-timeout=300", "notebooks"]
TWO_AT_A_TIME = ["-n2", "--dist=worksteal"]
AT_CTRL_C = {"interrupt_timeout": 2, "terminate_timeout": 1}  # seconds to clean up
KAGGLE = ["jax==0.10.2", "jaxlib==0.10.2"]
# These need lab/requirements.lock.
LARGE = "aot", "hugging_face", "mosaic", "pytorch", "schedules"


def install_lock(session: nox.Session, *more: str) -> None:
    locks = [part for lock in ("requirements.lock", *more) for part in ("-r", lock)]
    session.install("--require-hashes", *locks)


def where_present(version: str) -> str | None:
    """Return the version if the machine has this Python, else None: use any Python."""
    python = shutil.which(f"python{version}")
    found = (
        python and not subprocess.run([python, "-V"], capture_output=True).returncode
    )
    return version if found else None


# ------------------------------------------------------------------- read the book


def run_pages(session: nox.Session, *locks: str) -> None:
    """Run the stale pages with nbmake and cache their outputs for the builder."""
    install_lock(session, *locks)
    session.run("python", "tools/pages.py", env=LOCKED_ENV, **AT_CTRL_C)


@nox.session
def book(session: nox.Session) -> None:
    """Run the stale pages and render the site into _build/html."""
    run_pages(session)
    options = ["--warningiserror", "--nitpick", "--keep-going", *session.posargs]
    session.run("jupyter-book", "build", ".", *options, env=LOCKED_ENV)
    session.run("pytest", "-q", "tests/test_site.py")


@nox.session(venv_backend="none")
def serve(session: nox.Session) -> None:
    """Serve the built site at http://localhost:8000."""
    if not Path("_build/html/index.html").exists():
        session.error("the site has not been built: run nox -s book first")
    options = ["--bind", "127.0.0.1", "-d", "_build/html"]
    session.run("python3", "-m", "http.server", "8000", *options, external=True)


@nox.session
def pdf(session: nox.Session) -> None:
    """Write the built site as one PDF and one EPUB: _build/html/parallel-jax.*."""
    install_lock(session, "tests/requirements.lock")
    session.run("python", "tools/pdf.py")
    epub = ["--builder", "custom", "--custom-builder", "epub"]
    session.run("jupyter-book", "build", ".", *epub, env=LOCKED_ENV)
    shutil.copy("_build/epub/parallel-jax.epub", "_build/html")


# ------------------------------------------------------------------- write the book


@nox.session
def pair(session: nox.Session) -> None:
    """Generate notebooks, links and shared cells from their sources."""
    install_lock(session)
    session.run("python", "tools/pair.py")


@nox.session
def lab(session: nox.Session) -> None:
    """Run the measurement `-- NAME`; with `--record`, save the result for its page."""
    more = ["lab/requirements.lock"] if {*LARGE} & {*session.posargs} else []
    install_lock(session, "tests/requirements.lock", *more)
    env = LOCKED_ENV | {"MPLBACKEND": "agg", "PYTHONPATH": "book:tools"}
    env |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # only the compiler is used
    clean_up = {"interrupt_timeout": 30, "terminate_timeout": 30}
    session.run("python", "lab", *session.posargs, env=env, **clean_up)


# -------------------------------------------------------------------- test the book


def run_chapters(session: nox.Session, *tests: str, env: dict = {}) -> None:
    """Run all chapters; with `--record`, record on which versions they pass.

    Other arguments after `--` replace the chapters and go to pytest.
    """
    args = [arg for arg in session.posargs if arg not in ("--all", "--record")]
    record = "--record" in session.posargs
    report = f"--junitxml=_build/versions/{session.name}.xml"
    args = args or [*TWO_AT_A_TIME, report, *tests]
    codes = [0, 1] if record else [0]
    session.run("pytest", *args, env=env, success_codes=codes, **AT_CTRL_C)
    if record:
        session.run("python", "lab", "versions", session.name, "--record")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the stale pages, then test the house rules, tools and programs."""
    if session.posargs:  # arguments for pytest; no page is run
        install_lock(session, "tests/requirements.lock")
    else:
        run_pages(session, "tests/requirements.lock")
    fast = ["-m", "not browser and not built and not reader and not slow", "tests"]
    args = session.posargs or [*TWO_AT_A_TIME, *fast]
    session.run("pytest", *args, env=LOCKED_ENV, **AT_CTRL_C)


@nox.session
def faults(session: nox.Session) -> None:
    """Test launch/train.py under all faults; takes half an hour."""
    install_lock(session, "tests/requirements.lock")
    session.run("pytest", "-m", "slow", *session.posargs, "tests", **AT_CTRL_C)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling, generated files, locks and workflows with pre-commit."""
    install_lock(session, "tests/requirements.lock")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")


@nox.session
def site(session: nox.Session) -> None:
    """Test the built site in Chromium, and its main functions in Firefox."""
    if shutil.which("npm") is None:
        session.error("npm is not installed: run apt-get install npm, or get Node.js")
    install_lock(session, "tests/requirements.lock")
    session.run("npm", "ci", "--prefix", "tests", "--ignore-scripts", external=True)
    args = session.posargs or ["-q", *TWO_AT_A_TIME, "tests"]
    session.run("pytest", *args, "-m", "browser")


@nox.session(python=where_present("3.13"))
def colab(session: nox.Session) -> None:
    """Run chapters offline on Colab's versions, as a reader does.

    A chapter that has not changed since it was recorded is skipped, unless `-- --all`.
    """
    session.install("-r", "tests/colab.txt", "nbmake", "pytest-xdist")
    env = {"RUNS": "1"} if session.posargs else {}  # RUNS: skip no chapter
    run_chapters(session, "tests/test_reader.py", "tests/test_script.py", env=env)


@nox.session(reuse_venv=False)  # install the newest releases again
def kaggle(session: nox.Session) -> None:
    """Run every chapter on the JAX that Kaggle has."""
    session.install("-r", "requirements.txt", *KAGGLE)
    run_chapters(session, *CHAPTERS)


@nox.session(reuse_venv=False)
def newest(session: nox.Session) -> None:
    """Run every chapter on the newest releases and pre-releases; may fail."""
    session.install("--pre", "-r", "requirements.txt")
    run_chapters(session, *CHAPTERS)


@nox.session
def twice(session: nox.Session) -> None:
    """Run every chapter twice in one kernel, the chapters in random order."""
    install_lock(session)
    session.install("pytest-randomly")
    run_chapters(session, "tests/test_reader.py", env=LOCKED_ENV | {"RUNS": "2"})


# ------------------------------------------------------------------- use the network


@nox.session
def links(session: nox.Session) -> None:
    """Check every external link of the site."""
    run_pages(session)
    linkcheck = ["--builder", "linkcheck"]
    session.run("jupyter-book", "build", ".", *linkcheck, env=LOCKED_ENV)


@nox.session
def audit(session: nox.Session) -> None:
    """Check the locked packages for known vulnerabilities."""
    install_lock(session, "tests/requirements.lock")
    options = ["--disable-pip", "--require-hashes", "-r", "requirements.lock"]
    # Without --strict, packages that the service does not know pass.
    session.run("pip-audit", "--strict", *options, *session.posargs)
