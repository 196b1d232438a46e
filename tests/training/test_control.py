"""The control: its budget, its levels, and that it continues exactly where the warm start ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, write_policy
from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.sft import (
    Budget,
    ControlError,
    check_source,
    continue_warm_start,
    control_options,
    drawn_prompts,
    grpo_cpu_seconds,
    plan_budget,
    repeat_prompts,
    run_sft,
    time_steps,
)
from geo_sokoban_pipeline.trajectories.parquet import write_trajectories
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table
from task_options import ControlOptions, TrainOptions
from training.setup import Setup, copied, settings, weights

SETTINGS = {"seed": 0, "warm_start.steps": 1000, "input.prompts": "a"}


def start(steps: int = 1000, **fingerprint: Any) -> PolicyFolder:
    history = [{"step": 1, "cpu_seconds": 0.2}, {"step": steps, "cpu_seconds": 100.0}] if steps else []
    stored = {**SETTINGS, "input.base_policy": "b", **fingerprint}
    return PolicyFolder(Path("policy"), {"history": history, "fingerprint": stored})


def metrics(*seconds: float) -> list[dict[str, Any]]:
    return [{"perf/cpu_time": value, "perf/save_cpu_time": 0.5} for value in seconds]


@pytest.mark.parametrize(
    ("rows", "share", "steps"),
    [
        (metrics(99.5, 99.5), 1.0, 2000),  # 200 CPU-seconds at 0.1 a step
        (metrics(99.5, 99.5), 0.5, 1000),
        (metrics(99.5, 99.56), 1.0, 2001),  # rounded up
        (metrics(0.001), 0.01, 1),
        ([{"perf/cpu_time": 10.0, "perf/save_cpu_time": None}], 1.0, 100),
    ],
)
def test_steps(rows, share, steps):
    budget = plan_budget(start(), rows, episodes_per_step=24, share=share, cpu_seconds_per_step=0.1)
    assert (budget.steps, budget.first) == (steps, 24_000)
    # What `budget.json` and the control's manifest hold.
    assert asdict(budget) == {
        "grpo_cpu_seconds": pytest.approx(grpo_cpu_seconds(rows)),
        "cpu_seconds_per_step": 0.1,
        "steps": steps,
        "first": 24_000,
    }


@pytest.mark.parametrize(
    ("policy", "rows", "complete", "message"),
    [
        (start(steps=0), metrics(1.0), True, "has no warm start to continue"),
        (start(), [], False, "is not finished: 0 of loop.iterations=1 iterations"),
        (start(), metrics(1.0), False, "is not finished: 1 of loop.iterations=1 iterations"),
        (
            start(),
            metrics(1.0, 1.0),
            True,
            "2 of loop.iterations=1 iterations are stored. Train it to its end, or give",
        ),
        (start(), [{"iteration": 0}], True, "has no iterations with perf/cpu_time"),
        (
            start(seed=2),
            metrics(1.0),
            True,
            r"has other settings than this command.*\n  seed: stored 2, now 0\nA control may differ",
        ),
        (start(**{"input.prompts": "c"}), metrics(1.0), True, r"\n  input\.prompts: stored c, now a\n"),
        (start(**{"env.args.cell_px": 8}), metrics(1.0), True, r"\n  env\.args\.cell_px: stored 8, now \(absent\)\n"),
    ],
)
def test_runs_that_cannot_have_a_control_are_named(policy, rows, complete, message):
    check_source(start(), metrics(1.0), 1, complete=True, wanted=SETTINGS)  # as it should be
    with pytest.raises(ControlError, match=message):
        check_source(policy, rows, 1, complete=complete, wanted=SETTINGS)


def test_levels_come_as_often_as_they_were_drawn():
    prompts = [{"id": "1", "level_hash": "a", "solution_length": 3}, {"id": "2", "solution_length": 5}]
    repeated = repeat_prompts(prompts, {"a": 2, "2": 3}, SOKOBAN)
    assert [row["id"] for row in repeated] == ["2", "2", "2", "1", "1"]
    assert {row["solution_length"] for row in repeated} == {None}
    with pytest.raises(ControlError, match="1 levels of the source run are not in sokoban.prompts"):
        repeat_prompts(prompts, {"b": 1}, SOKOBAN)


def test_prompts_are_counted_by_group_over_all_files(tmp_path):
    """Each group once, however many episodes it has and in however many files they lie; dropped ones included."""
    files = []
    # (iteration, group, prompt, episodes); group 1 of iteration 1 lies in two files.
    parts = [[(0, 0, "a", 2), (0, 1, "b", 3)], [(1, 0, "a", 2), (1, 1, "c", 1)], [(1, 1, "c", 2), (1, 2, "a", 1)]]
    for number, groups in enumerate(parts):
        episodes = make_trajectories(sum(count for *_, count in groups), turns=1, group_size=1)
        keys = [group[:3] for group in groups for _ in range(group[3])]
        for place, (episode, (iteration, group, key)) in enumerate(zip(episodes, keys, strict=True)):
            episode.trajectory_id, episode.sample_index = f"p{number}/{place}", place
            episode.iteration, episode.group_index, episode.task_id = iteration, group, key
            episode.trained, episode.drop_reason = (False, "zero_std") if key == "b" else (True, None)
        files.append(tmp_path / f"part-{number}.parquet")
        write_trajectories(files[-1], trajectories_to_table(episodes, CONTEXT))
    assert drawn_prompts(files) == {"a": 3, "b": 1, "c": 1}
    assert drawn_prompts([]) == {}


def test_expert_of_the_control(train_options):
    assert control_options(train_options, ControlOptions()) == train_options
    optimal = control_options(train_options, ControlOptions(imitate="optimal")).warm_start.teacher
    assert (optimal.name, optimal.noise) == ("solver", 0.0)


@pytest.fixture(scope="module")
def options(setup: Setup) -> TrainOptions:
    warm = {"episodes_per_step": 4, "validation_episodes": 2, "decay_fraction": 0.0, "steps": 3}
    changes = {f"warm_start.{name}": value for name, value in warm.items()}
    return settings(setup.options, changes | {"loop.eval_prompts": 4})


def warmed(options: TrainOptions, **changes: Any) -> TrainOptions:
    return options.model_copy(update={"warm_start": options.warm_start.model_copy(update=changes)})


def imitate(setup: Setup, options: TrainOptions, **changes: Any) -> tuple[Policy, Any, list[dict[str, Any]]]:
    policy = copied(setup.policy)
    history, backend = run_sft(policy, setup.rows, setup.rows[:4], warmed(options, **changes), 0)
    return policy, backend, history


@pytest.fixture(scope="module")
def begun(setup: Setup, options: TrainOptions, tmp_path_factory: pytest.TempPathFactory) -> PolicyFolder:
    """The policy after three steps of SFT."""
    _, backend, history = imitate(setup, options)
    return write_policy(tmp_path_factory.mktemp("begun") / "policy", CheckpointWriter(backend, {"history": history}))


def test_a_control_is_the_warm_start_continued_bit_for_bit(
    setup: Setup, options: TrainOptions, begun: PolicyFolder
) -> None:
    """Without schedules, 3 steps and a control of 2 are 5 steps: weights, moments and numbers of demonstrations."""
    rows = setup.rows
    whole = weights(imitate(setup, options, steps=5)[0])
    assert {"optimizer.safetensors", "trainer_state.json"} <= set(begun.manifest["files"])
    budget = Budget(1.0, 0.1, steps=2, first=3 * 4)
    continued = load_policy(begun.path)
    # A control has no warm-up and no early end, whatever the warm start had.
    other = warmed(options, warmup_steps=7, stop_below=100.0)
    more, _ = continue_warm_start(continued, begun.path, rows, rows[:4], other, 0, budget)
    assert more[-1]["step"] == 2
    assert torch.equal(whole, weights(continued))
    # Each part matters: other numbers, or no moments, give other weights.
    repeated, forgetful = load_policy(begun.path), load_policy(begun.path)
    continue_warm_start(repeated, begun.path, rows, rows[:4], options, 0, replace(budget, first=0))
    run_sft(forgetful, rows, rows[:4], warmed(options, steps=2), 0, first=12)
    assert not any(torch.equal(whole, weights(policy)) for policy in (repeated, forgetful))


BUSY = """
import time

class Expert:
    made = 0

    def respond(self, env, generator):
        Expert.made += 1
        if {slow}:
            until = time.process_time() + 0.15
            while time.process_time() < until:
                pass
        return "<answer>up</answer>"


def build_teacher(name, patience, noise):
    return Expert()
"""


@pytest.mark.parametrize(
    ("slow", "rounds", "is_counted"),
    [("True", {"timed": 1, "rounds": 1}, True), ("1 < Expert.made <= 3", {"timed": 2}, False)],
    ids=["always slow", "slow in the first timed round alone"],
)
def test_timing_leaves_no_trace_and_the_cheapest_round_counts(
    setup: Setup,
    options: TrainOptions,
    begun: PolicyFolder,
    tmp_path: Path,
    slow: str,
    rounds: dict[str, int],
    is_counted: bool,
) -> None:
    before = {path: path.read_bytes() for path in begun.path.iterdir()}
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    (tmp_path / "busy.py").write_text(BUSY.format(slow=slow), encoding="utf-8")
    expert = options.warm_start.teacher.model_copy(update={"factory": str(tmp_path / "busy.py"), "max_turns": 1})
    chosen = warmed(options, teacher=expert, episodes_per_step=1)
    assert (time_steps(begun, setup.rows, chosen, 0, untimed=1, **rounds) >= 0.15) == is_counted
    assert torch.equal(drawn, torch.get_rng_state())
    assert {path: path.read_bytes() for path in begun.path.iterdir()} == before


def test_looking_on_changes_nothing(setup: Setup, options: TrainOptions) -> None:
    blind, _, plain = imitate(setup, options, validate_every=100)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    watched, _, history = imitate(setup, options, validate_every=1, play_every=2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(weights(blind), weights(watched))
    assert [row["step"] for row in plain] == [3]
    assert [row["step"] for row in history] == [1, 2, 3]
    assert ["sampled_solve_rate" in row for row in history] == [False, True, True]
    assert all(0 <= row["greedy_solve_rate"] <= 1 for row in history[1:])
    seconds = [row["cpu_seconds"] for row in history]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_demonstrations_of_one_pool_are_drawn_uniformly(setup: Setup, options: TrainOptions) -> None:
    """What `repeat_prompts` relies on: rows without a length are one difficulty, whatever their true lengths."""
    chosen = [row for row in setup.rows if row["solution_length"] == 1][:1]
    chosen += [row for row in setup.rows if row["solution_length"] == 2][:3]
    pool = repeat_prompts(setup.rows, {str(row["level_hash"]): 1 for row in chosen}, SOKOBAN)
    optimal = control_options(options, ControlOptions(imitate="optimal"))
    expert = Demonstrator(pool, setup.policy, optimal, 0, "training")
    drawn = Counter(expert.demonstrate(number).images[0].key for number in range(160))
    # Drawn by length first, the single level of its length would come 80 times.
    assert len(drawn) == 4 and all(25 <= count <= 55 for count in drawn.values()), drawn
