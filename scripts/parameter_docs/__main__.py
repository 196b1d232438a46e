"""`python -m scripts.parameter_docs` writes `docs/parameters.md`; `make docs` does the same."""

from scripts.parameter_docs.page import ROOT, write_page

if __name__ == "__main__":
    (ROOT / "docs" / "parameters.md").write_text(write_page(), encoding="utf-8")
