"""The built site, served as it will be published, and browsers to read it with."""

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
    """The pages in reading order: the part's caption, and the path without suffix."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    pages = [("", toc["root"])]
    for part in toc["parts"]:
        pages += [(part["caption"], page["file"]) for page in part["chapters"]]
    return pages


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and the site's own 404 page for what is not there."""

    def log_message(self, *_):
        pass


@contextmanager
def published():
    """Serve the built site; yields its address, which ends with a slash."""
    assert (SITE / "index.html").exists(), "there is no site: run nox -s book"
    Quiet.error_message_format = (SITE / "404.html").read_text().replace("%", "%%")
    with TemporaryDirectory() as folder:
        Path(folder, PREFIX.strip("/")).symlink_to(SITE)
        handler = partial(Quiet, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
            server.shutdown()


def program(*names: str) -> str:
    """The path of the first of these programs that the system has: none is fetched."""
    paths = [path for path in map(shutil.which, names) if path]
    assert paths, f"there is no {names[0]}: run apt-get install {names[0]}"
    return paths[0]


def chromium(playwright):
    """A headless Chromium, or Chrome."""
    return playwright.chromium.launch(
        executable_path=program(*CHROMIUM),
        args=["--no-sandbox"],  # as root, which containers are, it has none of its own
    )


class Firefox:
    """A headless Firefox. What Playwright cannot ask of a single page of it, one more
    Firefox is started with."""

    def __init__(self, playwright):
        self.firefox, self.started = playwright.firefox, {}

    def new_context(
        self,
        java_script_enabled=True,
        color_scheme="light",
        reduced_motion="",
        **options,
    ):
        is_light = color_scheme != "dark"
        preferences = {
            "javascript.enabled": java_script_enabled,
            "layout.css.prefers-color-scheme.content-override": int(is_light),
            "ui.prefersReducedMotion": int(reduced_motion == "reduce"),
        }
        key = str(preferences)
        if key not in self.started:
            self.started[key] = self.firefox.launch(
                channel="moz-firefox",  # over WebDriver BiDi, which needs no patches
                executable_path=program("firefox-esr", "firefox"),
                firefox_user_prefs=preferences,
            )
        return self.started[key].new_context(**options)

    def close(self):
        for browser in self.started.values():
            browser.close()
