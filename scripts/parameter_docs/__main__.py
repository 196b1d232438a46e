"""`python -m scripts.parameter_docs` writes `docs/parameters.md` and its pages; `make docs` does the same."""

from scripts.parameter_docs.page import ROOT, write_pages

if __name__ == "__main__":
    for name, text in write_pages().items():
        path = ROOT / "docs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
