"""Estimators against the truth in the docs: what is committed is what the stored results give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geo_sokoban_pipeline.reporting.credit import render_credit_docs

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("name", "files"), [("credit", 5), ("credit_vine", 2)])
def test_committed_page_is_what_its_results_give(name, files):
    found = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    texts = render_credit_docs(found, DOCS, name)
    assert len(texts) == files
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: `write_credit_docs` writes it"
