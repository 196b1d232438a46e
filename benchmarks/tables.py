"""Results of the benchmarks as text and images of the docs: pure functions of the stored results."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.peer.report import describe_ratio

from geo_sokoban_pipeline.reporting.charts import Series, Shape, draw_chart_file
from geo_sokoban_pipeline.reporting.study_docs import CHART_SIZE

Found = Mapping[str, Any]
PHASES = ("rollout", "scoring", "update", "writing")
_FEW = 5  # iterations at either end of a curve
_COLOURS = {"rollout": "warm", "scoring": "legal", "update": "greedy", "writing": "training", "in all": "final"}


def costs_of_phases(found: Found) -> dict[str, list[float]]:
    """Milliseconds of CPU time per episode by phase and in all, one value per size of an iteration."""
    sizes = found["sizes"]
    costs = {phase: [1000 * found["seconds"][str(size)][phase] / size for size in sizes] for phase in PHASES}
    return {**costs, "in all": [sum(costs[phase][at] for phase in PHASES) for at in range(len(sizes))]}


def growth(found: Found) -> float:
    """Cost of an episode of the largest iteration, in multiples of one of the smallest."""
    costs = costs_of_phases(found)["in all"]
    return costs[-1] / costs[0]


def writing_share(found: Found) -> float:
    """Share of writing in the CPU time of an iteration of the default recipe."""
    usual = found["usual"]
    return usual["seconds"]["writing"] / sum(usual["seconds"].values())


def render_scaling(found: Found) -> str:
    """Table, figure and the two numbers of `benchmarks/test_scaling.py`."""
    costs, usual = costs_of_phases(found), found["usual"]
    lines = [
        f"| CPU time per episode, ms | {' | '.join(f'{size:,} episodes' for size in found['sizes'])} |",
        f"|---|{'---:|' * len(found['sizes'])}",
        *(f"| {phase} | {' | '.join(f'{cost:.2f}' for cost in row)} |" for phase, row in costs.items()),
    ]
    return "\n\n".join(
        [
            "\n".join(lines),
            "![CPU time per episode over the size of an iteration](img/scaling.svg)",
            f"An episode of the largest iteration costs {growth(found):.2f} times one of the smallest. Writing takes "
            f"{100 * writing_share(found):.1f} % of the default recipe's iteration of {usual['episodes']} episodes "
            f"({1000 * usual['seconds']['writing']:.0f} of {1000 * sum(usual['seconds'].values()):,.0f} ms).",
        ]
    )


def rank_ratio(row: Found) -> float:
    """Seconds of a step on two ranks over those on one, the least of all steps each."""
    least: float = min(row["two"]) / min(row["one"])
    return least


def render_ranks(found: Found) -> str:
    """Table of `benchmarks/test_ranks.py`."""
    lines = [
        "| seconds of a step | one rank | two ranks | ratio |",
        "|---|---:|---:|---:|",
        *(
            f"| `sharding: {row['sharding']}` | {min(row['one']):.2f} | {min(row['two']):.2f} | {rank_ratio(row):.2f} |"
            for row in found["rows"]
        ),
    ]
    size = f"{found['parameters'] / 1e6:.1f} million weights, {found['episodes']} episodes, {found['tokens']:,} tokens"
    cpu = min(min(row["one_cpu"]) / min(row["one"]) for row in found["rows"])
    return (
        "\n".join(lines)
        + f"\n\nA policy of {size}; the least of {len(found['rows'][0]['one'])} steps each. One rank had "
        f"{100 * cpu:.0f} % of a core to itself."
    )


def plan_ratio(row: Found) -> float:
    """Planned bytes over those that a trace found."""
    return float(row["planned"] / row["traced"])


def render_plan(found: Found) -> str:
    """Table of `benchmarks/test_plan.py`."""
    lines = [
        "| `kedro run --pipelines=train_` | model | ranks | largest phase | planned, GB | traced, GB | ratio |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for row in found["rows"]:
        sizes = f"{row['planned'] / 1e9:.2f} | {row['traced'] / 1e9:.2f} | {plan_ratio(row):.3f}"
        lines.append(f"| `{row['command']}` | {row['model']} | {row['ranks']} | {row['phase']} | {sizes} |")
    return "\n".join(lines)


def worker_ratio(found: Found) -> float:
    """Episodes per second of two rollout workers over those of one, the most of all rounds each."""
    ratio: float = max(found["rates"]["2"]) / max(found["rates"]["1"])
    return ratio


def render_workers(found: Found) -> str:
    """Table of `benchmarks/test_rollout_workers.py`."""
    one, two = (max(found["rates"][name]) for name in ("1", "2"))
    idle = ", ".join(f"{100 * share:.0f} %" for share in min(found["idle"], key=sum))
    return (
        "| episodes per second | one worker | two workers | ratio |\n|---|---:|---:|---:|\n"
        f"| boards of 384 px, {found['turns']} turns at most | {one:.1f} | {two:.1f} | {worker_ratio(found):.2f} |\n\n"
        f"{found['episodes']} episodes a round; the most of {len(found['rates']['1'])} rounds each. The two workers "
        f"had nothing to do for {idle} of the best round's time."
    )


def ahead_ratio(found: Found) -> float:
    """Seconds of an iteration with rollouts beside the training over those of one without."""
    beside, in_turn = (found[name]["step_time"] + found[name]["save_time"] for name in ("beside", "in_turn"))
    return float(beside / in_turn)


def render_ahead(found: Found) -> str:
    """Table of `benchmarks/test_ahead.py`."""
    lines = ["| seconds of an iteration | rollout | update | in all, with what is stored |", "|---|---:|---:|---:|"]
    for name, title in (("in_turn", "one after the other"), ("beside", "`loop.max_staleness: 1`")):
        part = found[name]
        whole = part["step_time"] + part["save_time"]
        lines.append(f"| {title} | {part['rollout_time']:.2f} | {part['update_time']:.2f} | {whole:.2f} |")
    return (
        "\n".join(lines) + f"\n\nThe ratio is {ahead_ratio(found):.2f}. Means of {found['iterations']} iterations of "
        f"{found['episodes']} episodes, with one rank and one rollout worker."
    )


def writing_shares(found: Found) -> tuple[float, float]:
    """Share of writing in the seconds of an iteration of a whole run, and in its CPU-seconds."""
    seconds = found["seconds"]
    wall = seconds["write_time"] / (seconds["step_time"] + seconds["save_time"])
    return wall, seconds["write_cpu_time"] / (seconds["cpu_time"] + seconds["save_cpu_time"])


def render_writing(found: Found) -> str:
    """Results of `benchmarks/test_writing.py`."""
    wall, cpu = writing_shares(found)
    seconds = found["seconds"]
    return (
        f"In the default run with its {found['processes']} processes, an iteration of {found['episodes']} episodes "
        f"spends {1000 * seconds['write_time']:.0f} ms on writing: {100 * wall:.1f} % of its "
        f"{seconds['step_time'] + seconds['save_time']:.2f} s, and {100 * cpu:.1f} % of its CPU-seconds (mean of "
        f"{found['iterations']} iterations without validation; all of saving, with checkpoint and MLflow, "
        f"{1000 * seconds['save_time']:.0f} ms)."
    )


def render_browser(found: Found) -> str:
    """Results of `benchmarks/test_browser.py`."""
    building, shown, episode = found["building"], found["list"], found["episode"]
    run = building["run_mb"]
    return (
        f"A site of {building['episodes']:,} episodes with a page each is built in {building['seconds']:.1f} s "
        f"({building['site_mb']:.0f} MB; the run itself has {run['trajectories']:.0f} MB of trajectories, "
        f"{1000 * run['trajectories'] / building['episodes']:.1f} kB an episode, and {run['episodes']:.1f} MB of "
        f"index).\n\nIn headless Chromium the list of {shown['episodes']:,} episodes ({shown['mb']:.0f} MB) opens in "
        f"{shown['seconds']:.2f} s, and a query with an order takes {shown['query_seconds']:.2f} s. An episode opens "
        f"in {episode['seconds']:.2f} s from the list, in {episode['by_address_seconds']:.2f} s by its address in a "
        "new window, which reads the list first."
    )


def render_index(found: Found) -> str:
    """Results of `benchmarks/test_index.py`."""
    lines = ["| iterations of | files | DuckDB | polars |", "|---:|---:|---:|---:|"]
    for one in found["iterations"]:
        seconds = one["seconds"]
        lines.append(f"| {one['size']:,} | {one['files']:,} | {seconds['duckdb']:.2f} s | {seconds['polars']:.2f} s |")
    return (
        f"Shares of solved and of oscillating episodes by iteration, over an index of {found['episodes']:,} episodes "
        f"({found['mb']:.0f} MB):\n\n" + "\n".join(lines)
    )


def render_audit(found: Found) -> str:
    """Results of `benchmarks/test_audit.py`."""
    return (
        f"An audit of {found['episodes']:,} episodes without a model takes {found['cpu_seconds']:.0f} CPU-seconds of "
        f"one core and {found['gib']:.2f} GiB, the start of the command included."
    )


def render_notebook(found: Found) -> str:
    """Results of `benchmarks/test_first_notebook.py`."""
    return (
        f"On a run of {found['episodes']:,} episodes all cells of `notebooks/01_explore_trajectories.ipynb` take "
        f"{found['gib']:.2f} GiB at most, libraries included, and {found['seconds']:.0f} s."
    )


def memory_growth(recipe: Found) -> float:
    """Share by which the memory of a run grows from the first of its stored iterations to the last."""
    return float(recipe["memory_gb"][-1][1] / recipe["memory_gb"][0][1] - 1)


def render_memory(found: Found) -> str:
    """Results of `benchmarks/test_memory.py`."""
    recipes = found["recipes"]
    iterations = [at for at, _ in recipes[0]["memory_gb"]]
    lines = [
        f"| resident memory, GB, after iteration | {' | '.join(map(str, iterations))} | growth |",
        f"|---|{'---:|' * (len(iterations) + 1)}",
    ]
    for recipe in recipes:
        held = " | ".join(f"{size:.2f}" for _, size in recipe["memory_gb"])
        lines.append(f"| `{recipe['name']}` | {held} | {100 * memory_growth(recipe):+.1f} % |")
    return "\n".join(lines)


def render_weights(found: Found) -> str:
    """Results of `benchmarks/test_weights.py`."""
    seconds, cpu, size = found["seconds"], found["cpu_seconds"], found["bytes"] / 1e9
    ways = {
        "tensors": "in requests, `tensors`",
        "disk": "through a folder, `disk`",
        "group": "by a process group, `group`",
        "before": "the same, tensor by tensor in buckets of 512 MiB",
    }
    return "\n".join(
        [
            f"| {size:.2f} GB from {found['ranks']} ranks to a server | seconds | CPU-seconds of driver and ranks "
            "| of the server | share of the last row |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {text} | {seconds[way]:.2f} | {cpu[way][0]:.2f} | {cpu[way][1]:.2f} "
                f"| {sum(cpu[way]) / sum(cpu['before']):.2f} |"
                for way, text in ways.items()
            ),
        ]
    )


def draw_scaling(found: Found) -> str:
    """SVG of the cost per episode by phase."""
    costs = costs_of_phases(found)
    series = [
        Series(phase, _COLOURS[phase], list(zip(map(float, found["sizes"]), row, strict=True)), style="dots")
        for phase, row in costs.items()
    ]
    shape = Shape("episodes of an iteration", *CHART_SIZE, (0.0, 1.15 * max(costs["in all"])))
    return draw_chart_file("What an episode costs, ms of CPU time", series, shape)


def curve_gap(found: Found, name: str) -> float:
    """Mean |difference| of a layout's rewards from those of the first layout, over iterations and seeds."""
    first = next(iter(found["curves"].values()))
    return fmean(
        abs(one - other)
        for pair in zip(found["curves"][name], first, strict=True)
        for one, other in zip(*pair, strict=True)
    )


def _first_difference(found: Found, name: str) -> str:
    """Iterations from which on a layout's rewards are not those of the first layout, one of each seed."""
    first = next(iter(found["curves"].values()))
    pairs = [list(zip(*pair, strict=True)) for pair in zip(found["curves"][name], first, strict=True)]
    at = [next((str(place) for place, (one, other) in enumerate(pair) if one != other), "never") for pair in pairs]
    return ", ".join(at)


def _norm_gaps(found: Found, name: str, part: slice) -> float:
    """Largest relative difference of a layout's gradient norms from those of the first layout, in some iterations."""
    first = next(iter(found["norms"].values()))
    return max(
        abs(one / other - 1)
        for pair in zip(found["norms"][name], first, strict=True)
        for one, other in zip(*(curve[part] for curve in pair), strict=True)
    )


def render_backends(found: Found) -> str:
    """Table and figure of `benchmarks/test_backends.py`."""
    ends = slice(_FEW), slice(-_FEW, None)
    seeds, times = ", ".join(map(str, found["seeds"])), f"first {_FEW} iterations | last {_FEW}"
    lines = [
        f"| seeds {seeds} | reward, {times} | reward differs from iteration | mean difference | "
        f"gradient norm differs by, {times} |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for at, (name, curves) in enumerate(found["curves"].items()):
        cells = [", ".join(f"{fmean(curve[part]):.3f}" for curve in curves) for part in ends]
        cells += [_first_difference(found, name), f"{curve_gap(found, name):.4f}"] if at else ["–", "–"]
        cells += [f"{_norm_gaps(found, name, part):.0e}" if at else "–" for part in ends]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n\n".join(
        [
            "\n".join(lines),
            "Differences are those from the first row; of the gradient norm the largest relative one.",
            "![Reward of both backends over iterations](img/backends.svg)",
        ]
    )


def draw_backends(found: Found) -> str:
    """SVG of the reward over iterations, mean over the seeds; of the first layout the seeds as well, as faint lines."""
    (first, curves), *_ = found["curves"].items()
    series = [Series(first, "final", list(enumerate(curve)), style="faint") for curve in curves]
    means = [(name, list(enumerate(map(fmean, zip(*curves, strict=True))))) for name, curves in found["curves"].items()]
    one, two, megatron = means
    series += [
        Series(one[0], "final", one[1]),
        Series(two[0], "random", two[1], style="dashed"),
        Series(megatron[0], "warm", megatron[1], style="dots"),
    ]
    title = f"Mean reward of an iteration's {found['episodes']} episodes"
    return draw_chart_file(title, series, Shape("iteration", *CHART_SIZE))


def render_engine(found: Found) -> str:
    """Results of `benchmarks/test_engine.py`."""
    rows = [
        f"| {row['turns']} | {row['cached']:,.0f} | {row['uncached']:,.0f} | {row['cached'] / row['uncached']:.1f} |"
        for row in found["engine"]
    ]
    head = "| turns | tokens per CPU-second with the cache | without | ratio |\n|---:|---:|---:|---:|\n"
    return f"{head}" + "\n".join(rows) + f"\n\n{_describe_observations(found)}".rstrip()


def render_speed(stored: Mapping[str, Found | None]) -> str:
    """The bullets of the README, one for each of three benchmarks that has results; docs/benchmarks.md has all."""
    sentences = []
    if peer := stored["peer"]:
        rows = peer["comparisons"]
        whole = " and ".join(
            f"{describe_ratio(row['ratios']['whole'])} times at {row['setting']['turns']} turns" for row in rows
        )
        uncached = " and ".join(f"{row['ratios']['cache_off']['median']:.1f}" for row in rows)
        sentences.append(
            f"- CPU-seconds of a GRPO step of TRL's `GRPOTrainer`, against this project: {whole}; {uncached} with the "
            "cache of this project off, which TRL's `generate` does not have."
        )
    if engine := stored["engine"]:
        ratios = " and ".join(
            f"{row['cached'] / row['uncached']:.1f}× at {row['turns']} turns" for row in engine["engine"]
        )
        sentences.append(f"- Reusing the KV cache across turns multiplies the tokens per second: {ratios}.")
    if writing := stored["writing"]:
        sentences.append(
            f"- Checking and writing every episode takes {100 * writing_shares(writing)[0]:.1f} % of the default run's "
            "iterations, validations not counted."
        )
    return "\n".join(sentences)


def render_maker(found: Found) -> str:
    """Versions and machine of a benchmark."""
    if "made_with" not in found:
        return "The commit and the machine of this run were not recorded."
    made = found["made_with"]
    return (
        f"Measured with this package {made['version']} (commit {made['commit'] or 'unknown'}), Python "
        f"{made['python']}, torch {made['torch']}, transformers {made['transformers']}, on {made['cores']} cores "
        f"({made['processor'] or 'processor not named by the system'}, {made['machine']})."
    )


def _describe_observations(found: Found) -> str:
    if "new" not in found:  # stored results that tell of nothing but repeated rollouts, whose boards caches hold
        return ""
    new, observing, environments = found["new"], found["observing"], found["environments"]
    return (
        f"In the first ten iterations of a run, {100 * new['prompts']:.1f} % of an iteration's prompts and "
        f"{100 * new['boards']:.1f} % of its boards are new. There, making observations takes "
        f"{100 * observing['fresh']:.1f} % of a rollout of {found['episodes']} episodes, environments as a whole "
        f"{100 * environments['fresh']:.1f} %; where the same rollout is repeated at once, "
        f"{100 * observing['again']:.1f} % and {100 * environments['again']:.1f} %."
    )
