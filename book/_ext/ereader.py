"""Sphinx extension: let `nox -s pdf` build the book as an EPUB.

The theme and the extensions of the site are made for browsers. This disconnects them
if the builder is that of EPUBs.
"""

ONLY_FOR_SITES = ("pydata_sphinx_theme", "sphinx_book_theme", "sphinx_comments")
ONLY_FOR_SITES += ("sphinx_sitemap", "sphinxext", "notfound", "sphinx_copybutton")


def disconnect_site_extensions(app):
    if app.builder.name == "epub":
        for listeners in app.events.listeners.values():
            for listener in [*listeners]:
                if listener.handler.__module__.startswith(ONLY_FOR_SITES):
                    app.disconnect(listener.id)


def setup(app):
    app.connect("builder-inited", disconnect_site_extensions, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
