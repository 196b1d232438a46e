"""The report of a run: one self-contained HTML page, from headline to settings.

A paired test over the same prompts decides whether a gain is real; without their episodes the intervals decide. Both
are over clusters of prompts (`Task.cluster_of`). The difference of two rates alone never decides. The same inputs
always give the same page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup, escape

from geo_sokoban_pipeline import formats
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.report import TaskReport
from geo_sokoban_pipeline.evaluation.metrics import PairedTest, paired_test
from geo_sokoban_pipeline.formats import (
    START,
    Row,
    count,
    describe_policy,
    duration,
    find_baseline,
    find_row,
    find_stale,
    p_value,
    percent,
    percent_range,
    plural,
    points,
    write_rate,
)
from geo_sokoban_pipeline.reporting import curves, report_tables
from geo_sokoban_pipeline.reporting.episodes import (
    PlayerData,
    TokenTexts,
    credit_turns,
    describe_end,
    is_solved,
    shorten,
    token_turns,
    turn_reward,
)
from geo_sokoban_pipeline.reporting.training_episodes import (
    Extremes,
    Parts,
    PromptPair,
    TrainingEpisodes,
    choose_extremes,
    choose_gallery,
    follow_prompts,
    read_successes,
    summarise_training,
    tag_shares,
)
from geo_sokoban_pipeline.runs.provenance import RunTime, suggest_command, summarise_commands
from geo_sokoban_pipeline.tasks import TASKS, task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa
    from jinja2 import Environment


@dataclass(frozen=True)
class Tile:
    """One big number: its name, the number, what stands below it, the class of its colour."""

    name: str
    value: str
    detail: str
    colour: str


@dataclass(frozen=True)
class Headline:
    """Main sentence, further sentences, tiles."""

    main: str
    further: list[str]
    tiles: list[Tile]


def write_headline(summary: Mapping[str, Any], change: PairedTest | None = None, stored: int = 0) -> Headline:
    """Headline of an evaluation summary, in which policies, baselines or everything may be missing.

    Args:
        change: paired test of the last policy against the first one; None: only their intervals are known.
        stored: iterations of the run; 0: not known. An evaluation of an earlier checkpoint is called one.
    """
    task = task_or_plain(summary.get("task"))
    names = [str(name) for name in summary.get("policies") or []]
    last = find_row(summary, names[-1], "sampled") if names else None
    if last is None:
        return Headline("No evaluation is stored for this run.", [], [])
    first = find_row(summary, names[0], "sampled") if len(names) > 1 else None
    where = task.report.evaluated_on(summary)
    main = _say_what_happened(task, names, first, last, f"{where}," if "," in where else where, change)
    if stale := find_stale(summary, stored):
        main += f" The evaluation is of {stale}."
    further = [*_compare(first, last, change, task), *_greedy(summary, names), *task.report.compare(summary, names)]
    if summary.get("better"):
        further.append(str(summary["better"]))
    others = [find_baseline(summary, name) for name in task.report.tiles]
    return Headline(main, further, [_tile(row, task.report) for row in (first, last, *others) if row])


def write_progress(done: int, total: int | None) -> Headline:
    """Headline of a training that goes on.

    Args:
        done: committed iterations.
        total: iterations of the whole training; None: not known.
    """
    shown = plural(done, "iteration") if total is None else f"{count(done)} of {plural(total, 'iteration')}"
    main = f"The training goes on: {shown} {'is' if done == 1 else 'are'} stored."
    return Headline(main, ["The policies are evaluated at its end; this page shows what is stored until now."], [])


def _say_what_happened(
    task: Task, names: list[str], first: Row | None, last: Row, where: str, change: PairedTest | None
) -> str:
    if first is None:
        return f"On {where} {task.report.label(names[-1])} {task.report.solves} {write_rate(last)}."
    rate, start = task.words.rate, "before GRPO" if names[0] == START else "after the warm start"
    if not _has_changed(first, last, change):
        rates = f"{write_rate(first)} {start}, {write_rate(last)} after GRPO"
        return f"On {where} GRPO made no significant change to the {rate}: {rates}."
    verb = "raised" if last["solve_rate"] > first["solve_rate"] else "lowered"
    return f"On {where} GRPO {verb} the {rate} from {write_rate(first)} {start} to {write_rate(last)}."


def _has_changed(first: Row, last: Row, change: PairedTest | None) -> bool:
    return change.is_change if change is not None else _are_apart(first, last)


def _are_apart(first: Row, last: Row) -> bool:
    low, high = last.get("low"), last.get("high")
    apart: bool = (low is not None and low > first.get("high", 1.0)) or (
        high is not None and high < first.get("low", 0.0)
    )
    return apart


def _compare(first: Row | None, last: Row, change: PairedTest | None, task: Task) -> list[str]:
    if first is None:
        return []
    if change is not None:
        test = f"{points(change.difference, change.low, change.high)}: {count(change.gained)} gained"
        counts = f"{count(change.lost)} lost ({name_test(change)}, {p_value(change.p_value)})"
        return [f"Over the same {name_shared(change, task)}, the difference is {test}, {counts}."]
    if first.get("high") is None or last.get("low") is None:
        return []
    if _are_apart(first, last):
        return ["The two intervals (95 %) do not overlap, so chance in these episodes is no explanation."]
    return ["The two intervals (95 %) overlap, so this evaluation does not prove a change."]


def name_shared(change: PairedTest, task: Task) -> str:
    """The prompts of a paired test, such as `640 levels of 57 wall layouts`."""
    prompts = plural(change.prompts, task.words.unit, task.words.units)
    return task.report.name_clusters(prompts, change.prompts, change.clusters) if is_clustered(change) else prompts


def is_clustered(change: PairedTest) -> bool:
    """Whether several prompts of a test are one piece of evidence."""
    return change.clusters < change.prompts


def name_test(change: PairedTest) -> str:
    """McNemar's test, and whether its evidence are clusters of several pairs."""
    return "McNemar's test over clusters" if is_clustered(change) else "McNemar's test"


def _greedy(summary: Mapping[str, Any], names: list[str]) -> list[str]:
    rows = [find_row(summary, name, "greedy") for name in dict.fromkeys((names[0], names[-1]))]
    rates = [percent(row["solve_rate"]) for row in rows if row]
    if not rates:
        return []
    before = f" (was {rates[0]})" if len(rates) > 1 else ""
    return [f"Greedy decoding: {rates[-1]}{before}."]


def _tile(row: Row, report: TaskReport) -> Tile:
    name = report.label(row["policy"]) + (", sampled" if row.get("mode") == "sampled" else "")
    detail = (
        f"{percent_range(row.get('low'), row.get('high'))} · {count(row.get('solved'))} of {count(row.get('episodes'))}"
    )
    return Tile(name, percent(row["solve_rate"]), detail, report.colour(row["policy"]))


# The page.


@dataclass(frozen=True)
class ReportInputs:
    """Inputs of a report; lists and mappings may be empty.

    Attributes:
        task: task name.
        run: namespace, such as `train_sokoban`.
        run_id: folder of the run.
        metrics: one row per iteration.
        commands: entries of the run's commands, see `runs/provenance.py`.
        index: of the run's episodes, see `trajectories/index.py`; None leaves the chart of tags out.
        validations: episodes of the validations, partition `iter=<policy version>/part-…`.
        summary: evaluation summary; `policies` names them in the order of the parts of `held_out`.
        warm_start: rows `step`, `loss`, `validation_loss` (nats per response token), `seconds`.
        held_out: held-out episodes, partition `iter=<number of the policy>/part-…`.
        trained: training episodes by partition; only of the newest are tokens read.
        data_report: counts of the data; None leaves the section out.
        parameters: nested, by section.
        versions: by package.
        audit: of the end of the training, a sample; None: none was made.
        whole_audit: of the pipeline `audit_<task>`; None: none was made.
        site: address of the folder of a site that shows the run, relative to the page; None: there is none.
        progress: while the training goes on, its committed iterations, and those of the whole training where they are
            known; else None.
        token_texts: text of token ids, see `episodes.read_token_texts`; None: the page shows ids.
    """

    task: str
    run: str
    run_id: str
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    warm_start: list[dict[str, Any]]
    held_out: Mapping[str, Callable[..., pa.Table]]
    trained: Mapping[str, Callable[..., pa.Table]]
    data_report: dict[str, Any] | None
    parameters: dict[str, Any]
    versions: dict[str, str]
    token_texts: TokenTexts | None = None
    validations: Mapping[str, Callable[..., pa.Table]] = field(default_factory=dict)
    commands: Sequence[dict[str, Any]] = ()
    index: pa.Table | None = None
    audit: Mapping[str, Any] | None = None
    whole_audit: Mapping[str, Any] | None = None
    site: str | None = None
    progress: tuple[int, int | None] | None = None

    @property
    def stored(self) -> int:
        """Iterations of the run; 0: not known."""
        return max((row.get("iteration", -1) for row in self.metrics), default=-1) + 1

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the run's training section; empty if they are not known."""
        found: Mapping[str, Any] = self.parameters.get(f"train_{self.task}") or {}
        return found

    def browse(self, page: str, trajectory_id: str) -> str | None:
        """Address of a page of the site on an episode, such as `episode` or `group`; None without a site."""
        if self.site is None:
            return None
        return f"{self.site}/index.html#/{page}?run={self.run}/{self.run_id}&id={quote(trajectory_id)}"

    def option(self, section: str, name: str) -> Any:
        """One option of the training, such as `grpo`, `credit`; None if it is not known."""
        return (self.options.get(section) or {}).get(name)


def build_report(inputs: ReportInputs) -> str:
    """The page, HTML5 as text, to be stored as UTF-8."""
    players, task = PlayerData(), task_or_plain(inputs.task)
    summary = inputs.summary
    names = [str(name) for name in summary.get("policies") or []]
    pairs = [_credit_pair(pair, inputs, task) for pair in choose_gallery(inputs.held_out, len(names))] if names else []
    first = pairs[0].after if pairs else None
    gallery = [_card(pair, names, players, inputs) for pair in pairs]
    change = None
    if len(names) > 1:
        change = compare_policies(inputs.held_out, 0, inputs.held_out, len(names) - 1, summary.get("cluster_of"))
    episodes = summarise_training(inputs.trained)
    time = summarise_commands(inputs.commands)
    context = {
        "inputs": inputs,
        "title": _title(inputs),
        "made": [*provenance_line(time), *describe_evaluated(summary)],
        "time": time,
        "headline": write_headline(summary, change, inputs.stored)
        if inputs.progress is None
        else write_progress(*inputs.progress),
        "chosen": task.report.chosen,
        "words": task.words,
        "charts": _charts(inputs, summary, episodes, task),
        "health": curves.health_charts(_join(inputs.metrics, episodes.rows), task.report.curves),
        "evaluation": report_tables.evaluation_rows(summary),
        "columns": report_tables.evaluation_columns(summary),
        "notes": report_tables.notes_of(summary),
        "responses": report_tables.response_table(summary),
        "kinds": report_tables.kind_tables(summary),
        "facts": curves.run_facts(inputs.metrics, inputs.warm_start, time.seconds if time else None),
        "validations": follow_prompts(inputs.validations),
        "gallery": gallery,
        "prompt": [turn.text for turn in first.turns if turn.role != "assistant"][:2] if first else [],
        "extremes": _extremes(inputs, players),
        "timings": report_tables.timings(inputs.metrics),
        "data": report_tables.data_table(inputs.data_report, task),
        "audits": report_tables.audit_tables(
            inputs.whole_audit, inputs.audit, len(inputs.metrics), partial(inputs.browse, "episode")
        ),
        "audit_command": suggest_command(f"audit_{inputs.task}", inputs.run_id),
        "parameters": report_tables.parameter_tables(inputs.parameters),
        "players": {"images": players.images, "episodes": players.episodes},
    }
    return render_page("report.html.j2", context)


def render_page(template: str, context: Mapping[str, Any]) -> str:
    """A page with the package's style sheet and its one script; the content security policy allows it by its hash."""
    script = read_asset("report.js")
    page: str = (
        make_environment()
        .get_template(template)
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
    for name in ("count", "duration", "number", "percent", "plural", "signed", "significant"):
        environment.filters[name] = getattr(formats, name)
    environment.filters["data"] = as_script_data
    environment.filters["unbroken"] = keep_intervals
    return environment


def as_script_data(value: Any) -> Markup:
    """JSON for a script element; `<`, `>` and `&` are escaped, so that no text in it can close the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def keep_intervals(text: str) -> Markup:
    """Escaped text without line breaks inside its [bracketed] intervals."""
    return Markup(re.sub(r"\[[^\[\]]*\]", r'<span class="nb">\g<0></span>', str(escape(text))))


def compare_policies(
    first: Parts, number: int, second: Parts, other: int, clusters: Mapping[str, str] | None = None
) -> PairedTest | None:
    """Paired test over the prompts of which two policies have sampled episodes; None if they share none.

    Args:
        first, second: parts `iter=<number of the policy>/…`.
        number, other: of the policies.
        clusters: `cluster_of` of their summaries.
    """
    return paired_test(read_successes(first, number), read_successes(second, other), clusters)


def describe_evaluated(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Evaluated data, held-out prompts and policies as (name, value); unknown ones are left out."""
    task, prompts = task_or_plain(summary.get("task")), summary.get("prompts_hash")
    policies = [(task.report.label(name), describe_policy(summary, name)) for name in summary.get("checkpoints") or ()]
    data = [("data", summary.get("data_id")), (f"held-out {task.words.units}", prompts and f"content {prompts[:12]}")]
    return [(name, value) for name, value in (*data, *policies) if value]


def provenance_line(time: RunTime | None) -> list[tuple[str, str]]:
    """Date, time, commit, machine and command of a run as (name, value); unknown ones are left out."""
    if time is None:
        return []
    last = time.last
    cores = plural(last["cores"], "core") if last.get("cores") else ""
    machine = ", ".join(str(part) for part in (last.get("processor") or last.get("machine"), cores) if part)
    commands = f" in {plural(time.commands, 'command')}" if time.commands > 1 else ""
    return [
        (name, str(value))
        for name, value in (
            ("date", f"{time.started:%Y-%m-%d %H:%M}"),
            ("total time", f"{duration(time.seconds)}{commands}"),
            ("commit", last.get("commit")),
            ("machine", machine),
            ("command", last.get("command")),
        )
        if value
    ]


def _title(inputs: ReportInputs) -> str:
    """Title of the page: the task, or the file or module of an environment of one's own."""
    known = TASKS.get(inputs.task)
    factory = inputs.option("env", "factory")
    if known is None or factory is None or factory == known.train_config.model_validate({}).env.factory:
        return inputs.task
    return f"own task {Path(str(factory).split(':')[0]).name}"


def _credit_pair(pair: PromptPair, inputs: ReportInputs, task: Task) -> PromptPair:
    """Episodes of an evaluation with the rewards that their turns would have had in training."""
    if inputs.option("grpo", "credit") != "turn":
        return pair
    args = inputs.option("reward", "args") or {}
    after, before = (one and credit_turns(one, task, args) for one in (pair.after, pair.before))
    return replace(pair, after=after or pair.after, before=before or pair.before)


def _join(metrics: list[dict[str, Any]], episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics, joined with the numbers of their iteration's episodes."""
    found = {row["iteration"]: row for row in episodes}
    return [{**found.get(row.get("iteration"), {}), **row} for row in metrics]


def _charts(inputs: ReportInputs, summary: dict[str, Any], episodes: TrainingEpisodes, task: Task) -> dict[str, Any]:
    parts = task.report.reward_parts(episodes.parts, inputs.option("reward", "args") or {})
    return {
        "success": curves.success_chart(inputs.metrics, task.words, str(inputs.option("prompts", "order"))),
        "reward": curves.reward_chart(inputs.metrics),
        "kinds": curves.kind_chart(episodes.kinds, task.words, task.report.difficulty),
        "parts": curves.parts_chart(episodes.rows, parts),
        "tags": None if inputs.index is None else curves.tags_chart(tag_shares(inputs.index)),
        "responses": curves.length_chart(inputs.metrics),
        "lengths": report_tables.difficulty_chart(summary),
        "warm_start": curves.warm_start_chart(inputs.warm_start),
    }


def _card(pair: PromptPair, names: list[str], players: PlayerData, inputs: ReportInputs) -> dict[str, Any]:
    task = task_or_plain(inputs.task)
    takes = [(task.report.label(names[-1]), pair.after)]
    if pair.before is not None:
        takes.append((task.report.label(names[0]), pair.before))
    number = f"{task.words.unit} {pair.after.group_index}"
    title = number if pair.kind is None else task.report.name_kind(pair.kind)
    return {
        "title": title[:1].upper() + title[1:],
        "subtitle": "" if pair.kind is None else number,
        "solved": is_solved(pair.after),
        "takes": [
            {
                "label": label,
                "episode": players.add(take),
                "solved": is_solved(take),
                "end": describe_end(take),
                "page": inputs.browse("episode", take.trajectory_id),
            }
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
            (name, [_describe(trajectory, found, inputs, players) for trajectory in chosen])
            for name, chosen in (("Best", found.best), ("Worst", found.worst))
        ],
    }


def _describe(trajectory: Trajectory, found: Extremes, inputs: ReportInputs, players: PlayerData) -> dict[str, Any]:
    page = inputs.browse("episode", trajectory.trajectory_id)
    return {
        "page": page,
        "group": inputs.browse("group", trajectory.trajectory_id),
        "trajectory": trajectory,
        "mean": found.means.get(trajectory.trajectory_id),
        "per_turn": any(turn.advantage is not None for turn in trajectory.turns),
        "credited": any(turn.credit is not None for turn in trajectory.turns),
        # The site plays it, and shows its tokens.
        "episode": players.add(trajectory) if page is None else None,
        "end": describe_end(trajectory),
        "solved": is_solved(trajectory),
        "responses": [
            (turn, turn_reward(turn), shorten(turn.text, 400)) for turn in trajectory.turns if turn.role == "assistant"
        ],
        "turns": token_turns(trajectory, found.image_pad_id, inputs.token_texts) if page is None else [],
        "tokens": len(trajectory.token_ids),
        "trained_tokens": int(trajectory.loss_mask.sum()),
    }
