"""Results of a study: one JSON value, read from its stored runs, from which every table and figure follows.

Solve rates are kept as counts, so that readers of the file can check and pool them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.config.study import StudyDefinition
from geo_sokoban_pipeline.envs.base import PATIENT
from geo_sokoban_pipeline.reporting.curves import validation_series
from geo_sokoban_pipeline.reporting.study_tables import MODES
from geo_sokoban_pipeline.runs.folders import RunStore, prompts_folder
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.studies.plan import StudyRun
from geo_sokoban_pipeline.studies.run import StudyFolder
from geo_sokoban_pipeline.tasks import task_of

# Iterations whose memory is compared, each the mean of five.
_EARLY, _LATE = 20, 200
_MAKER = ("cores", "processor", "machine", "python", "torch", "transformers", "version", "commit")
logger = logging.getLogger(__name__)


class ResultsError(ValueError):
    """Runs that cannot stand in one table; the message names them and the way out."""


def collect_results(
    name: str, study: StudyDefinition, members: Sequence[StudyRun], folder: StudyFolder
) -> dict[str, Any]:
    """Results of a study whose members are all finished.

    Returns:
        `study`, `task`, `title`, `chosen_on` (seeds with which the recipe was chosen), `max_minutes`,
        `least_spent`, `max_growth`, `bars`, `machine`, `made_with` (versions and machine by run id), `levels`
        (evaluation prompts), `intervals` (what the rows' intervals are over; a file without it has none), `seeds` (per
        seed: rows of the evaluation, CPU-seconds, minutes, memory, curves), `beside` (the same of further seeds),
        `sets` (per further set: title, levels, rows per seed); of a study that compares recipes, `planned` (changes of
        each by its name), and `recipes` (see `_describe_recipes`).
    """
    check_prompts(members)
    trained = [member for member in members if member.kind == "train" and not member.part]
    records = {member.run_id: folder.read_record(member) for member in members}
    described = {}
    for member in trained:
        controls = [other for other in members if other.kind == "control" and other.after == member.run_id]
        described[member.seed] = _describe_seed(member, controls, records[member.run_id])
    first = trained[0]
    summarised = [row for member in members for row in read_json(member.summary)["rows"]]
    return {
        "study": name,
        "task": first.task,
        "title": study.title or name,
        "chosen_on": list(study.chosen_on),
        "max_minutes": study.max_minutes,
        "least_spent": study.least_spent,
        "max_growth": study.max_growth,
        "bars": [criterion.model_dump(mode="json", exclude_none=True) for criterion in study.bars],
        "machine": describe_machine(records, [member.run_id for member in trained]),
        "made_with": {run_id: record["maker"] for run_id, record in records.items()},
        "levels": _describe_played(first, first),
        "teacher": first.parameters[f"train_{first.task}"]["warm_start"]["teacher"]["name"],
        # Summaries of before intervals were over clusters have other ones.
        **({"intervals": "clusters"} if all("clusters" in row for row in summarised) else {}),
        "seeds": [described[seed] for seed in study.seeds],
        "beside": [described[seed] for seed in study.beside],
        "sets": [_describe_set(further.name, further.title, members) for further in study.evaluations],
        **({"planned": study.recipes, "recipes": _describe_recipes(study, members)} if study.recipes else {}),
    }


def _describe_recipes(study: StudyDefinition, members: Sequence[StudyRun]) -> list[dict[str, Any]]:
    """`name`, `changes` and `seeds` of each recipe that is finished for every seed; the first one is the study's own.

    `code` has the hashes of the user's own code, where there is any.

    A seed has the solved and all episodes of the final policy by mode, CPU-seconds of GRPO, the same in multiples of
    those of the study's own recipe, iterations, and the mean shares of tokens that the loss and the importance rule
    have clipped (None: it has none).
    """
    from geo_sokoban_pipeline.training.sft import grpo_cpu_seconds

    found: list[dict[str, Any]] = []
    spent: dict[int, float] = {}  # by the study's own recipe
    for name, changes in {"": {}, **study.recipes}.items():
        own = {member.seed: member for member in members if member.kind == "train" and member.part == name}
        if not own.keys() >= set(study.seeds):
            continue
        seeds = []
        for seed in study.seeds:
            member = own[seed]
            metrics = RunStore(member.root).metrics(SourceOptions(run=f"train_{member.task}", run_id=member.run_id))
            rows = evaluation_rows(read_json(member.summary), member.task)
            seconds = grpo_cpu_seconds(metrics)
            spent.setdefault(seed, seconds)
            seeds.append(
                {
                    "seed": seed,
                    **{row["mode"]: [row["solved"], row["episodes"]] for row in rows if row["player"] == "final"},
                    "cpu_seconds": round(seconds, 1),
                    "spent": round(seconds / spent[seed], 3),
                    "iterations": len(metrics),
                    "clipped": _mean(metrics, "train/pg_clipfrac"),
                    "weights_clipped": _mean(metrics, "train/tis_clipfrac"),
                }
            )
        code = own[study.seeds[0]].parameters.get("code")
        found.append({"name": name, "changes": dict(changes), **({"code": code} if code else {}), "seeds": seeds})
    return found


def join_recipes(
    results: Mapping[str, Any], stored: Mapping[str, Any], code: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Results of a study with the recipes of an earlier file that are not among them, so that a table grows by rows.

    A recipe of the file stands if the study still plans it so, and if the study's own runs of both have the same
    rates on the same prompts in every seed: differences are taken from these. All others are named in the log.

    Args:
        results: of `collect_results`.
        stored: the same, of an earlier command, perhaps on another machine.
        code: hashes of the user's own code, as it is now, by the planned recipe that names it.
    """
    own, before = (each["recipes"][0]["seeds"] for each in (results, stored))
    rows = {recipe["name"]: recipe for recipe in results["recipes"]}
    kept = {}
    for recipe in stored["recipes"]:
        if (name := recipe["name"]) in rows:
            continue
        if name not in results["planned"]:
            why = "this command does not plan it. Give its options again, or write them into conf/local"
        elif (results["planned"][name], code.get(name, {})) != (recipe["changes"], recipe.get("code", {})):
            why = "its options or its code have changed since"
        elif _rates(own) != _rates(before) or results["levels"] != stored["levels"]:
            why = "its rates were compared with those of other runs"
        else:
            kept[name] = recipe
            continue
        logger.warning("study %s: the stored row %s goes: %s.", results["study"], name, why)
    runs = {f"{results['study']}-seed{seed['seed']}-{name}" for name in kept for seed in own}
    makers = {run_id: maker for run_id, maker in stored["made_with"].items() if run_id in runs}
    made_with = {**results["made_with"], **makers}
    workers = max(each["machine"]["other_workers"] for each in (results, *([stored] if kept else [])))
    rows |= kept
    return {
        **results,
        "machine": {**results["machine"], **_name_makers(made_with.values()), "other_workers": workers},
        "made_with": made_with,
        "recipes": [rows[name] for name in ("", *results["planned"]) if name in rows],
    }


def _rates(seeds: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[seed["seed"], *(seed[mode] for mode in MODES), seed["iterations"]] for seed in seeds]


def _mean(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean over the iterations that have a metric; None: none has."""
    values = [row[name] for row in metrics if row.get(name) is not None]
    return fmean(values) if values else None


def check_prompts(members: Sequence[StudyRun]) -> None:
    """See that all runs whose rows stand in one table have the same evaluation prompts.

    Raises:
        ResultsError: they have not.
    """
    tables: dict[str, dict[str, list[str]]] = {}
    for member in members:
        table = tables.setdefault(member.part if member.kind == "evaluate" else "", {})
        table.setdefault(read_json(member.summary)["prompts_hash"], []).append(member.run_id)
    for played in tables.values():
        if len(played) > 1:
            others = " and ".join(", ".join(run_ids) for run_ids in played.values())
            raise ResultsError(
                f"{others} were evaluated on different prompts: their data settings differ, or the code that "
                "makes the rows has changed in between. Give fresh=true."
            )


def _describe_seed(member: StudyRun, controls: Sequence[StudyRun], record: Mapping[str, Any]) -> dict[str, Any]:
    from geo_sokoban_pipeline.training.sft import grpo_cpu_seconds

    metrics = RunStore(member.root).metrics(SourceOptions(run=f"train_{member.task}", run_id=member.run_id))
    history = read_json(member.models / "policy" / "manifest.json")["history"]
    spent = {"warm_start": history[-1]["cpu_seconds"] if history else 0.0, "grpo": grpo_cpu_seconds(metrics)}
    curves = {"warm_start": sft_curve(history), "grpo": loop_curve(metrics)}
    rows = evaluation_rows(read_json(member.summary), member.task)
    steps = {"warm_start": history[-1]["step"] if history else 0, "grpo": len(metrics)}
    for control in controls:
        name, manifest = f"control_{control.part}", read_json(control.models / "policy" / "manifest.json")
        spent[name], steps[name] = manifest["cpu_seconds"], manifest["budget"]["steps"]
        curves[name] = sft_curve(manifest["history"])
        rows += evaluation_rows(read_json(control.summary), member.task)
    seconds = record["seconds"]
    return {
        "seed": member.seed,
        "run_id": member.run_id,
        "minutes": None if seconds is None else round(seconds / 60, 2),
        "cpu_seconds": {name: round(value, 1) for name, value in spent.items()},
        "steps": steps,
        "memory_gb": _memory(metrics),
        "rows": rows,
        "curves": curves,
    }


def _memory(metrics: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """[iteration, GB of the run and its processes] after 20 and 200 iterations; `[]` where it has fewer."""
    held = {row["iteration"]: row.get("perf/memory_gb") for row in metrics}
    found = []
    for at in (_EARLY, _LATE):
        around = [held.get(near) for near in range(at - 2, at + 3)]
        if None in around:
            return []
        found.append([at, round(fmean(map(float, filter(None, around))), 3)])
    return found


def evaluation_rows(summary: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """Rows of an evaluation as counts, where `warm_start` is the policy before GRPO, and `final` the last one."""
    first, last, report = summary["policies"][0], summary["policies"][-1], task_of(task).report
    names = {
        first: "warm_start",
        last: last if last.startswith("control_") else "final",
        f"{last}_blank": "final_blank",
    }
    return [
        {
            "player": _player(row["policy"], names),
            "mode": row["mode"],
            "solved": row["solved"],
            "episodes": row["episodes"],
            **{name: row[name] for name in ("clusters", "low", "high") if name in row},
            **report.study_counts(row),
        }
        for row in summary["rows"]
    ]


def _player(policy: str, names: Mapping[str, str]) -> str:
    if policy.startswith("teacher"):
        return "teacher_patient" if policy.endswith(PATIENT) else "teacher"
    return names.get(policy, policy)


def sft_curve(history: Iterable[Mapping[str, float]]) -> list[list[float]]:
    """[CPU-seconds, sampled rate, greedy rate] of each validation by rollout."""
    return [
        [round(row["cpu_seconds"], 1), *(round(row[f"{mode}_solve_rate"], 4) for mode in MODES)]
        for row in history
        if "sampled_solve_rate" in row
    ]


def loop_curve(metrics: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The same for the loop, counted from its start; an iteration's validation uses the weights after it."""
    from geo_sokoban_pipeline.training.sft import grpo_cpu_seconds

    spent = [0.0, *accumulate(grpo_cpu_seconds([row]) for row in metrics)]  # by the number of iterations trained
    sampled, greedy = (dict(validation_series(metrics, mode, mode, "").points) for mode in MODES)
    both = sorted(sampled.keys() & greedy.keys())
    return [[round(spent[int(at)], 1), round(sampled[at], 4), round(greedy[at], 4)] for at in both]


def _describe_played(member: StudyRun, trained: StudyRun) -> dict[str, Any]:
    """The evaluation prompts of a member, and how many of them another one, `trained`, has trained on."""
    task = task_of(member.task)
    column, what = task.apart
    data, train = member.parameters[member.task], member.parameters[f"train_{member.task}"]
    counts = (train["loop"]["eval_prompts"], data["counts"]["validation"])
    return {
        **task.report.study_entry(read_json(member.summary), data),
        "distinct": len(_values(member, "eval_prompts", task.key)),
        f"shared_{what}": len(_values(member, "eval_prompts", column) & _values(trained, "prompts", column)),
        "validation_count": min(count or 10**9 for count in counts),
    }


def _describe_set(name: str, title: str, members: Sequence[StudyRun]) -> dict[str, Any]:
    played = [member for member in members if member.kind == "evaluate" and member.part == name]
    by_id = {member.run_id: member for member in members}
    return {
        "name": name,
        "title": title,
        "levels": _describe_played(played[0], by_id[str(played[0].after)]),
        "seeds": [
            {"seed": member.seed, "rows": evaluation_rows(read_json(member.summary), member.task)} for member in played
        ],
    }


def _values(member: StudyRun, table: str, column: str) -> set[str]:
    """Values of a column in a table of the data that a member has worked on."""
    import pyarrow.parquet as pq

    folder = prompts_folder(member.root, member.task, read_json(member.summary)["data_id"])
    with pq.ParquetFile(folder / f"{table}.parquet") as file:
        return set(file.read(columns=[column]).column(0).to_pylist())


def describe_machine(records: Mapping[str, Mapping[str, Any]], trained: Sequence[str]) -> dict[str, Any]:
    """Machines and versions of the members: a list of distinct values for each entry, in the order of the members.

    A study that was interrupted may be finished by another commit or on another machine. How many ran side by side is
    counted separately for training runs, whose minutes are reported.
    """

    def most(chosen: Iterable[Mapping[str, Any]]) -> int:
        return max((record["workers"] for record in chosen), default=1)

    others = [record for run_id, record in records.items() if run_id not in trained]
    return {
        "workers": most(records[run_id] for run_id in trained),
        "other_workers": most(others),
        **_name_makers(record["maker"] for record in records.values()),
    }


def _name_makers(makers: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found = list(makers)
    return {name: list(dict.fromkeys(maker.get(name) for maker in found)) for name in _MAKER}
