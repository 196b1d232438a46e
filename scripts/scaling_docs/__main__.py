"""`python -m scripts.scaling_docs` writes the tables of `docs/scaling.md`; `make docs` does the same."""

from scripts.scaling_docs.page import PAGE, write_page

if __name__ == "__main__":
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
