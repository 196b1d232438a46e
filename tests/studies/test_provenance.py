"""What a record says of program and machine."""

from __future__ import annotations

import subprocess

import pytest

from geo_sokoban_pipeline.studies.provenance import describe_maker, find_commit, find_processor


def git(folder, *words):
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *author, *words], check=True, capture_output=True, text=True
    ).stdout


def test_a_changed_program_is_not_its_commit(tmp_path):
    assert find_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert find_commit(tmp_path) is None
    source = tmp_path / "src" / "a.py"
    source.parent.mkdir()
    source.write_text("a = 1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit.startswith(str(find_commit(tmp_path))) and len(str(find_commit(tmp_path))) == 12
    (tmp_path / "README.md").write_text("no program")
    assert find_commit(tmp_path) == commit[:12]
    source.write_text("a = 2")
    assert find_commit(tmp_path) == f"{commit[:12]}+"
    # A folder within somebody else's checkout is not that checkout.
    assert find_commit(source.parent) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\nmodel name\t: other\n", "Some CPU @ 2 GHz"),
        ("processor\t: 0\nBogoMIPS\t: 50\n", None),
        ("model name\t:\n", None),
        (None, None),
    ],
)
def test_name_of_the_processor(tmp_path, text, name):
    table = tmp_path / "cpuinfo"
    if text is not None:
        table.write_text(text)
    assert find_processor(table) == name


def test_maker(tmp_path):
    maker = describe_maker(tmp_path)
    assert maker["commit"] is None
    assert {"version", "python", "torch", "transformers", "processor", "machine", "cores"} < set(maker)
