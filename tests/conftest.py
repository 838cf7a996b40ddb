"""The built site, served as it will be published, and a browser to read it with."""

import datetime
import json
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import yaml
from twins import ROOT

SITE = ROOT / "_build/html"
PREFIX = urlsplit(
    yaml.safe_load((ROOT / "_config.yml").read_text())["html"]["baseurl"]
).path


def pytest_addoption(parser):
    parser.addoption(
        "--record", action="store_true", help="write what was measured to book/measured"
    )


def record(name: str, numbers: dict) -> None:
    """Keep what a run found in book/measured, with its date, for the status page."""
    path = ROOT / f"book/measured/{name}.json"
    when = {"recorded": f"{datetime.date.today()}"}
    path.write_text(json.dumps(when | numbers, indent=1) + "\n")


class Published(SimpleHTTPRequestHandler):
    """Serves SITE under PREFIX, and the site's own 404 page for what is not there."""

    def translate_path(self, path):
        path = urlsplit(path).path
        inside = path.removeprefix(PREFIX) if path.startswith(PREFIX) else "/missing"
        return super().translate_path("/" + inside)

    def send_error(self, code, *_):
        page = (SITE / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_):
        pass


@contextmanager
def published():
    """Serve the built site; yields its address, which ends with a slash."""
    assert (SITE / "index.html").exists(), "there is no site: run nox -s book"
    handler = partial(Published, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
        server.shutdown()


def chromium(playwright):
    """A headless browser: the system's own, so that nothing is downloaded."""
    names = ["chromium", "chromium-browser", "google-chrome", "chrome"]
    path = next(filter(None, map(shutil.which, names)), None)
    assert path, "there is no Chromium: run apt-get install chromium, or install Chrome"
    # As root, which containers are, Chromium has no sandbox of its own.
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture(scope="session")
def site():
    with published() as address:
        yield address


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = chromium(playwright)
        yield opened
        opened.close()
