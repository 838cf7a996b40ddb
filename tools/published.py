"""Serve the built site under its published path, and start browsers to test it."""

import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import yaml
from pair import ROOT

SITE = ROOT / "_build/html"
PREFIX = urlsplit(
    yaml.safe_load((ROOT / "_config.yml").read_text())["html"]["baseurl"]
).path
CHROMIUM = ["chromium", "chromium-browser", "google-chrome", "chrome"]


def contents() -> list[tuple[str, str]]:
    """Return (caption of the part, name) of each page, in reading order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    pages = [("", toc["root"])]
    for part in toc["parts"]:
        pages += [(part["caption"], page["file"]) for page in part["chapters"]]
    return pages


class Quiet(SimpleHTTPRequestHandler):
    """Serve a folder without logging, with the site's 404 page for missing files."""

    def log_message(self, *_):
        pass


@contextmanager
def published():
    """Serve the built site; yield its address, which ends with a slash."""
    assert (SITE / "index.html").exists(), "the site is not built: run nox -s book"
    Quiet.error_message_format = (SITE / "404.html").read_text().replace("%", "%%")
    with TemporaryDirectory() as folder:
        Path(folder, PREFIX.strip("/")).symlink_to(SITE)
        handler = partial(Quiet, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
            server.shutdown()


def program(*names: str) -> str:
    """Return the path of the first of these programs that is installed."""
    paths = [path for path in map(shutil.which, names) if path]
    assert paths, f"{names[0]} is not installed: run apt-get install {names[0]}"
    return paths[0]


def chromium(playwright):
    """Start headless Chromium or Chrome."""
    return playwright.chromium.launch(
        executable_path=program(*CHROMIUM),
        args=["--no-sandbox"],  # the sandbox does not work as root, as in containers
    )


def firefox(playwright):
    """Start headless Firefox over WebDriver BiDi, which ignores emulated settings of a
    context: disabled scripts, dark mode, reduced motion."""
    return playwright.firefox.launch(
        channel="moz-firefox", executable_path=program("firefox-esr", "firefox")
    )
