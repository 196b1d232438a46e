"""The report of a run: one HTML page that needs nothing but itself.

The page fetches nothing and runs no script but its own, which its content security policy enforces by hash; every text
that a model or a file supplied is escaped. What a run did not record is shown as a dash or left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from geo_sokoban_pipeline.reporting import curves, evaluation_tables, formats, tables
from geo_sokoban_pipeline.reporting.episodes import describe_end, is_solved
from geo_sokoban_pipeline.reporting.headline import write_headline
from geo_sokoban_pipeline.reporting.labels import policy_label
from geo_sokoban_pipeline.reporting.players import PlayerData, shorten
from geo_sokoban_pipeline.reporting.run_worlds import RunWorld, run_world
from geo_sokoban_pipeline.reporting.selection import Extremes, LevelPair, choose_extremes, choose_gallery
from geo_sokoban_pipeline.reporting.tokens import TokenTexts, token_turns
from geo_sokoban_pipeline.trajectories import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa
    from jinja2 import Environment


@dataclass(frozen=True)
class ReportInputs:
    """What a report is made of; lists and mappings may be empty.

    Attributes:
        task: task name. run: namespace, such as `train_sokoban`. run_id: folder of the run.
        metrics: one row per iteration.
        summary: evaluation summary; `policies` names them in the order of the parts of `played`.
        warm_start: rows `step`, `loss`, `validation_loss` (nats per reply token), `seconds`.
        played: held-out episodes, partition `iter=<number of the policy>/part-…`.
        trained: training episodes by partition; only the newest are read.
        data_report: what the data holds; None leaves the section out.
        parameters: nested, by section. versions: by package.
        token_texts: text of token ids, see `tokens.read_token_texts`; None: the page shows ids.
    """

    task: str
    run: str
    run_id: str
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    warm_start: list[dict[str, Any]]
    played: Mapping[str, Callable[[], pa.Table]]
    trained: Mapping[str, Callable[[], pa.Table]]
    data_report: dict[str, Any] | None
    parameters: dict[str, Any]
    versions: dict[str, str]
    token_texts: TokenTexts | None = None


def build_report(inputs: ReportInputs) -> str:
    """The page, HTML5 as text, to be stored as UTF-8."""
    players, world = PlayerData(), run_world(inputs.task)
    names = [str(name) for name in inputs.summary.get("policies") or []]
    pairs = choose_gallery(inputs.played, len(names)) if names else []
    first = pairs[0].after if pairs else None
    gallery = [_card(pair, names, players, world) for pair in pairs]
    context = {
        "inputs": inputs,
        "headline": write_headline(inputs.summary),
        "world": world,
        "words": world.words,
        "charts": _charts(inputs, world),
        "health": curves.health_charts(inputs.metrics),
        "evaluation": evaluation_tables.evaluation_rows(inputs.summary),
        "columns": evaluation_tables.evaluation_columns(inputs.summary),
        "replies": evaluation_tables.reply_table(inputs.summary),
        "kinds": evaluation_tables.kind_tables(inputs.summary),
        "facts": curves.run_facts(inputs.metrics, inputs.warm_start),
        "gallery": gallery,
        "prompt": [turn.text for turn in first.turns if turn.role != "assistant"][:2] if first else [],
        "extremes": _extremes(inputs, players),
        "timings": tables.timings(inputs.metrics),
        "data": tables.data_table(inputs.data_report, world.world),
        "parameters": tables.parameter_tables(inputs.parameters),
        "players": {"pictures": players.pictures, "episodes": players.episodes},
    }
    script = read_asset("report.js")
    page: str = (
        make_environment()
        .get_template("report.html.j2")
        .render(
            **context,
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=Markup("\n".join(read_asset(name) for name in ("parts.css", "report.css"))),
        )
    )
    return page


def read_asset(name: str) -> str:
    """Text of a file that lies beside this module."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def make_environment() -> Environment:
    """Templates of this package, everything escaped, with the formats as filters."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(read_asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("count", "duration", "number", "percent", "signed", "significant"):
        environment.filters[name] = getattr(formats, name)
    environment.filters["data"] = as_script_data
    environment.filters["unbroken"] = keep_intervals
    return environment


def as_script_data(value: Any) -> Markup:
    """JSON that no text inside can end: `<`, `>` and `&` are written as escapes."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def keep_intervals(text: str) -> Markup:
    """Escaped text whose [bracketed] intervals are never broken over two lines."""
    return Markup(re.sub(r"\[[^\[\]]*\]", r'<span class="nb">\g<0></span>', str(escape(text))))


def _charts(inputs: ReportInputs, world: RunWorld) -> dict[str, Any]:
    return {
        "success": curves.success_chart(inputs.metrics, world.words),
        "reward": curves.reward_chart(inputs.metrics),
        "lengths": evaluation_tables.length_chart(inputs.summary),
        "warm_start": curves.warm_start_chart(inputs.warm_start),
    }


def _card(pair: LevelPair, names: list[str], players: PlayerData, world: RunWorld) -> dict[str, Any]:
    takes = [(policy_label(names[-1], world.world), pair.after)]
    if pair.before is not None:
        takes.append((policy_label(names[0], world.world), pair.before))
    number, kind = f"{world.words.unit} {pair.after.group_index}", pair.length
    if isinstance(kind, int):
        title = f"{kind} {'move' if kind == 1 else 'moves'} at best"
    else:
        title = number[:1].upper() + number[1:] if kind is None else evaluation_tables.write_kind(kind)
    return {
        "title": title,
        "subtitle": "" if kind is None else number,
        "solved": is_solved(pair.after),
        "takes": [
            {"label": label, "episode": players.add(take), "solved": is_solved(take), "end": describe_end(take)}
            for label, take in takes
        ],
    }


def _extremes(inputs: ReportInputs, players: PlayerData) -> dict[str, Any] | None:
    found = choose_extremes(inputs.trained)
    if found is None:
        return None
    return {
        "iteration": found.iteration,
        "groups": [
            (name, [_describe(trajectory, found, inputs.token_texts, players) for trajectory in chosen])
            for name, chosen in (("Best", found.best), ("Worst", found.worst))
        ],
    }


def _describe(trajectory: Trajectory, found: Extremes, texts: TokenTexts | None, players: PlayerData) -> dict[str, Any]:
    return {
        "trajectory": trajectory,
        "episode": players.add(trajectory),
        "end": describe_end(trajectory),
        "solved": is_solved(trajectory),
        "replies": [(turn, shorten(turn.text, 400)) for turn in trajectory.turns if turn.role == "assistant"],
        "turns": token_turns(trajectory, found.image_pad_id, texts),
        "tokens": len(trajectory.token_ids),
        "trained_tokens": int(trajectory.loss_mask.sum()),
    }
