"""The report of a run: one self-contained HTML page, from headline to settings.

`read_facts` makes one table of facts from the files of a run, then one template writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.report import DataTable
from geo_sokoban_pipeline.grpo.scoring import credit_turns
from geo_sokoban_pipeline.reporting import curves, report_tables
from geo_sokoban_pipeline.reporting.charts import Chart
from geo_sokoban_pipeline.reporting.episodes import (
    PlayerData,
    TokenTexts,
    TokenTurn,
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
        """One option of the training, such as `prompts`, `order`; None if it is not known."""
        return ((self.parameters.get(f"train_{self.task}") or {}).get(section) or {}).get(name)


@dataclass(frozen=True)
class ReportFacts:
    """The contents of the page; the template decides how they look.

    Attributes:
        title: the task, or the file or module of an environment of one's own.
        made: (name, value): when, how and where the run was made, and what was evaluated.
        charts: of the training.
        lengths: the rates by difficulty.
        health: small charts of the training's diagnostics.
        numbers: the run in a few (name, number) pairs.
        labels: of the last policy and of the first one, whose episodes `gallery` has.
        gallery: held-out prompts with title and subtitle.
        ends: result of each shown episode in words, and whether it succeeded, by trajectory id.
        tokens: of the training episodes, by trajectory id; empty where a site shows them.
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
    labels: list[str]
    gallery: list[tuple[str, str, PromptPair]]
    extremes: Extremes | None
    ends: dict[str, tuple[str, bool]]
    tokens: dict[str, list[TokenTurn]]
    timings: list[report_tables.PhaseTime]
    data: DataTable | None
    audits: list[report_tables.AuditTable]
    audit_command: str
    players: PlayerData


def build_report(inputs: ReportInputs) -> str:
    """The page, HTML5 as text, to be stored as UTF-8. The same inputs always give the same page."""
    return render_page("report.html.j2", run=inputs, facts=read_facts(inputs))


def read_facts(inputs: ReportInputs) -> ReportFacts:
    """The facts of a run, from what it has stored."""
    task, summary, metrics, players = task_or_plain(inputs.task), inputs.summary, inputs.metrics, PlayerData()
    # Stored episodes: numbers over all of them, and those that are shown.
    episodes, extremes = summarise_training(inputs.trained), choose_extremes(inputs.trained)
    tags = [] if inputs.index is None else tag_shares(inputs.index)
    validations, pairs = follow_prompts(inputs.validations), choose_gallery(inputs.held_out, len(inputs.policies))
    by_iteration = {row["iteration"]: row for row in episodes.rows}
    diagnostics = [{**by_iteration.get(row.get("iteration"), {}), **row} for row in metrics]
    order, title = str(inputs.option("prompts", "order")), _title(inputs)
    reward_args = inputs.option("reward", "args") or {}
    trained, pad = ([*extremes.best, *extremes.worst], extremes.image_pad_id) if extremes else ([], None)
    has_credit = any(turn.credit is not None for episode in trained for turn in episode.turns)
    # Results of evaluation, scoring, task and provenance: the paired test, the rewards that turns of the evaluation
    # would have had in training, the parts of the reward, the command of an audit.
    change = compare_policies(inputs, inputs, number=0)
    shown = [one for pair in pairs for one in (pair.after, pair.before) if one is not None]
    if has_credit:
        shown = [credit_turns(one, task, reward_args) or one for one in shown]
    parts = task.report.reward_parts(episodes.parts, reward_args)
    audit_command = suggest_command(f"audit_{inputs.task}", inputs.run_id)
    # Episodes as the page shows them; a site has the players and the tokens of the training episodes.
    alone = trained if inputs.site is None else []
    ends = {one.trajectory_id: (describe_end(one), is_solved(one)) for one in (*shown, *trained)}
    for one in {one.trajectory_id: one for one in (*shown, *alone)}.values():
        players.add(one, *ends[one.trajectory_id])
    return ReportFacts(
        title=title,
        task=task,
        headline=write_progress(*inputs.progress) if inputs.progress else write_headline(summary, change, inputs.stale),
        made=[*describe_making(inputs.time), *describe_evaluated(summary)],
        charts={
            "success": curves.success_chart(metrics, task.words, order),
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
        audits=report_tables.audit_tables(inputs.whole_audit, inputs.audit, len(metrics)),
        labels=[task.report.label(name) for name in (*inputs.policies[-1:], *inputs.policies[:1])],
        gallery=[(*_name_prompt(pair.after, task), pair) for pair in pairs],
        extremes=extremes,
        ends=ends,
        tokens={one.trajectory_id: token_turns(one, pad, inputs.token_texts) for one in alone},
        players=players,
        audit_command=audit_command,
        data=report_tables.data_table(inputs.data_report, task),
    )


def _title(inputs: ReportInputs) -> str:
    known, factory = TASKS.get(inputs.task), inputs.option("env", "factory")
    if known is None or factory is None or factory == known.train_config.model_validate({}).env.factory:
        return inputs.task
    return f"own task {Path(str(factory).split(':')[0]).name}"


def _name_prompt(episode: Trajectory, task: Task) -> tuple[str, str]:
    """Title and subtitle of a held-out prompt: its kind where that is known, and its number."""
    title, subtitle = f"{task.words.unit} {episode.group_index}", ""
    if episode.difficulty is not None:
        title, subtitle = task.report.name_kind(episode.difficulty), title
    return title[:1].upper() + title[1:], subtitle
