"""Let the book be built as an EPUB, too: by `nox -s pdf`.

A Sphinx extension. The theme and what serves a site are made for pages in a browser:
where the builder is that of EPUBs, they are left out.
"""

ONLY_FOR_SITES = ("pydata_sphinx_theme", "sphinx_book_theme", "sphinx_comments")
ONLY_FOR_SITES += ("sphinx_sitemap", "sphinxext", "notfound", "sphinx_copybutton")


def leave_out_the_site(app):
    if app.builder.name == "epub":
        for listeners in app.events.listeners.values():
            for listener in [*listeners]:
                if listener.handler.__module__.startswith(ONLY_FOR_SITES):
                    app.disconnect(listener.id)


def setup(app):
    app.connect("builder-inited", leave_out_the_site, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
