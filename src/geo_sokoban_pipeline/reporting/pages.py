"""Pages from templates: everything in them is escaped, and numbers are written by the filters of `formats`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from geo_sokoban_pipeline import formats

_FORMATS = (
    *("count", "duration", "leaves", "number", "p_value", "percent"),
    *("percent_range", "plural", "points", "shorten", "signed", "write_rate"),
)


def render_page(template: str, **facts: Any) -> str:
    """A page with the package's style sheet and its one script; the content security policy allows it by its hash."""
    script = read_asset("report.js")
    return (
        make_environment()
        .get_template(template)
        .render(
            **facts,
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=Markup("\n".join(read_asset(name) for name in ("parts.css", "report.css"))),
        )
    )


def read_asset(name: str) -> str:
    """Text of a file that lies beside this module."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def make_environment() -> Environment:
    """Templates of this package, everything escaped, with the formats as filters."""
    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(read_asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formats, name) for name in _FORMATS}
    environment.filters |= {"data": as_script_data, "json": write_json, "unbroken": keep_intervals}
    return environment


def as_script_data(value: Any) -> Markup:
    """JSON for a script element; `<`, `>` and `&` are escaped, so that no text in it can close the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def write_json(value: Any) -> str:
    """JSON for readers."""
    return json.dumps(value, ensure_ascii=False, default=str)


def keep_intervals(text: str) -> Markup:
    """Escaped text without line breaks inside its [bracketed] intervals."""
    return Markup(re.sub(r"\[[^\[\]]*\]", r'<span class="nb">\g<0></span>', str(escape(text))))
