"""`python -m scripts.scaling_docs` writes the tables of `docs/scaling.md` and `docs/full_size.md`; `make docs`, too."""

from scripts.scaling_docs.page import PAGE, PRESETS_PAGE, write_page, write_presets

if __name__ == "__main__":
    for path, write in ((PAGE, write_page), (PRESETS_PAGE, write_presets)):
        path.write_text(write(path.read_text(encoding="utf-8")), encoding="utf-8")
