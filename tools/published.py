"""The built site, served as it will be published, and browsers to read it with."""

import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import yaml
from pair import ROOT

SITE = ROOT / "_build/html"
PREFIX = urlsplit(
    yaml.safe_load((ROOT / "_config.yml").read_text())["html"]["baseurl"]
).path


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


def installed(*names):
    """The path of the first of these programs that the system has, or None."""
    return next(filter(None, map(shutil.which, names)), None)


def chromium(playwright):
    """A headless browser: the system's own, so that nothing is downloaded."""
    path = installed("chromium", "chromium-browser", "google-chrome", "chrome")
    assert path, "there is no Chromium: run apt-get install chromium, or install Chrome"
    # As root, which containers are, Chromium has no sandbox of its own.
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


class Firefox:
    """The system's own Firefox, headless. What Playwright cannot ask of a single page
    of it, one more Firefox is started with."""

    def __init__(self, playwright):
        self.path = installed("firefox-esr", "firefox")
        assert self.path, (
            "there is no Firefox: run apt-get install firefox-esr, or install Firefox"
        )
        self.playwright, self.started = playwright, {}

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
            self.started[key] = self.playwright.firefox.launch(
                channel="moz-firefox",  # over WebDriver BiDi, which needs no patches
                executable_path=self.path,
                firefox_user_prefs=preferences,
            )
        return self.started[key].new_context(**options)

    def close(self):
        for browser in self.started.values():
            browser.close()
