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

nox.needs_version = (
    ">=2026.8.10"  # older ones ignore the Python version asked for above
)
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"  # each session installs its lock again, which is fast
nox.options.sessions = ["tests", "book"]

# Some images set it; then each process compiles all that it imports, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["UV"] = nox.virtualenv.UV  # it may lie beside nox and on no path

# Eight devices share few cores: a collective may wait long for the last of them. To
# optimise the machine code of small programs takes longer than to run them once, and
# wide vectors do not pay. JAX 0.7.2 stops at flags that it does not know, so only the
# locked versions get these. What one run compiled, the next need not compile again.
ONCE = {
    "XLA_FLAGS": "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    " --xla_cpu_collective_call_terminate_timeout_seconds=300"
    " --xla_backend_optimization_level=1 --xla_cpu_prefer_vector_width=128",
    "JAX_COMPILATION_CACHE_DIR": str(Path("_build/compiled").resolve()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    # A restore that Orbax refuses may leave a coroutine that nobody awaits, by chance.
    "PYTHONWARNINGS": "ignore:coroutine:RuntimeWarning",
}
CHAPTERS = ["--nbmake", "--nbmake-timeout=300", "notebooks"]
TWO_AT_A_TIME = ["-n2", "--dist=worksteal"]
AT_CTRL_C = {"interrupt_timeout": 2, "terminate_timeout": 1}  # seconds to clean up
KAGGLE = ["jax==0.10.2", "jaxlib==0.10.2"]
LARGE = "aot", "hugging_face", "mosaic", "pytorch"  # they need lab/requirements.lock


def install_lock(session: nox.Session, *more: str) -> None:
    locks = [part for lock in ("requirements.lock", *more) for part in ("-r", lock)]
    session.install("--require-hashes", *locks)


def where_present(version: str) -> str | None:
    """The Python of this version if the machine has it; otherwise any will do."""
    python = shutil.which(f"python{version}")
    found = (
        python and not subprocess.run([python, "-V"], capture_output=True).returncode
    )
    return version if found else None


# ------------------------------------------------------------------- read the book


def run_pages(session: nox.Session, *locks: str) -> None:
    """Run the stale pages by nbmake, so that the builder finds their outputs."""
    install_lock(session, *locks)
    session.run("python", "tools/pages.py", env=ONCE, **AT_CTRL_C)


@nox.session
def book(session: nox.Session) -> None:
    """Run the stale pages, and render the site into _build/html."""
    run_pages(session)
    strict = ["--warningiserror", "--nitpick", "--keep-going"]
    session.run("jupyter-book", "build", ".", *strict, *session.posargs, env=ONCE)
    session.run("pytest", "-q", "tests/test_site.py")


@nox.session(venv_backend="none")
def serve(session: nox.Session) -> None:
    """Show the built site at http://localhost:8000."""
    if not Path("_build/html/index.html").exists():
        session.error("there is no site yet: run nox -s book first")
    here = ["--bind", "127.0.0.1", "-d", "_build/html"]
    session.run("python3", "-m", "http.server", "8000", *here, external=True)


@nox.session
def pdf(session: nox.Session) -> None:
    """Print the built site as one PDF and one EPUB, _build/html/parallel-jax.*."""
    install_lock(session, "tests/requirements.lock")
    session.run("python", "tools/pdf.py")
    epub = ["--builder", "custom", "--custom-builder", "epub"]
    session.run("jupyter-book", "build", ".", *epub, env=ONCE)
    shutil.copy("_build/epub/parallel-jax.epub", "_build/html")


# ------------------------------------------------------------------- write the book


@nox.session
def pair(session: nox.Session) -> None:
    """Write what follows from the sources: notebooks, links, shared cells."""
    install_lock(session)
    session.run("python", "tools/pair.py")


@nox.session
def lab(session: nox.Session) -> None:
    """Measure what a page shows: `-- NAME`, and `--record` keeps it for the page."""
    more = ["lab/requirements.lock"] if {*LARGE} & {*session.posargs} else []
    install_lock(session, "tests/requirements.lock", *more)
    env = ONCE | {"MPLBACKEND": "agg", "PYTHONPATH": "book:tools"}
    env |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # its compiler is enough
    clean_up = {"interrupt_timeout": 30, "terminate_timeout": 30}
    session.run("python", "lab", *session.posargs, env=env, **clean_up)


# -------------------------------------------------------------------- test the book


def run_chapters(session: nox.Session, *what: str, env: dict = {}) -> None:
    """Run all chapters; with `--record`, keep on which versions they pass.

    Other words after `--` replace the chapters and go to pytest.
    """
    words = [word for word in session.posargs if word not in ("--all", "--record")]
    keep = "--record" in session.posargs
    report = f"--junitxml=_build/versions/{session.name}.xml"
    words = words or [*TWO_AT_A_TIME, report, *what]
    codes = [0, 1] if keep else [0]
    session.run("pytest", *words, env=env, success_codes=codes, **AT_CTRL_C)
    if keep:
        session.run("python", "lab", "versions", session.name, "--record")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the stale pages, and test rules, tools and programs."""
    if session.posargs:  # they go to pytest, and no page is run
        install_lock(session, "tests/requirements.lock")
    else:
        run_pages(session, "tests/requirements.lock")
    some = ["-m", "not browser and not built and not reader and not slow", "tests"]
    words = session.posargs or [*TWO_AT_A_TIME, *some]
    session.run("pytest", *words, env=ONCE, **AT_CTRL_C)


@nox.session
def faults(session: nox.Session) -> None:
    """Put launch/train.py under all faults, for half an hour: it loses nothing."""
    install_lock(session, "tests/requirements.lock")
    session.run("pytest", "-m", "slow", *session.posargs, "tests", **AT_CTRL_C)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and spelling, and that workflows fit their schema and are safe."""
    install_lock(session, "tests/requirements.lock")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")


@nox.session
def site(session: nox.Session) -> None:
    """Test the built site in Chromium, and what readers do most in Firefox."""
    if shutil.which("npm") is None:
        session.error("there is no npm: run apt-get install npm, or install Node.js")
    install_lock(session, "tests/requirements.lock")
    session.run("npm", "ci", "--prefix", "tests", "--ignore-scripts", external=True)
    words = session.posargs or ["-q", *TWO_AT_A_TIME, "tests"]
    session.run("pytest", *words, "-m", "browser")


@nox.session(python=where_present("3.13"))
def colab(session: nox.Session) -> None:
    """Run chapters on the versions that Colab has, offline, as a reader does.

    A chapter whose record is of its present text is skipped, but for `-- --all`.
    """
    session.install("-r", "tests/colab.txt", "nbmake", "pytest-xdist")
    env = {"RUNS": "1"} if session.posargs else {}  # then none is skipped
    run_chapters(session, "tests/test_reader.py", "tests/test_script.py", env=env)


@nox.session(reuse_venv=False)  # what is newest today
def kaggle(session: nox.Session) -> None:
    """Run every chapter on the JAX that Kaggle has."""
    session.install("-r", "requirements.txt", *KAGGLE)
    run_chapters(session, *CHAPTERS)


@nox.session(reuse_venv=False)
def newest(session: nox.Session) -> None:
    """Run every chapter on the newest releases, previews included; it may fail."""
    session.install("--pre", "-r", "requirements.txt")
    run_chapters(session, *CHAPTERS)


@nox.session
def twice(session: nox.Session) -> None:
    """Run every chapter twice in one kernel, the chapters in random order."""
    install_lock(session)
    session.install("pytest-randomly")
    run_chapters(session, "tests/test_reader.py", env=ONCE | {"RUNS": "2"})


# ------------------------------------------------------------------- ask the network


@nox.session
def links(session: nox.Session) -> None:
    """Ask for every address that the site links to."""
    run_pages(session)
    session.run("jupyter-book", "build", ".", "--builder", "linkcheck", env=ONCE)


@nox.session
def audit(session: nox.Session) -> None:
    """Look up the locked packages among the known vulnerabilities."""
    install_lock(session, "tests/requirements.lock")
    options = ["--disable-pip", "--require-hashes", "-r", "requirements.lock"]
    # Without --strict, what the service does not know passes.
    session.run("pip-audit", "--strict", *options, *session.posargs)
