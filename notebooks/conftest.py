"""Gives each chapter a compilation cache of its own, where a session asks for one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a chapter's kernel keep what it compiles in a folder with its name."""
    folder = os.environ.get("KEEP_COMPILED_IN")
    if folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder, item.path.stem))
    try:
        return (yield)
    finally:
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
