"""Audit of a stored run: whether its episodes, prompts and files keep every guarantee that can be checked afterwards.

Here are the order of all checks, token parity, which compares the ids that were not sampled with the chat template's
rendering of the same messages, and the formats of the files. Further checks of episodes are in `audit_checks.py` and
`replay.py`; those that need the weights are in `training/audit_scores.py`.
"""

from __future__ import annotations

import gc
import json
import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.config.rollout import EnvOptions, RewardOptions, RolloutOptions
from geo_sokoban_pipeline.console import Progress, print_table, track
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.inspection import TABLES
from geo_sokoban_pipeline.envs.plugins import PluginError
from geo_sokoban_pipeline.evaluation.audit_checks import (
    Found,
    TextCount,
    check_advantages,
    check_groups,
    check_image_grids,
    check_response_ends,
    check_splits,
    check_turn_values,
    check_untrained,
    count_silent,
    describe_silent,
)
from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key
from geo_sokoban_pipeline.grpo.estimators import load_estimator
from geo_sokoban_pipeline.grpo.scoring import MIXED_VERSIONS, STALE, assistant_turns
from geo_sokoban_pipeline.policies.chat import ChatCodec, Message, split_placeholders
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.rollout import load_rollout_fn, rollout
from geo_sokoban_pipeline.runs.fingerprint import changed_code, hash_rows, own_estimators, unflatten
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, partition, read_manifest
from geo_sokoban_pipeline.tasks import task_of, task_or_plain
from geo_sokoban_pipeline.trajectories.index import SPLITS, find_edits, read_index, spread, trajectory_files
from geo_sokoban_pipeline.trajectories.parquet import TornFileError, read_trajectories
from geo_sokoban_pipeline.trajectories.schema import TURN_VALUES, validate_trajectories
from geo_sokoban_pipeline.trajectories.thinning import Thinning, read_thinning
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn, table_to_trajectories

logger = logging.getLogger(__name__)
SHOWN = 3  # findings of a check in the table; the stored audit has all
# Private-use characters: no template, prompt or response contains them.
_OPEN, _CLOSE = "\ue000", "\ue001"


class AuditError(RuntimeError):
    """An audit has findings; the text names the number and the first one."""


@dataclass(frozen=True)
class AuditCheck:
    """One check of one thing.

    Attributes:
        check: name of the check.
        subject: the catalog entry, or the folder.
        checked: how many episodes, responses, groups, iterations, prompts, checkpoints or files.
        findings: broken guarantees, one line each; empty without findings.
        notes: counts of what a sound run may have too.
        episodes: ids of the episodes that the findings are about.
    """

    check: str
    subject: str
    checked: int
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    episodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunRules:
    """The settings that a stored run was made with, also where the parameters are others by now.

    Attributes:
        fingerprint: of its newest checkpoint.
        settings: the fingerprint and the layout, flat.
    """

    task: Task
    env: EnvOptions
    reward: RewardOptions
    rollout: RolloutOptions
    grpo: GrpoOptions
    fingerprint: Mapping[str, Any] = field(repr=False)
    settings: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> RunRules:
        """From the manifest of a training run's checkpoint."""
        fingerprint = manifest["fingerprint"]
        settings = {**fingerprint, **manifest["layout"]}
        values = unflatten(settings)
        return cls(
            task_of(values["task"]),
            EnvOptions.model_validate(values["env"]),
            RewardOptions.model_validate(values["reward"]),
            RolloutOptions.model_validate(values["rollout"]),
            GrpoOptions.model_validate(values["grpo"]),
            fingerprint,
            settings,
        )


@dataclass(frozen=True)
class AuditedEntry:
    """Episodes of a run.

    Attributes:
        name: of the catalog entry.
        parts: {`iter=<number>/part-<number>`: callable that reads it}, in order.
        prompts: rows of the split that they belong to; None: they are no longer stored.
        iterations: number of iterations that must be there, and no more; None: unknown.
        goes_on: whether more than these may be there, which a next command makes again.
        trained: whether they are episodes of training, else of an evaluation.
    """

    name: str
    parts: Mapping[str, Callable[..., pa.Table]]
    prompts: Sequence[Mapping[str, Any]] | None
    iterations: int | None = None
    goes_on: bool = False
    trained: bool = False


def audit_entries(
    entries: Sequence[AuditedEntry], policy: Policy, rules: RunRules, *, limit: int | None = None
) -> list[AuditCheck]:
    """Check stored episodes with all that needs no model.

    Args:
        policy: tokenizer and image processor of the run; a policy without a model will do.
        limit: of each entry, so many episodes at most are compared one by one, evenly spread over its iterations; the
            iterations that they are from are read. None: all.
    """
    replayer, reason = build_replayer(policy, rules)
    reasons = [reason or ("its prompts are no longer stored" if entry.prompts is None else None) for entry in entries]
    audits = [
        _EntryAudit(entry, policy, rules, None if why else replayer, limit)
        for entry, why in zip(entries, reasons, strict=True)
    ]
    with track("check episodes, files", sum(audit.parts for audit in audits), keep=False) as progress:
        return [check for audit, why in zip(audits, reasons, strict=True) for check in audit.run(why, progress)]


def build_replayer(policy: Policy, rules: RunRules) -> tuple[Replayer | None, str | None]:
    """The replayer of a run, or why its episodes cannot be replayed."""
    try:
        if load_rollout_fn(rules.rollout) is not rollout:
            return None, f"rollout.function={rules.rollout.function} is own code for whole batches"
        named = ("env.factory", "reward.function", "rollout.function")
        if (changed := changed_code(rules.fingerprint, named)) is not None:
            return None, changed
        return Replayer(policy, rules.env, rules.reward, rules.rollout, rules.task), None
    except PluginError as error:
        return None, str(error)


class _EntryAudit:
    """The audit of one entry, one iteration in memory at a time: a run may not fit."""

    def __init__(
        self, entry: AuditedEntry, policy: Policy, rules: RunRules, replayer: Replayer | None, limit: int | None
    ) -> None:
        self.entry, self.policy, self.rules, self.limit = entry, policy, rules, limit
        self.replayer = replayer
        self.prompts = prompts_by_key(entry.prompts or (), rules.task)
        self.found: dict[str, list[tuple[str | None, str]]] = defaultdict(list)
        names = ["contract", "parts", "token parity", "response ends", "image grids", "advantages"]
        self.checked = dict.fromkeys([*names, *(["groups"] if entry.trained else []), "replay", "texts"], 0)
        self.texts = TextCount()
        self.silent = 0  # groups without a signal
        self.thinned = 0  # episodes of which retention has kept a part
        self.without_tokens = 0  # of these, the ones whose advantages follow from tokens
        self._ids: set[str] = set()
        # Own code that has changed since would give other advantages.
        own = list(own_estimators(rules.grpo).keys() & {"grpo.advantage"})
        self._no_advantages = changed_code(rules.fingerprint, own) if entry.trained else None
        recomputed = entry.trained and self._no_advantages is None
        self._needs_tokens = recomputed and (
            rules.grpo.overlong is not None or load_estimator("advantage", rules.grpo).reads_tokens
        )
        self._separator = rules.rollout.effective_rules.turn_separator
        self._iterations = {key: list(own) for key, own in groupby(entry.parts, lambda name: name.partition("/")[0])}
        self.committed = {partition(number) for number in range(entry.iterations or 0)}
        self.beyond = set() if entry.iterations is None else self._iterations.keys() - self.committed
        every = list(self._iterations)
        size = 1 if limit is None else self._size()
        self._chosen = every if limit is None else [every[at] for at in spread(len(every), max(1, limit // size))]
        self.parts = sum(len(self._iterations[iteration]) for iteration in self._chosen)

    def run(self, why_not_replayed: str | None, progress: Progress) -> list[AuditCheck]:
        """All checks of the entry; `progress` counts its parts."""
        self._check_parts()
        each = None if self.limit is None else max(1, self.limit // max(1, len(self._chosen)))
        for iteration in self._chosen:
            self._check_iteration(self._iterations[iteration], each)
            progress.advance(len(self._iterations[iteration]))
            if not gc.isenabled():
                gc.collect()  # an environment of one's own may leave cycles
        self.checked["texts"] = self.texts.responses
        uncommitted = (
            f"{len(self.beyond)} iterations lie beyond the newest checkpoint: the next command makes them again"
        )
        left_out = "thinned by loop.retention: checks that need tokens or whole groups leave them out"
        notes = {
            "contract": [f"{self.thinned} episodes are {left_out}"] if self.thinned else [],
            "parts": [uncommitted] if self.beyond and self.entry.goes_on else [],
            "texts": self.texts.notes(),
            "groups": [describe_silent(self.silent, self.checked.get("groups", 0))],
            "advantages": [
                *([f"not computed again: {self._no_advantages}"] if self._no_advantages else []),
                *([f"{self.without_tokens} episodes are {left_out}"] if self.without_tokens else []),
            ],
            "replay": [f"not replayed: {why_not_replayed}"] if why_not_replayed else [],
        }
        return [
            build_check(name, self.entry.name, count, self.found[name], notes.get(name, ()))
            for name, count in self.checked.items()
        ]

    def _size(self) -> int:
        """Episodes of an iteration, by the first part that can be read."""
        for read in self.entry.parts.values():
            try:
                return max(1, int(read().num_rows))
            except Exception:  # noqa: BLE001, S112 - a part that cannot be read is a finding of its own
                continue
        return 1

    def _check_parts(self) -> None:
        """No iteration is missing, and the parts of each one are numbered without a gap."""
        found = [f"{name} is missing" for name in sorted(self.committed - self._iterations.keys())]
        for iteration, names in self._iterations.items():
            if iteration in self.beyond and not self.entry.goes_on:
                found.append(f"{iteration} lies beyond the newest checkpoint")
            if list(names) != [f"{iteration}/part-{number:03d}" for number in range(len(names))]:
                found.append(f"{iteration} has the parts {', '.join(names)}")
        self._note("parts", len(self._iterations), [(None, problem) for problem in found])

    def _check_iteration(self, names: Sequence[str], each: int | None) -> None:
        episodes: list[Trajectory] = []
        scored: list[Trajectory] = []  # the same with what scores follow from
        whole = has_tokens = True
        for name in names:
            try:
                table = self.entry.parts[name]()
                self._note("contract", table.num_rows)
                validate_trajectories(table)
                stored = table_to_trajectories(table)
                thinning = read_thinning(table.schema) or Thinning()
            except Exception as error:  # noqa: BLE001 - every error of reading is a finding
                self._note("contract", 0, [(getattr(error, "trajectory_id", None), str(error))], name)
                whole = False
                continue
            self._check_episodes(name, stored, each, thinning.tokens)
            self.thinned += len(stored) * (not thinning.tokens or thinning.episodes > 1)
            whole, has_tokens = whole and thinning.episodes == 1, has_tokens and thinning.tokens
            episodes += stored
            scored += stored if thinning.tokens else map(_with_stand_ins, stored, thinning.measures["response_tokens"])
        self.texts.add(turn.text for episode in episodes for turn in assistant_turns(episode))
        if not whole:  # scores are of whole iterations
            return
        if not self.entry.trained:
            self._note("advantages", len(episodes), check_untrained(episodes), names[0])
            return
        grpo, rollout = self.rules.grpo, self.rules.rollout
        silent, groups = count_silent(episodes)
        self.silent += silent
        self._note("groups", groups, check_groups(episodes, grpo.group_size), names[0])
        if self._no_advantages is not None:
            return
        if self._needs_tokens and not has_tokens:
            self.without_tokens += len(episodes)
            return
        found = check_advantages(
            scored, grpo, self.rules.task, self.rules.reward.args, over_sampled=rollout.over_sampling > 1
        )
        self._note("advantages", len(episodes), found, names[0])

    def _check_episodes(
        self, name: str, stored: Sequence[Trajectory], each: int | None, has_tokens: bool = True
    ) -> None:
        twice = [(episode.trajectory_id, "its id occurs in another part too") for episode in stored]
        self._note("contract", 0, [one for one in twice if one[0] in self._ids], name)
        self._ids |= {episode.trajectory_id for episode in stored}
        if not has_tokens:  # retention has left them out; the checks below compare tokens
            return
        chosen = stored if each is None else [stored[place] for place in spread(len(stored), each)]
        parity = check_token_parity(chosen, self.policy.codec, turn_separator=self._separator)
        self._note("token parity", len(chosen), parity, name)
        self._note("response ends", len(chosen), check_response_ends(chosen, self.policy.end_ids), name)
        self._note("image grids", len(chosen), check_image_grids(chosen, self.policy.reader), name)
        if self.replayer is not None:
            self._note("replay", len(chosen), self.replayer.differences(chosen, self.prompts), name)

    def _note(
        self, check: str, checked: int, found: Sequence[tuple[str | None, str]] = (), part: str | None = None
    ) -> None:
        self.checked[check] += checked
        self.found[check] += [(one, problem if part is None else f"{part}: {problem}") for one, problem in found]


def build_check(check: str, subject: str, checked: int, found: Found, notes: Sequence[str] = ()) -> AuditCheck:
    """A check of episodes from what it has found."""
    lines = tuple(problem if one is None else f"{one}: {problem}" for one, problem in found)
    ids = dict.fromkeys(one for one, _ in found if one is not None)
    return AuditCheck(check, subject, checked, lines, tuple(notes), tuple(ids))


def _with_stand_ins(episode: Trajectory, sampled: int) -> Trajectory:
    """An episode without tokens, with a mask and a version in their place from which scores follow as from its own.

    Args:
        sampled: how many tokens the policy has sampled.
    """
    version = -1 if episode.drop_reason in (MIXED_VERSIONS, STALE) else 0
    return replace(episode, loss_mask=np.ones(sampled, np.int8), weight_spans=[(version, 0, sampled)])


def entries_of_run(
    run: str,
    parts: Sequence[Mapping[str, Callable[..., pa.Table]]],
    splits: Mapping[str, Sequence[Mapping[str, Any]] | None],
    *,
    iterations: int | None = None,
    goes_on: bool = False,
) -> list[AuditedEntry]:
    """The entries of a training run.

    Args:
        run: namespace.
        parts: of its `trajectories`, `eval_trajectories` and `held_out_trajectories`.
        splits: rows of `prompts`, `validation_prompts` and `eval_prompts`; None: no longer stored.
        iterations: of training that are committed.
        goes_on: whether the training has not reached its goal.
    """
    return [
        AuditedEntry(
            f"{run}.{name}", tables, splits[split], None if number else iterations, goes_on, trained=not number
        )
        for number, (name, tables, split) in enumerate(zip(SPLITS, parts, TABLES.values(), strict=True))
    ]


def audit_splits(
    splits: Mapping[str, Sequence[Mapping[str, Any]] | None], rules: RunRules, *, shared: bool
) -> list[AuditCheck]:
    """Check the prompts of a run: they are the rows that it was trained on, and no two splits share one.

    Args:
        shared: whether the data report names values that should be apart and are not.
    """
    stored = {name: list(rows) for name, rows in splits.items() if rows is not None}
    found: Found = [
        (None, f"{name}: other rows than the run was trained on")
        for name, rows in stored.items()
        if (wanted := rules.fingerprint.get(f"input.{name}")) is not None and hash_rows(rows) != wanted
    ]
    leaks, notes = check_splits(stored, rules.task.key, rules.task.apart, known=shared)
    count = sum(map(len, stored.values()))
    notes += [f"{name} are no longer stored" for name in splits if name not in stored]
    return [build_check("splits", rules.task.name, count, found + leaks, notes)]


def audit_stored_files(checkpoints: Mapping[str, Path], folders: Mapping[str, Path]) -> list[AuditCheck]:
    """Check the files of a run.

    Args:
        checkpoints: folders of policies and checkpoints; every file is compared with the digest in its manifest.
        folders: of the run, by name; every file below them is opened by its format's reader.
    """
    counts = {name: sum(1 for _ in _files(folder)) for name, folder in folders.items()}
    damaged: list[str] = []
    with track("check files", len(checkpoints) + sum(counts.values()), keep=False) as progress:
        for name, folder in checkpoints.items():
            if (reason := _damage(folder)) is not None:
                damaged.append(f"{name}: {reason}")
            progress.advance()
        refused = {name: tuple(audit_files(folder, progress)) for name, folder in folders.items()}
    checks = [AuditCheck("files", name, counts[name], found) for name, found in refused.items()]
    return [AuditCheck("digests", "checkpoints", len(checkpoints), tuple(damaged)), *checks]


def audit_edits(outputs: Path, *, contract: bool) -> list[AuditCheck]:
    """Check whether trajectory files were changed after they were written, as far as that is quick.

    Args:
        outputs: folder of a run's outputs.
        contract: whether each file is checked against the contract, too.
    """
    try:
        index = read_index(outputs, task_or_plain)
    except TornFileError:  # the check of the contract names it
        return []
    checks: list[AuditCheck] = []
    for kind in SPLITS:
        name, files = f"{outputs.parent.name}.{kind}", trajectory_files(outputs / kind)
        checks.append(AuditCheck("edits", name, len(files), tuple(find_edits(index, outputs, kind))))
        broken = []
        for path in files if contract else ():
            try:
                validate_trajectories(read_trajectories(path))
            except Exception as error:  # noqa: BLE001 - every error of reading is a finding
                broken.append(f"{path.parent.name}/{path.stem}: {error}")
        if contract:
            checks.append(AuditCheck("contract", name, len(files), tuple(broken)))
    return checks


def audit_forks(files: Sequence[Path], outputs: Path) -> list[AuditCheck]:
    """Check the values of turns that were measured of a run; a table of another run has no rows here.

    Args:
        files: of `turn_values` of all runs.
        outputs: folder of the run's outputs.
    """
    tables: dict[Path, list[dict[str, Any]]] = defaultdict(list)
    broken: dict[Path, Found] = defaultdict(list)
    for path in files:
        try:
            rows = pq.read_table(path, partitioning=None).cast(TURN_VALUES).to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            broken[path.parents[1]].append((None, f"{path.parent.name}/{path.stem}: {error}"))
            continue
        own = [row for row in rows if (row["run"], row["run_id"]) == (outputs.parent.name, outputs.name)]
        tables[path.parents[1]] += own
    if not any(tables.values()) and not broken:
        return []
    index = read_index(outputs, task_or_plain).select(["trajectory_id", "reward"]).to_pylist()
    rewards = {row["trajectory_id"]: row["reward"] for row in index}
    return [
        build_check(
            "turn values",
            f"{folder.parents[1].name}/{folder.parent.name}",
            len(tables[folder]),
            broken[folder] + check_turn_values(tables[folder], rewards),
        )
        for folder in dict.fromkeys([*tables, *broken])
        if tables[folder] or broken[folder]
    ]


def warn_of_findings(checks: Sequence[AuditCheck]) -> None:
    """Log the first findings of each check."""
    for check in checks:
        for finding in check.findings[:SHOWN]:
            logger.warning("audit: %s of %s: %s", check.check, check.subject, finding)


def print_audit(title: str, checks: Sequence[AuditCheck]) -> None:
    """A table of the checks on standard output."""
    rows = [
        (
            check.check,
            check.subject,
            str(check.checked),
            "failure" if check.findings else "ok",
            "\n".join(check.findings[:SHOWN] or check.notes),
        )
        for check in checks
    ]
    print_table(title, ("check", "of", "checked", "state", "found"), rows, {"ok": "green", "failure": "bold red"})


def as_record(checks: Sequence[AuditCheck]) -> dict[str, Any]:
    """JSON values of an audit: `checks`, the fields of `AuditCheck`, and `findings`, their number."""
    return {"checks": [asdict(check) for check in checks], "findings": sum(len(check.findings) for check in checks)}


def _damage(folder: Path) -> str | None:
    try:
        manifest = read_manifest(folder)
    except CorruptFolderError as error:
        return str(error)
    return "it is missing, or has no manifest" if manifest is None else None


def judge_audit(audit: Mapping[str, Any]) -> None:
    """Raise where an audit has findings.

    Raises:
        AuditError: names the run, the number of findings and the first one.
    """
    if audit["findings"]:
        check = next(check for check in audit["checks"] if check["findings"])
        raise AuditError(
            f"{audit['run']}/{audit['run_id']}: {audit['findings']} finding(s); first, {check['check']} of "
            f"{check['subject']}: {check['findings'][0]}"
        )


def check_token_parity(episodes: Sequence[Trajectory], codec: ChatCodec, *, turn_separator: bool = True) -> Found:
    """Compare episodes with the chat template.

    Args:
        codec: chat encoding of the policy that sampled them.
        turn_separator: whether the separator after a response's end token was written; `slime_exact` leaves it out.

    Returns:
        One entry per turn that differs, with both sides; empty where all is equal.
    """
    found: Found = []
    rendered: dict[Any, list[np.ndarray]] = {}
    for episode in episodes:
        # The text around the responses does not depend on them, and rendering it is most of the work.
        key = tuple(
            None
            if turn.role == "assistant"
            else (turn.role, turn.text, *(episode.image_grid_thw[i] for i in turn.image_indices))
            for turn in episode.turns
        )
        if key not in rendered:
            rendered[key] = list(_expected_ids(episode, codec, turn_separator))
        pieces = iter(rendered[key])
        for number, turn in enumerate(episode.turns):
            ids = episode.token_ids[turn.token_start : turn.token_end]
            if turn.role == "assistant":
                what, stored, expected = "response text", turn.text, codec.decode_response(ids)
            else:
                what, stored, expected = "ids", ids.tolist(), next(pieces).tolist()
            if stored != expected:
                problem = f"turn {number}: {what}: stored {stored!r}, expected {expected!r}"
                found.append((episode.trajectory_id, problem))
    return found


def rendered_pieces(turns: Sequence[Turn], codec: ChatCodec) -> list[str]:
    """Text of the template around the responses: before the first one, between two, and after the last one.

    The end token of a response belongs to the response. A template that rewrites earlier responses renders the whole
    conversation differently from what the policy saw; then each piece is rendered as it was appended.
    """
    if codec.rewrites_history:
        later = [_message(turn) for turn in turns if turn.role != "assistant"]
        return [codec.render(later[:1]), *map(codec.render_observation, later[1:])]
    messages: list[Message] = [
        {"role": turn.role, "content": f"{_OPEN}{number}{_CLOSE}"} if turn.role == "assistant" else _message(turn)
        for number, turn in enumerate(turns)
    ]
    text = codec.render(messages, generation_prompt=turns[-1].role != "assistant")
    end = codec.decode([codec.end_id])
    pieces: list[str] = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            piece, _, text = text.partition(f"{_OPEN}{number}{_CLOSE}")
            pieces.append(piece)
            text = text.removeprefix(end)
    return [*pieces, text]


def _message(turn: Turn) -> Message:
    images = [{"type": "image"} for _ in turn.image_indices]
    content = split_placeholders(turn.text, images) if images else [{"type": "text", "text": turn.text}]
    return {"role": turn.role, "content": content}


def _expected_ids(episode: Trajectory, codec: ChatCodec, turn_separator: bool) -> Iterator[np.ndarray]:
    """Ids of each turn that is no response; none of an episode that failed before its prompt was encoded."""
    if not episode.turns:
        return
    pieces = iter(rendered_pieces(episode.turns, codec))
    for number, turn in enumerate(turn for turn in episode.turns if turn.role != "assistant"):
        ids = codec.expand(codec.encode_text(next(pieces)), [episode.image_grid_thw[i] for i in turn.image_indices])
        yield ids[len(codec.separator_ids) :] if number and not turn_separator else ids


# Audit of a run's files: only formats from an allow-list, each one opened by its reader.


def _read_parquet(path: Path) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for _ in file.iter_batches(batch_size=256):
            pass


def _read_safetensors(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        file.keys()


def _read_image(path: Path) -> None:
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as image:
        image.load()


def _read_json_lines(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            json.loads(line)


def _read_database(path: Path) -> None:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _read_yaml(path: Path) -> None:
    import yaml

    yaml.safe_load(path.read_text(encoding="utf-8"))


READERS: dict[str, Callable[[Path], None]] = {
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".jsonl": _read_json_lines,
    ".png": _read_image,
    ".db": _read_database,
    ".yml": _read_yaml,
    ".yaml": _read_yaml,
    **dict.fromkeys(
        (".html", ".txt", ".jinja", ".md", ".csv", ".svg", ".xsb", ".log", ".lock"),
        methodcaller("read_text", encoding="utf-8"),
    ),
}
UNSUFFIXED = frozenset({".gitkeep"})


def audit_files(folder: Path, progress: Progress | None = None) -> list[str]:
    """Findings on the files below a folder, sorted by path; an empty list is a clean folder.

    Args:
        folder: of a run, or of all data; includes hidden and temporary files.
        progress: counts the files.

    Returns:
        One line with the reason per file whose suffix is not in the allow-list, or that its reader refuses.
    """
    findings = []
    for path in sorted(_files(folder)):
        if (reason := _refusal(path)) is not None:
            findings.append(f"{path.relative_to(folder).as_posix()}: {reason}")
        if progress is not None:
            progress.advance()
    return findings


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name not in UNSUFFIXED)


def _refusal(path: Path) -> str | None:
    if (reader := READERS.get(path.suffix)) is None:
        return f"suffix {path.suffix!r} is not in the allow-list"
    try:
        reader(path)
    except Exception as error:  # noqa: BLE001 - each reader has its own error types; every one is a finding
        return f"its format's reader refuses it ({type(error).__name__}: {error})"
    return None
