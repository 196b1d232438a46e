"""The format of Inspect AI's logs as a JSON schema, for tests where the package is not installed.

`inspect_schema.json` follows from the types of inspect_ai (MIT licence, UK AI Security Institute) alone; this file, run
as a script where the extra `inspect` is installed, writes it anew. Events, of which our logs have none, and words are
left out; a property that the types do not name is refused, though `read_eval_log` would ignore it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).with_suffix(".json")
PARTS = ("EvalLog", "EvalSample", "EvalSampleSummary")
_EVENTS = ("events", "events_data", "timelines")
_WORDS = ("title", "description", "default", "examples", "deprecated")


def make_schema() -> dict[str, Any]:
    """Definitions by name of the type, of all that `PARTS` need."""
    import inspect_ai
    from inspect_ai import log
    from pydantic.json_schema import models_json_schema

    _, found = models_json_schema([(getattr(log, name), "validation") for name in PARTS])
    definitions = {name: _strip(value) for name, value in found["$defs"].items()}
    for name in _EVENTS:
        definitions["EvalSample"]["properties"][name] = {"maxItems": 0}
    used: dict[str, Any] = {}
    waiting = list(PARTS)
    while waiting:
        name = waiting.pop()
        if name not in used:
            used[name] = definitions[name]
            waiting += _references(used[name])
    return {"$comment": f"inspect_ai {inspect_ai.__version__}", "$defs": dict(sorted(used.items()))}


def _strip(value: Any, named: bool = False) -> Any:
    """Without words; `named`: the keys are names of properties or of types."""
    if isinstance(value, list):
        return [_strip(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {
        key: _strip(one, key in ("properties", "$defs", "mapping"))
        for key, one in value.items()
        if named or key not in _WORDS
    }
    if not named and "properties" in kept:
        kept.setdefault("additionalProperties", False)
    return kept


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for one in value for name in _references(one)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"].rpartition("/")[2]] if isinstance(value.get("$ref"), str) else []
    return own + [name for one in value.values() for name in _references(one)]


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(make_schema(), separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
