"""The report of a run: one self-contained HTML page, from headline to settings.

`read_facts` makes one table of facts of what a run has stored; one template writes it. The template asks nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.report import DataTable
from geo_sokoban_pipeline.reporting import curves, report_tables
from geo_sokoban_pipeline.reporting.charts import Chart
from geo_sokoban_pipeline.reporting.episodes import (
    PlayerData,
    TokenTexts,
    TokenTurn,
    credit_turns,
    describe_end,
    is_solved,
    token_turns,
)
from geo_sokoban_pipeline.reporting.facts import (
    Headline,
    StoredRun,
    compare_policies,
    describe_evaluated,
    describe_making,
    write_headline,
    write_progress,
)
from geo_sokoban_pipeline.reporting.pages import render_page
from geo_sokoban_pipeline.reporting.training_episodes import (
    Extremes,
    Parts,
    PromptPair,
    Validations,
    choose_extremes,
    choose_gallery,
    follow_prompts,
    summarise_training,
    tag_shares,
)
from geo_sokoban_pipeline.runs.provenance import suggest_command
from geo_sokoban_pipeline.tasks import TASKS, task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ReportInputs(StoredRun):
    """Inputs of a report.

    Attributes:
        task: task name.
        index: of the run's episodes, see `trajectories/index.py`; None leaves the chart of tags out.
        validations: episodes of the validations, partition `iter=<policy version>/part-…`.
        warm_start: rows `step`, `loss`, `validation_loss` (nats per response token), `seconds`.
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
    warm_start: Sequence[dict[str, Any]] = ()
    trained: Parts = field(default_factory=dict)
    data_report: dict[str, Any] | None = None
    parameters: dict[str, Any]
    versions: dict[str, str]
    token_texts: TokenTexts | None = None
    validations: Parts = field(default_factory=dict)
    index: pa.Table | None = None
    audit: Mapping[str, Any] | None = None
    whole_audit: Mapping[str, Any] | None = None
    site: str | None = None
    progress: tuple[int, int | None] | None = None

    def browse(self, page: str, trajectory_id: str) -> str | None:
        """Address of a page of the site on an episode, such as `episode` or `group`; None without a site."""
        if self.site is None:
            return None
        return f"{self.site}/index.html#/{page}?run={self.run}/{self.run_id}&id={quote(trajectory_id)}"

    def option(self, section: str, name: str) -> Any:
        """One option of the training, such as `grpo`, `credit`; None if it is not known."""
        options = self.parameters.get(f"train_{self.task}") or {}
        return (options.get(section) or {}).get(name)


@dataclass(frozen=True)
class ShownEpisode:
    """One episode of the page.

    Attributes:
        end: its result in words.
        player: its number among the players; None: the site plays it.
        tokens: by turn; empty where the site shows them.
    """

    trajectory: Trajectory
    end: str
    solved: bool
    player: int | None
    tokens: Sequence[TokenTurn] = ()


@dataclass(frozen=True)
class ReportFacts:
    """All that the page says; the template decides how.

    Attributes:
        title: the task, or the file or module of an environment of one's own.
        made: (name, value): when, how and where the run was made, and what was evaluated.
        charts: of the training.
        lengths: the rates by difficulty.
        health: small charts of the training's diagnostics.
        numbers: the run in a few (name, number) pairs.
        gallery: (title, subtitle, [(policy, episode)]) of each held-out prompt.
        extremes: training episodes with the best and worst rewards, by `Best` and `Worst`.
        players: data of the page's script.
    """

    title: str
    task: Task
    headline: Headline
    made: list[tuple[str, str]]
    charts: dict[str, Chart | None]
    lengths: Chart | None
    health: list[Chart]
    numbers: list[tuple[str, str]]
    validations: Validations | None
    evaluation: report_tables.Evaluation
    gallery: list[tuple[str, str, list[tuple[str, ShownEpisode]]]]
    chosen: Extremes | None
    extremes: dict[str, list[ShownEpisode]]
    timings: list[report_tables.PhaseTime]
    data: DataTable | None
    audits: list[report_tables.AuditTable]
    audit_command: str
    players: PlayerData


def build_report(inputs: ReportInputs) -> str:
    """The page, HTML5 as text, to be stored as UTF-8. The same inputs always give the same page."""
    return render_page("report.html.j2", run=inputs, facts=read_facts(inputs))


def read_facts(inputs: ReportInputs) -> ReportFacts:
    """The facts of a run, from what it has stored: its numbers, then its episodes, then what both say together."""
    task, summary, metrics, players = task_or_plain(inputs.task), inputs.summary, inputs.metrics, PlayerData()
    episodes, extremes = summarise_training(inputs.trained), choose_extremes(inputs.trained)
    tags = [] if inputs.index is None else tag_shares(inputs.index)
    validations = follow_prompts(inputs.validations)
    pairs = choose_gallery(inputs.held_out, len(inputs.policies))
    change = compare_policies(inputs, 0, inputs, len(inputs.policies) - 1)
    by_iteration = {row["iteration"]: row for row in episodes.rows}
    diagnostics = [{**by_iteration.get(row.get("iteration"), {}), **row} for row in metrics]
    parts = task.report.reward_parts(episodes.parts, inputs.option("reward", "args") or {})
    return ReportFacts(
        title=_title(inputs),
        task=task,
        headline=write_progress(*inputs.progress) if inputs.progress else write_headline(summary, change, inputs.stale),
        made=[*describe_making(inputs.time), *describe_evaluated(summary)],
        charts={
            "success": curves.success_chart(metrics, task.words, str(inputs.option("prompts", "order"))),
            "reward": curves.reward_chart(metrics),
            "kinds": curves.kind_chart(episodes.kinds, task.words, task.report.difficulty),
            "parts": curves.parts_chart(episodes.rows, parts),
            "tags": curves.tags_chart(tags),
            "responses": curves.length_chart(metrics),
            "warm_start": curves.warm_start_chart(inputs.warm_start),
        },
        health=curves.health_charts(diagnostics, task.report.curves),
        numbers=curves.run_facts(metrics, inputs.warm_start),
        validations=validations,
        lengths=report_tables.difficulty_chart(summary),
        evaluation=report_tables.read_evaluation(summary),
        timings=report_tables.timings(metrics),
        data=report_tables.data_table(inputs.data_report, task),
        audits=report_tables.audit_tables(inputs.whole_audit, inputs.audit, len(metrics)),
        chosen=extremes,
        gallery=[_show_pair(pair, inputs, task, players) for pair in pairs],
        extremes=_show_extremes(inputs, extremes, players),
        players=players,
        audit_command=suggest_command(f"audit_{inputs.task}", inputs.run_id),
    )


def _title(inputs: ReportInputs) -> str:
    known, factory = TASKS.get(inputs.task), inputs.option("env", "factory")
    if known is None or factory is None or factory == known.train_config.model_validate({}).env.factory:
        return inputs.task
    return f"own task {Path(str(factory).split(':')[0]).name}"


def _show_pair(
    pair: PromptPair, inputs: ReportInputs, task: Task, players: PlayerData
) -> tuple[str, str, list[tuple[str, ShownEpisode]]]:
    """A held-out prompt; with credit per turn, turns have the rewards that they would have had in training."""
    kind, number = pair.after.difficulty, f"{task.words.unit} {pair.after.group_index}"
    title = number if kind is None else task.report.name_kind(kind)
    takes = []
    for name, episode in ((inputs.policies[-1], pair.after), (inputs.policies[0], pair.before)):
        if episode is not None:
            args = inputs.option("reward", "args") or {}
            credited = credit_turns(episode, task, args) if inputs.option("grpo", "credit") == "turn" else None
            takes.append((task.report.label(name), _show(credited or episode, players)))
    return title[:1].upper() + title[1:], "" if kind is None else number, takes


def _show(episode: Trajectory, players: PlayerData | None, tokens: Sequence[TokenTurn] = ()) -> ShownEpisode:
    end = describe_end(episode)
    return ShownEpisode(episode, end, is_solved(episode), players.add(episode, end) if players else None, tokens)


def _show_extremes(inputs: ReportInputs, found: Extremes | None, players: PlayerData) -> dict[str, list[ShownEpisode]]:
    """Training episodes; a site has their players and their tokens."""
    if found is None:
        return {}
    chosen = {"Best": found.best, "Worst": found.worst}
    if inputs.site is not None:
        return {name: [_show(one, None) for one in episodes] for name, episodes in chosen.items() if episodes}
    return {
        name: [_show(one, players, token_turns(one, found.image_pad_id, inputs.token_texts)) for one in episodes]
        for name, episodes in chosen.items()
        if episodes
    }
