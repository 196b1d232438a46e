"""`python -m scripts.reading_list` writes the lists of modules in `docs/architecture.md`; `make docs` does the same."""

from scripts.reading_list.page import PAGE, trace_lists, write_page

if __name__ == "__main__":
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8"), trace_lists()), encoding="utf-8")
