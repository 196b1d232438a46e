"""Nodes on stored runs: the same functions of the core as in the loop, each half of it by itself."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.credit import CreditPipelineOptions
from geo_sokoban_pipeline.config.grpo import (
    BrowsePipelineOptions,
    EpisodeChoice,
    EvaluatePipelineOptions,
    ExportPipelineOptions,
    ForkPipelineOptions,
    RegradePipelineOptions,
    ReportPipelineOptions,
    RolloutPipelineOptions,
    ScorePipelineOptions,
    SourceOptions,
    TrainOptions,
    UpdatePipelineOptions,
)
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.envs.report import BLANK, FIRST_SHUFFLED, SHUFFLED
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.hub import check_upload, upload_folder
from geo_sokoban_pipeline.pipelines.train.nodes import read_rows, release
from geo_sokoban_pipeline.runs.fingerprint import hash_files, hash_rows, unflatten
from geo_sokoban_pipeline.runs.folders import RunFolders, RunStore, SourceError
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, open_policy
from geo_sokoban_pipeline.runs.provenance import read_versions, summarise_commands
from geo_sokoban_pipeline.runs.storage import NewCheckpoint, Rewind, iteration_of, partition
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.studies.plan import merge
from geo_sokoban_pipeline.tasks import task_of, task_or_plain
from geo_sokoban_pipeline.training.runtime import prepare_process

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from geo_sokoban_pipeline.training.fork_players import AgentPlayer, PolicyPlayer
    from geo_sokoban_pipeline.trajectories.types import Trajectory

logger = logging.getLogger(__name__)
TrainedOn = tuple[str | None, str | None]  # data id, and hash of the prompts


def collect_trajectories(
    policy_of: Callable[[], PolicyFolder],
    trained_on: Callable[[], TrainedOn],
    prompts: pd.DataFrame,
    options: RolloutPipelineOptions,
    settings: TrainOptions,
    seed: int,
) -> Iterator[tuple[Any, ...]]:
    """Roll out iterations with a stored policy; one yield each.

    With a checkpoint of the training run, its data cursor is used too: the iteration after it is rolled out as in the
    loop, unless `options.prompts` says that all iterations have the same prompts. An iteration whose ranks are lost
    begins again; those before it are stored.
    """
    from geo_sokoban_pipeline.grpo.scoring import scored_context
    from geo_sokoban_pipeline.policies.policy import load_as
    from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
    from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
    from geo_sokoban_pipeline.training.rollout_workers import open_rollouts
    from geo_sokoban_pipeline.training.worker_group import open_worker_group, restarting
    from geo_sokoban_pipeline.trajectories.index import spread
    from geo_sokoban_pipeline.trajectories.parquet import name_parts

    rows = read_rows(prompts)
    check_prompts(trained_on(), options.source, rows)
    prepare_process(settings.threads)
    manifest: dict[str, Any] = {}
    if options.source.checkpoint == "tiny":
        policy = build_tiny_policy(settings.policy.tiny, seed)
    else:
        source = policy_of()
        manifest = source.manifest
        policy = load_as(settings.sent_policy, source.path)
    first = int(manifest.get("policy_version", 0))
    following, cursor = first, manifest.get("sampler")
    if options.prompts is not None:
        rows = [rows[place] for place in spread(len(rows), options.prompts)]
        settings, cursor = _rolling_all(settings, len(rows)), None
    # Nothing is trained, so that each rank needs whole weights, and no part of them.
    whole_weights = settings.model_copy(update={"sharding": "none", "replicas": 1, "backend": "fsdp"})

    def done() -> str:
        return f"{following - first} iterations are stored"

    yield Rewind(-1), Rewind(-1)
    for attempt in restarting(settings, done):
        with attempt as lost, ExitStack() as owned:
            # Servers and rollout workers roll out for all processes; in a Ray cluster they need its connection.
            needs_ranks = settings.ranks_roll_out or settings.placement == "ray"
            workers = owned.enter_context(open_worker_group(policy, whole_weights)) if needs_ranks else None
            fitting = settings if workers is None else settings.with_processes(workers.size)
            rolling = owned.enter_context(open_rollouts(policy, fitting, workers))
            engine, run = rolling.engine, f"rollout_{settings.task}"
            sampler = build_sampler(rows, settings, seed, cursor)
            collector = Collector(run, seed, settings, rows, policy, engine, rolling.function, rolling.take_metrics)
            began = following
            for iteration in range(began, first + options.iterations):
                emit(Event.COLLECT, iteration)
                engine.update_weights(None, first)
                if workers is not None and settings.ranks_roll_out:
                    workers.update_weights(first)
                trajectories, metrics = collector.collect(iteration, sampler)
                restarts = {"perf/restarts": lost} if lost and iteration == began else {}
                row = {"iteration": iteration, "policy_version": first, **metrics, **restarts}
                context = scored_context(policy.table_context, settings.grpo)
                chunk = name_parts(iteration, trajectories, context), {partition(iteration): row}
                yield chunk
                release(chunk)
                following, cursor = iteration + 1, sampler.state()


def _rolling_all(settings: TrainOptions, count: int) -> TrainOptions:
    """Settings by which each iteration rolls out each of so many prompts once, and all episodes to their end."""
    return settings.model_copy(
        update={
            "grpo": settings.grpo.model_copy(update={"groups": count, "max_refill": 1.0}),
            "prompts": settings.prompts.model_copy(update={"order": "shuffle"}),
            "rollout": settings.rollout.model_copy(update={"over_sampling": 1.0, "partial": False}),
        }
    )


def update_on_stored(
    stored: Callable[[], tuple[int, list[Path]]],
    start_policy: Callable[[], PolicyFolder],
    reference_policy: Callable[[], PolicyFolder],
    options: UpdatePipelineOptions,
    settings: TrainOptions,
    seed: int,
) -> Iterator[tuple[Any, ...]]:
    """Train on the trajectories of one stored iteration k, from checkpoint k − 1 or the starting policy.

    The result is checkpoint k of that run, bit for bit, where its settings are the same. Where ranks are lost, all of
    it begins again.
    """
    from geo_sokoban_pipeline.training.backend import build_backend, open_reference
    from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter, layout_of, written_ahead
    from geo_sokoban_pipeline.training.grpo_loop import update_policy
    from geo_sokoban_pipeline.training.worker_group import load_driver_policy, open_worker_group, restarting
    from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
    from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

    threads = prepare_process(settings.threads)
    iteration, files = stored()
    whole(files, f"update_{settings.task}", tokens=True, groups=True)
    start = start_policy()
    # How episodes are dealt to steps belongs to the run that is replayed, whatever this command's seed is.
    seed = int(start.manifest.get("fingerprint", {}).get("seed", seed))
    policy = load_driver_policy(settings, start.path, seed)
    for attempt in restarting(settings, lambda: "nothing of the update is stored"):
        with attempt as lost, open_worker_group(policy, settings) as workers:
            trajectories = [episode for file in files for episode in table_to_trajectories(read_trajectories(file))]
            temperature = settings.rollout.sampling.temperature
            backend = build_backend(policy, settings.optimizer, temperature, workers, settings.megatron_layout)
            if iteration > 0:
                backend.load_state(start.path)
            reference = open_reference(reference_policy, policy, settings, workers, backend)
            emit(Event.UPDATE, iteration)
            metrics = update_policy(
                trajectories, policy, backend, settings.grpo, settings.optimizer, iteration, seed, reference
            )
            entries = {
                "iteration": iteration,
                "policy_version": iteration + 1,
                "source": options.source.model_dump(),
                "started_from": hash_files(start.manifest["files"]),
                **layout_of(settings if workers is None else workers.options, threads),
            }
            restarts = {"perf/restarts": lost} if lost else {}
            row = {"iteration": iteration, "policy_version": iteration, **metrics, **restarts}
            name = partition(iteration)
            with written_ahead(CheckpointWriter(backend, entries), start.path.parent, workers) as writer:
                yield Rewind(-1), Rewind(-1)
                yield {name: row}, {name: NewCheckpoint(writer)}


def evaluate_stored(
    policy_of: Callable[[], PolicyFolder],
    trained_on: Callable[[], TrainedOn],
    prompts: pd.DataFrame,
    eval_prompts: pd.DataFrame,
    identity: dict[str, Any],
    options: EvaluatePipelineOptions,
    settings: TrainOptions,
    seed: int,
) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Evaluate a stored policy on the evaluation prompts, beside the baselines."""
    from geo_sokoban_pipeline.evaluation.summary import evaluate_policies
    from geo_sokoban_pipeline.training.worker_group import servers_alone

    source, training = options.source, read_rows(prompts)
    check_prompts(trained_on(), source, training, identity["id"])
    prepare_process(settings.threads)
    own = RunStore.is_own(source)
    pipeline = "" if source.run == f"train_{settings.task}" else f"{source.run}/"
    name = f"{pipeline}{source.run_id}@{source.checkpoint}" if own else str(source.checkpoint)
    if not own and ("/" not in name or name.endswith((BLANK, SHUFFLED, FIRST_SHUFFLED))):
        name += "/"  # a folder, whose name shall not be read as that of a baseline or of an image ablation
    with servers_alone(settings) as (fitting, launcher):
        summary, played = evaluate_policies(
            f"evaluate_{settings.task}",
            seed,
            {name: policy_of()},
            read_rows(eval_prompts),
            fitting,
            training=training,
            launcher=launcher,
        )
    return {**summary, "data_id": identity["id"], "source": source.model_dump()}, played


def regrade_stored(
    stored: Callable[[], list[Path]],
    start_policy: Callable[[], PolicyFolder],
    trained_on: Callable[[], TrainedOn],
    prompts: pd.DataFrame,
    options: RegradePipelineOptions,
    settings: TrainOptions,
) -> Iterator[tuple[Any, ...]]:
    """Grade all stored training episodes again with the reward and the advantages of the settings; one yield an
    iteration.
    """
    from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key, regrade_episodes
    from geo_sokoban_pipeline.grpo.scoring import scored_context
    from geo_sokoban_pipeline.policies.policy import load_encoding
    from geo_sokoban_pipeline.trajectories.parquet import name_parts, read_trajectories
    from geo_sokoban_pipeline.trajectories.schema import read_context
    from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

    rows, task = read_rows(prompts), task_of(settings.task)
    check_prompts(trained_on(), options.source, rows)
    files = stored()
    whole(files, f"regrade_{settings.task}", tokens=True, groups=True)
    known = prompts_by_key(rows, task)
    replayer = Replayer(load_encoding(start_policy().path), settings.env, settings.reward, settings.rollout, task)
    yield Rewind(-1), Rewind(-1)
    for folder, own in groupby(files, key=lambda path: path.parent):
        tables = [read_trajectories(file) for file in own]
        episodes = [episode for table in tables for episode in table_to_trajectories(table)]
        regraded, metrics = regrade_episodes(episodes, replayer, known, settings.grpo)
        iteration, context = regraded[0].iteration, scored_context(read_context(tables[0].schema), settings.grpo)
        logger.info("%s: %d of %d rewards changed", folder.name, metrics["regrade/changed_rewards"], len(regraded))
        row = {"iteration": iteration, "policy_version": iteration, **metrics}
        chunk = name_parts(iteration, regraded, context), {partition(iteration): row}
        yield chunk
        release(chunk)


def export_episodes(
    stored: Callable[[], list[Path]], outputs: Callable[[], Path], options: ExportPipelineOptions
) -> Callable[[Path], dict[str, Any]]:
    """A writer of the chosen episodes as tables and a card; it runs when the export is saved."""
    from geo_sokoban_pipeline.trajectories.exports import is_included, write_export
    from geo_sokoban_pipeline.trajectories.index import SPLITS, trajectory_files
    from geo_sokoban_pipeline.trajectories.inspect_log import FOLDER, write_logs

    if options.push is not None:
        check_upload(options.push)
    source, files = options.source, stored()
    name = f"{source.run}/{source.run_id}"
    about = {"run": name, **read_versions()}
    inside = [file for file in files if is_included(options, iteration_of(file.parent.name) or 0)]
    whole(inside, "the table tokens", tokens="tokens" in options.tables)
    whole(inside, "the table pairs", groups="pairs" in options.tables)

    def write(folder: Path) -> dict[str, Any]:
        counts = write_export(files, folder, options, about)
        for table in options.tables:
            logger.info("%s: %d rows from %d episodes", table, counts.rows[table], counts.read)
        logs: dict[str, int] = {}
        for kind, split in SPLITS.items():
            if split in options.inspect:
                chosen = inside if split == "train" else trajectory_files(outputs() / kind)
                logs |= write_logs(chosen, folder / FOLDER, name, about)
        return {"source": source.model_dump(), "rows": counts.rows, "inspect": logs}

    return write


def push_export(export: dict[str, Callable[[], pa.Table]], folder: Path, options: ExportPipelineOptions) -> None:
    """Upload the export to the hub, if `push` names a repository.

    Args:
        export: its tables, which are stored.
        folder: where they lie.
    """
    from geo_sokoban_pipeline.trajectories.exports import TABLES
    from geo_sokoban_pipeline.trajectories.inspect_log import FOLDER

    if options.push is None:
        return
    replaced = [f"{name}/*" for name in (*TABLES, FOLDER)]
    address = upload_folder(folder, options.push, private=options.push_private, replaced=replaced)
    logger.info("%d tables uploaded: %s", len(export), address)


def report_stored(root: Callable[[], Path], options: ReportPipelineOptions) -> str:
    """The HTML page of what a run has committed so far."""
    from geo_sokoban_pipeline.evaluation.audit import audit_edits, warn_of_findings
    from geo_sokoban_pipeline.reporting.live import read_report_inputs
    from geo_sokoban_pipeline.reporting.report import build_report

    warn_of_findings(audit_edits(RunStore(root()).outputs(options.source), contract=True))
    return build_report(read_report_inputs(root(), options.source))


def browse_stored(root_of: Callable[[], Path], options: BrowsePipelineOptions) -> Callable[[Path], dict[str, Any]]:
    """A writer of the site of the run's episodes, and of those that it is compared with; it runs when it is saved."""
    from geo_sokoban_pipeline.evaluation.audit import audit_edits, warn_of_findings
    from geo_sokoban_pipeline.reporting.viewer.site import write_site
    from geo_sokoban_pipeline.reporting.viewer.sources import open_run

    root, source = root_of(), options.source
    further = (name if "/" in name else f"{source.run}/{name}" for name in options.runs)
    names = dict.fromkeys([f"{source.run}/{source.run_id}", *further])
    folders = [RunFolders.of(root, *name.split("/")).outputs for name in names]
    for folder in folders:
        warn_of_findings(audit_edits(folder, contract=True))
    runs = [open_run(folder).within(options.first_iteration, options.last_iteration) for folder in folders]

    def write(folder: Path) -> dict[str, Any]:
        counts = write_site(folder, runs, pages=options.pages)
        logger.info("%(episodes)d episodes, %(pages)d with a page, %(images)d images", counts)
        return {"runs": [run.name for run in runs], **counts}

    return write


def score_stored(
    outputs: Callable[[], Path],
    policy_of: Callable[[], PolicyFolder],
    options: ScorePipelineOptions,
    settings: TrainOptions,
) -> Iterator[tuple[Any, ...]]:
    """Score the sampled tokens of the chosen episodes under a policy; one yield a trajectory file."""
    from geo_sokoban_pipeline.policies.policy import load_as
    from geo_sokoban_pipeline.training.token_scoring import ScoringRequest, map_occlusion, score_tokens
    from geo_sokoban_pipeline.trajectories.index import spread
    from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
    from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

    source, folder = options.source, outputs()
    chosen = choose_episodes(folder, options, f"score_{settings.task}")
    mapped = {chosen[place]["trajectory_id"] for place in spread(len(chosen), options.occlusion)}
    scored_by = policy_of()
    prepare_process(settings.threads)
    policy = load_as(settings.policy, scored_by.path)
    is_own = RunStore.is_own(source)
    about = {
        "run": source.run,
        "run_id": source.run_id,
        "scored_by": f"{source.run}/{source.run_id}@{source.checkpoint}" if is_own else str(source.checkpoint),
        "scored_version": scored_by.manifest.get("policy_version", 0) if is_own else None,
    }
    request = ScoringRequest(settings.optimizer, options.top_k, options.image_reliance, about)
    yield Rewind(-1), Rewind(-1)
    parts: Counter[int] = Counter()
    for place, rows in groupby(chosen, key=itemgetter("partition")):
        table = read_trajectories(folder / f"{place}.parquet").take([row["row"] for row in rows])
        episodes = table_to_trajectories(table)
        iteration = episodes[0].iteration
        name = f"{partition(iteration)}/part-{parts[iteration]:03d}"
        parts[iteration] += 1
        with_map = [episode for episode in episodes if episode.trajectory_id in mapped]
        scores = score_tokens(episodes, policy, request)
        logger.info("%s: %d tokens of %d episodes scored", place, scores.num_rows, len(episodes))
        maps = {name: map_occlusion(with_map, policy, request, task_of(settings.task).image_parts)} if with_map else {}
        chunk = {name: scores}, maps
        yield chunk
        release(chunk)


def choose_episodes(folder: Path, options: EpisodeChoice, doing: str) -> list[dict[str, Any]]:
    """Places of the stored episodes that the options choose, whose tokens are there.

    Args:
        folder: of the run's outputs.
    """
    from geo_sokoban_pipeline.trajectories.index import find_episodes, read_index, spread

    found = find_episodes(read_index(folder, task_or_plain), options)
    limit = found.num_rows if options.limit is None else options.limit
    columns = ["trajectory_id", "iteration", "group_index", "policy_version", "partition", "row"]
    chosen = found.take(spread(found.num_rows, limit)).select(columns).to_pylist()
    files = [folder / f"{place}.parquet" for place in dict.fromkeys(one["partition"] for one in chosen)]
    whole(files, doing, tokens=True)
    return chosen


_GROUPS = 4  # groups of episodes in a part of the table


def fork_stored(
    outputs: Callable[[], Path],
    versions_of: Callable[[], dict[int, Path]],
    policy_of: Callable[[], PolicyFolder],
    trained_on: Callable[[], TrainedOn],
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    eval_prompts: pd.DataFrame,
    stored: Mapping[str, Callable[[], pa.Table]] | None,
    options: ForkPipelineOptions,
    settings: TrainOptions,
    seed: int,
) -> Iterator[tuple[Any, ...]]:
    """Measure the worth of turns of the chosen episodes, by continuing from the states around them.

    One yield for some groups of episodes; a command that was killed continues after those that are stored.
    """
    from geo_sokoban_pipeline.evaluation.audit import RunRules, build_replayer
    from geo_sokoban_pipeline.evaluation.forks import fork_episodes
    from geo_sokoban_pipeline.evaluation.replay import prompts_by_key
    from geo_sokoban_pipeline.policies.policy import load_encoding
    from geo_sokoban_pipeline.training.checkpoint import layout_of
    from geo_sokoban_pipeline.training.fork_players import open_player
    from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
    from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

    source, folder, versions = options.source, outputs(), versions_of()
    check_prompts(trained_on(), source, read_rows(prompts))
    chosen = choose_episodes(folder, options, f"fork_{settings.task}")
    threads = prepare_process(settings.threads)
    fingerprint = open_policy(versions[max(versions)]).manifest["fingerprint"]
    rules = RunRules.of({"fingerprint": fingerprint, **layout_of(settings, threads)})
    # The rules are those of the run; where and how its rollouts run are those of the command.
    rollout = RolloutOptions.model_validate(merge(settings.rollout.model_dump(), unflatten(fingerprint)["rollout"]))
    played = settings.model_copy(update={"env": rules.env, "reward": rules.reward, "rollout": rollout})
    replayer, reason = build_replayer(load_encoding(versions[0]), rules)
    if replayer is None:
        raise SourceError(f"{source.run}/{source.run_id} cannot be forked: {reason}")
    frames = [read_rows(frame) for frame in (prompts, validation_prompts, eval_prompts)]
    known = prompts_by_key([row for frame in frames for row in frame], rules.task)
    needed = {one["policy_version"] for one in chosen}
    player, forked_by, identity = open_player(options, played, frames[0], versions, needed, policy_of, seed)
    about = {"run": source.run, "run_id": source.run_id, "forked_by": forked_by}
    inputs = (options.model_dump_json(), settings.policy.model_dump_json(), json.dumps(rules.fingerprint), identity)
    request = content_hash(str(seed), *inputs, *(one["trajectory_id"] for one in chosen))
    bounds = _reward_bounds(folder)

    def fork(part: tuple[str, list[dict[str, Any]]]) -> tuple[pa.Table, Counter[str]]:
        place, rows = part
        table = read_trajectories(folder / f"{place}.parquet").take([row["row"] for row in rows])
        return fork_episodes(table_to_trajectories(table), replayer, known, player.play, options, about, bounds)

    yield from _fork_parts(_plan_parts(chosen), fork, player, stored, request, played)


def fork_resampled(
    trajectories: Mapping[str, Callable[[], pa.Table]],
    policy_of: Callable[[], PolicyFolder],
    prompts: pd.DataFrame,
    stored: Mapping[str, Callable[[], pa.Table]] | None,
    run_id: str,
    options: CreditPipelineOptions,
    settings: TrainOptions,
    seed: int,
) -> Iterator[tuple[Any, ...]]:
    """Measure the worth of turns of resampled groups: all of the first iteration, and those that many groups share.

    One yield for all groups of a prompt; a command that was killed continues after those that are stored.
    """
    from geo_sokoban_pipeline.evaluation.credit import choose_turns
    from geo_sokoban_pipeline.evaluation.forks import fork_episodes
    from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key
    from geo_sokoban_pipeline.policies.policy import load_encoding
    from geo_sokoban_pipeline.training.fork_players import PolicyPlayer

    task, folder = task_of(settings.task), policy_of()
    prepare_process(settings.threads)
    replayer = Replayer(load_encoding(folder.path), settings.env, settings.reward, settings.rollout, task)
    known = prompts_by_key(read_rows(prompts), task)
    episodes = read_resampled(trajectories)
    by_prompt: dict[tuple[str, str | None], list[Trajectory]] = {}
    for episode in episodes:
        by_prompt.setdefault((episode.task_id, episode.label), []).append(episode)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    bounds = min(rewards), max(rewards)
    # Without a first stage, means over many states are right: a state whose first ends agree keeps their mean.
    continued = ForkPipelineOptions(
        source=options.source, continuations=options.continuations, first_continuations=options.continuations
    )
    about = {"run": f"credit_{settings.task}", "run_id": run_id, "forked_by": "sampler"}
    asked = options.model_dump_json(exclude={"estimators"})
    rules = settings.model_dump_json(include={"env", "reward", "rollout", "policy"})
    seen = [content_hash(str(one.reward), one.token_ids.tobytes(), *one.images) for one in episodes]
    request = content_hash(str(seed), asked, rules, hash_files(folder.manifest["files"]), *seen)
    player = PolicyPlayer(lambda version: folder, settings, seed)

    def fork(own: list[Trajectory]) -> tuple[pa.Table, Counter[str]]:
        chosen = partial(choose_turns, visits=options.visits, whole=episodes[0].iteration)
        return fork_episodes(own, replayer, known, player.play, continued, about, bounds, chosen)

    first = partition(episodes[0].iteration)
    parts = [(f"{first}/part-{number:03d}", own, len(own)) for number, own in enumerate(by_prompt.values())]
    yield from _fork_parts(parts, fork, player, stored, request, settings)


def read_resampled(trajectories: Mapping[str, Callable[[], pa.Table]]) -> list[Trajectory]:
    """Episodes with a reward, of all iterations in their order."""
    from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

    episodes = [episode for name in sorted(trajectories) for episode in table_to_trajectories(trajectories[name]())]
    return [episode for episode in episodes if episode.reward is not None]


def measure_estimators(
    trajectories: Mapping[str, Callable[[], pa.Table]],
    turn_values: Mapping[str, Callable[[], pa.Table]],
    policy_of: Callable[[], PolicyFolder],
    options: CreditPipelineOptions,
    settings: TrainOptions,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Each advantage against the true ones: table and page."""
    import pyarrow as pa

    from geo_sokoban_pipeline.evaluation.credit import compare_estimators, describe_turns
    from geo_sokoban_pipeline.policies.policy import load_as
    from geo_sokoban_pipeline.reporting.credit import render_credit
    from geo_sokoban_pipeline.training.gradient_cosines import measure_cosines

    task, folder = task_of(settings.task), policy_of()
    prepare_process(settings.threads)
    episodes = read_resampled(trajectories)
    turns = describe_turns(episodes, pa.concat_tables(read() for read in turn_values.values()))
    policy = load_as(settings.policy, folder.path)
    found = compare_estimators(
        episodes,
        turns,
        settings,
        options.estimators,
        partial(
            measure_cosines,
            turns=turns,
            episodes=episodes,
            policy=policy,
            optimizer=settings.optimizer,
            temperature=settings.rollout.sampling.temperature,
            seed=seed,
        ),
        seed,
    )
    credit = {"source": options.source.model_dump(), "policy_version": folder.manifest.get("policy_version"), **found}
    return credit, render_credit(credit, task)


def _fork_parts(
    parts: Sequence[tuple[str, Any, int]],
    fork: Callable[[Any], tuple[pa.Table, Counter[str]]],
    player: PolicyPlayer | AgentPlayer,
    stored: Mapping[str, Callable[[], pa.Table]] | None,
    request: str,
    settings: TrainOptions,
) -> Iterator[tuple[Any, ...]]:
    """One yield for each part of a table of turn values; those that the same request has stored are not made again.

    Args:
        parts: name, what `fork` takes, and its number of episodes.
        settings: where the player rolls out.
    """
    from geo_sokoban_pipeline.console import track
    from geo_sokoban_pipeline.training.worker_group import restarting

    done = len(list(takewhile(lambda part: _made_for((stored or {}).get(part[0]), request), parts)))
    counts: Counter[str] = Counter()

    def progress() -> str:
        return f"{done} of {len(parts)} parts of the table are stored"

    if done == len(parts):
        logger.info("the same command has stored this table: %s", progress())
        yield ({},)  # Kedro fails on a node that yields nothing
        return
    if not done:
        yield (Rewind(-1),)
    for name, _, _ in parts[:done]:
        counts.update(json.loads(((stored or {})[name]().schema.metadata or {}).get(_COUNTS.encode(), b"{}")))
    total, before = (sum(size for _, _, size in some) for some in (parts, parts[:done]))
    with track("fork turns, episodes", total, before, keep=False) as bar:
        for attempt in restarting(settings, progress):
            with attempt, player:
                for name, part, size in parts[done:]:
                    made, found = fork(part)
                    chunk = ({name: made.replace_schema_metadata({_REQUEST: request, _COUNTS: json.dumps(found)})},)
                    yield chunk
                    release(chunk)
                    done += 1
                    counts += found
                    bar.advance(size)
    logger.info(
        "%d turns have %d histories: %d continuations, %.1f times fewer than without shared histories; "
        "%d turns are left out",
        counts["turns"],
        counts["histories"],
        counts["continuations"],
        counts["unshared"] / max(1, counts["continuations"]),
        counts["left_out"],
    )


def _reward_bounds(folder: Path) -> tuple[float, float]:
    """Lowest and highest reward of a run's stored episodes."""
    from geo_sokoban_pipeline.trajectories.index import read_index

    rewards = [reward for reward in read_index(folder, task_or_plain)["reward"].to_pylist() if reward is not None]
    return min(rewards, default=0.0), max(rewards, default=0.0)


def _plan_parts(chosen: Sequence[dict[str, Any]]) -> list[tuple[str, tuple[str, list[dict[str, Any]]], int]]:
    """Parts of the table: name, file of episodes with the rows of the index of some groups, and their number."""
    parts = []
    numbers: Counter[str] = Counter()
    for place, rows in groupby(chosen, key=itemgetter("partition")):
        groups = [list(own) for _, own in groupby(rows, key=itemgetter("group_index"))]
        for first in range(0, len(groups), _GROUPS):
            iteration = partition(groups[first][0]["iteration"])
            own = sum(groups[first : first + _GROUPS], [])
            parts.append((f"{iteration}/part-{numbers[iteration]:03d}", (place, own), len(own)))
            numbers[iteration] += 1
    return parts


# In the metadata of a part: hash of all that it follows from, and its counts.
_REQUEST, _COUNTS = "fork_request", "fork_counts"


def _made_for(read: Callable[[], pa.Table] | None, request: str) -> bool:
    """Whether a part is stored that the same command has made; one that cannot be read is made again."""
    from kedro.io import DatasetError

    try:
        return read is not None and (read().schema.metadata or {}).get(_REQUEST.encode()) == request.encode()
    except DatasetError:
        return False


def whole(files: Sequence[Path], doing: str, *, tokens: bool = False, groups: bool = False) -> None:
    """See that files are whole, and that retention has kept what is needed of them; else this raises."""
    from geo_sokoban_pipeline.trajectories.parquet import check_file
    from geo_sokoban_pipeline.trajectories.thinning import refuse_thinned

    for file in files:
        check_file(file)
    refuse_thinned(files, doing, tokens=tokens, groups=groups)


def check_prompts(
    trained: TrainedOn, source: SourceOptions, rows: Sequence[Mapping[str, Any]], data_id: str | None = None
) -> None:
    """See that the prompts are those that a run was trained on; a policy may be evaluated on other data.

    Args:
        trained: data id and hash of the prompts that the run was trained on; None for a policy from elsewhere.
        data_id: of the rows, where they may be of other data than the run's.

    Raises:
        SourceError: they were made again, and came out otherwise.
    """
    known_id, known_hash = trained
    if known_hash is not None and data_id in (None, known_id) and hash_rows(rows) != known_hash:
        raise SourceError(
            f"the prompts of {source.run}/{source.run_id} were deleted and made again with other rows than it was "
            "trained on: another version of this project, or another source. Train it again with fresh=true, or make "
            "them with the version that trained it."
        )


def report_evaluation(
    summary: dict[str, Any],
    played: dict[str, Callable[..., pa.Table]],
    commands: list[dict[str, Any]] | None,
    run_id: str,
    options: EvaluatePipelineOptions,
    settings: TrainOptions,
    seed: int,
) -> str:
    """The HTML page of an evaluation."""
    from geo_sokoban_pipeline.reporting.report import ReportInputs, build_report

    run = f"evaluate_{settings.task}"
    return build_report(
        ReportInputs(
            task=settings.task,
            run=run,
            run_id=run_id,
            metrics=[],
            summary=summary,
            held_out=played,
            parameters={
                "seed": seed,
                run: options.model_dump(mode="json"),
                f"train_{settings.task}": settings.model_dump(mode="json"),
            },
            versions=read_versions(),
            time=summarise_commands(commands or ()),
        )
    )
