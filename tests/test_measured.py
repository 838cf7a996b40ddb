"""What a record says of itself: when, by which commit, of which text."""

import json
import re
import subprocess

import versions
import record
import nbformat
import pytest


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one committed file, in place of the book's."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "book/measured").mkdir(parents=True)
    (tmp_path / "book/measured/some.json").write_text("{}")
    (tmp_path / "tool.py").write_text("one")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    me = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    git(tmp_path, *me, "commit", "--quiet", "--message=first")
    return tmp_path


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), *words], check=True)


def test_a_record_names_its_commit(repository):
    measured.record("some", {"found": 1})
    kept = record.earlier("some")
    assert kept["found"] == 1
    assert re.fullmatch(r"[0-9a-f]{7,}", kept["commit"])
    assert re.search(r"\d+ cores, Python 3\.\d+", kept["on"])
    measured.record("some", {"found": 2})  # a record of before is no edit
    assert re.fullmatch(r"[0-9a-f]{7,}", record.earlier("some")["commit"])


def test_a_record_says_that_something_was_edited(repository):
    (repository / "tool.py").write_text("two")
    measured.record("some", {})
    assert record.earlier("some")["commit"].endswith(" and what was not committed")


def test_a_record_without_git_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.circumstances()["commit"] == "unknown"


def test_a_digest_is_of_code_alone(tmp_path):
    def digest(*cells):
        path = tmp_path / "chapter.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[*cells]), path)
        return record.code_digest(path)

    code, prose = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    first = digest(prose("Read."), code("x = 1"))
    assert first == digest(code("x = 1"), prose("Read again."))
    assert first != digest(code("x = 2"))


def test_legs_that_did_not_run_are_kept(tmp_path, monkeypatch):
    kept = tmp_path / "legs.json"
    kept.write_text(json.dumps({"next": {"jax": "1"}, "tests": {"jax": "1"}}))
    monkeypatch.setattr(versions, "KEPT", kept)
    monkeypatch.setattr(versions, "REPORTS", tmp_path)
    (tmp_path / "tests.json").write_text(json.dumps({"jax": "2"}))
    case = '<testcase classname="" name="03_devices.ipynb" time="1.23"/>'
    (tmp_path / "tests.xml").write_text(f"<testsuite>{case}</testsuite>")
    found = versions.join()
    assert found["next"] == {"jax": "1"}
    assert found["tests"] == {"jax": "2", "chapters": {"03_devices": 1.2}}
