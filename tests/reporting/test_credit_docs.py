"""Estimators against the truth in the docs: what is committed is what the stored results give."""

from __future__ import annotations

import json
from pathlib import Path

from geo_sokoban_pipeline.reporting.credit import render_credit_docs

DOCS = Path(__file__).parents[2] / "docs"


def test_committed_page_is_what_its_results_give():
    found = json.loads((DOCS / "results" / "credit.json").read_text(encoding="utf-8"))
    texts = render_credit_docs(found, DOCS)
    assert len(texts) == 5
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: `write_credit_docs` writes it"
