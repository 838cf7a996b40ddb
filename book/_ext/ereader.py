"""Disconnect the theme when the book is built as an EPUB, by `nox -s pdf`.

A Sphinx extension. The theme and some other extensions assume pages in a browser.
"""

from itertools import chain

ONLY_FOR_SITES = ("pydata_sphinx_theme", "sphinx_book_theme", "sphinxext", "notfound")


def disconnect_theme(app):
    if app.builder.name == "epub":
        for listener in list(chain(*app.events.listeners.values())):
            if listener.handler.__module__.startswith(ONLY_FOR_SITES):
                app.disconnect(listener.id)


def setup(app):
    app.connect("builder-inited", disconnect_theme, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
