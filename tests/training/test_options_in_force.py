"""Every field of the training options has an effect, and the right one.

Fields that shape a step are in the cases of the reference step; the others have a function below, registered under
their names. A new field without either fails the first test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from geo_sokoban_pipeline.config.estimators import ESTIMATORS
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.grpo.scoring import apply_scores, score_groups
from geo_sokoban_pipeline.runs.storage import Complete
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import build_sample
from geo_sokoban_pipeline.training.collecting import build_sampler
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.grpo_loop import (
    LogProbGapError,
    update_policy,
)
from geo_sokoban_pipeline.training.sft import run_sft
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories
from option_fields import leaves
from policies.library import sample_log_probs
from task_options import TrainOptions
from training import reference
from training.setup import Setup, by_iteration, copied, run_loop, settings, weights
from training.step_cases import CASES

SECTIONS = ("grpo", "optimizer", "prompts", "loop", "warm_start", "rollout.sampling")
# Options of other parts, with tests of their own; a section that is neither here nor above fails.
OTHERS = {"task", "policy", "env", "reward", "rollout", "evaluation"}
# Effects that need other processes, or counted memory: fields and the tests that show them.
ELSEWHERE = {
    "loop.report_share": ("../pipelines/test_live.py", "test_the_page_is_there_from_the_first_iteration"),
    **{
        f"loop.retention.{name}": (
            "../pipelines/test_retention.py",
            "test_training_is_the_same_and_the_newest_iteration_is_whole",
        )
        for name in ("newest", "tokens", "episodes", "images")
    },
    "loop.max_staleness": ("test_ahead.py", "test_an_iteration_is_rolled_out_with_the_weights_before_the_last_step"),
    "processes": ("test_worker_group.py", "test_runs_of_two_processes_are_equal_and_continue_bit_for_bit"),
    **dict.fromkeys(
        ("placement", "ray.address", "ray.strategy"),
        ("test_ray_runs.py", "test_a_submitted_run_on_two_nodes_has_the_same_bits_as_one_of_this_machine"),
    ),
    **dict.fromkeys(
        ("ray.cpus", "ray.gpus", "ray.resources", "ray.patience"),
        ("../distributed/test_ray.py", "test_ranks_that_find_no_place_are_an_error_with_what_there_is"),
    ),
    "rank_timeout": ("test_worker_group.py", "test_ranks_that_do_not_get_on_count_as_lost"),
    "ray.max_restarts": (
        "test_ray_runs.py",
        "test_a_run_whose_ranks_are_killed_ends_as_the_undisturbed_one",
    ),
    "ray.min_processes": ("test_ray_runs.py", "test_lost_nodes_cost_their_iterations_and_then_a_rank"),
    "sharding": ("test_ranks_equal_one.py", "test_steps_of_ranks_are_those_of_one"),
    "replicas": ("test_ranks_equal_one.py", "test_steps_of_ranks_are_those_of_one"),
    "backend": ("test_megatron_parity.py", "test_classes_are_megatrons_and_a_rank_holds_its_part_alone"),
    "megatron.tensor_parallel": (
        "test_megatron_parity.py",
        "test_classes_are_megatrons_and_a_rank_holds_its_part_alone",
    ),
    "megatron.sequence_parallel": ("test_megatron_parity.py", "test_sequence_parallel_layers_see_a_part_of_the_tokens"),
    "optimizer.gradient_checkpointing": (
        "test_step_memory.py",
        "test_checkpointing_keeps_two_rows_a_token_and_layer_or_a_patch_and_block",
    ),
    "optimizer.gradient_sync": ("test_ranks_work.py", "test_gradients_are_shared_out_after_each_micro_batch"),
    "optimizer.offload": ("test_offload.py", "test_units_are_offloaded"),
    "optimizer.reduce_dtype": ("test_ranks_equal_one.py", "test_gathers_in_bfloat16_are_as_good_as_one_process"),
    "optimizer.vision_patches": ("test_step_memory.py", "test_vision_passes_bound_the_peak_of_a_step"),
}
# Groups, refills and prompts are drawn for real in the tests of collecting; here is which rule is taken from where.
ELSEWHERE |= {
    **dict.fromkeys(
        ("grpo.groups", "grpo.group_size", "grpo.max_refill", "grpo.min_groups"),
        ("test_collecting.py", "test_groups_are_drawn_until_enough_carry_a_signal"),
    ),
    "grpo.advantage_args.continuations": (
        "test_state_values.py",
        "test_a_small_budget_measures_states_after_unlikely_responses",
    ),
    "grpo.advantage_args.each": ("test_state_values.py", "test_every_state_behind_a_prompt_gets_equally_many"),
    "grpo.filter": ("test_loop.py", "test_no_signal_commits_without_an_update"),
    "prompts.order": ("test_seeds.py", "test_prompts_are_of_run_seed_iteration_and_refill"),
    "loop.keep_best": ("test_nodes.py", "test_the_best_policy_is_kept_and_becomes_the_final_one"),
    **{
        f"rollout.sampling.{name}": ("../rollout/engines/test_sampling.py", "test_frequencies_follow_the_distribution")
        for name in ("top_k", "top_p", "greedy")
    },
}
Effect = Callable[[Setup, Path], None]
EFFECTS: dict[str, Effect] = {}


def effect_of(*fields: str) -> Callable[[Effect], Effect]:
    """Register a check under the fields whose effect it shows."""

    def register(check: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(fields, check))
        return check

    return register


def test_every_field_is_shown_to_have_an_effect() -> None:
    names = set(leaves(TrainOptions))
    # A field of an estimator's own options is shown under its name, whichever estimators have it.
    estimators = [(kind, one) for kind, own in ESTIMATORS.items() for one in own.values()]
    names |= {f"grpo.{kind}_args.{name}" for kind, one in estimators for name in one.arguments.model_fields}
    names -= {f"grpo.{kind}_args" for kind in ESTIMATORS}
    wanted = {name for name in names if name.startswith(tuple(f"{section}." for section in SECTIONS))}
    wanted |= {name for name in names if name.split(".")[0] not in OTHERS | {"warm_start", *SECTIONS}}
    shown = {name for case in CASES if not case.same for name in case.changed} | {*EFFECTS, *ELSEWHERE}
    assert sorted(wanted - shown) == [], "fields without a check"
    assert sorted(shown - names) == [], "checks of fields that are no more"
    for file, test in ELSEWHERE.values():
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def run(setup: Setup, changes: dict[str, Any]) -> list[Any]:
    """Chunks of a run, see `by_iteration`."""
    return list(by_iteration(run_loop(setup, settings(setup.options, changes))))


@effect_of("grpo.overlong")
def the_penalty_of_long_episodes_enters_the_advantage_alone(setup: Setup, tmp_path: Path) -> None:
    lengths = np.array([episode.loss_mask.sum() for episode in setup.episodes])
    longest, buffer = int(np.percentile(lengths, 75)), int(np.ptp(lengths)) // 2 + 1
    changes = {"grpo.advantage": "dr_grpo", "grpo.normalize": "none", "grpo.advantage_clip": None}
    changes["grpo.overlong"] = {"length": longest, "buffer": buffer}
    scores = score_groups(setup.episodes, settings(setup.options, changes).grpo, SOKOBAN, {})
    penalty = [-min(1.0, max(0.0, (length - longest + buffer) / buffer)) for length in lengths]
    shaped = [float(episode.reward or 0.0) + less for episode, less in zip(setup.episodes, penalty, strict=True)]
    assert -1.0 in penalty and any(-1.0 < less < 0.0 for less in penalty)
    for episode, value, score in zip(setup.episodes, shaped, scores.episodes, strict=True):
        own = [
            one for other, one in zip(setup.episodes, shaped, strict=True) if other.group_index == episode.group_index
        ]
        assert score is not None and score.advantage == pytest.approx(value - np.mean(own), abs=1e-9)


@effect_of("grpo.max_log_prob_difference")
def gap_of_trainer_and_engine(setup: Setup, _: Path) -> None:
    """The trained policy is not the one that played: the mean gap decides, from either side of the bound."""
    options = settings(setup.options, {"grpo.old_log_probs": "recompute"})
    episodes = copy.deepcopy(setup.episodes)
    apply_scores(episodes, score_groups(episodes, options.grpo, SOKOBAN, options.reward.args))
    backend = TorchBackend(copied(setup.trained), options.optimizer)
    samples = [build_sample(episode, setup.policy) for episode in episodes]
    gaps = [np.abs(values - s.rollout_log_probs) for values, s in zip(backend.log_probs(samples), samples, strict=True)]
    mean = float(np.concatenate(gaps).mean())
    assert mean > 0.01
    for bound, stops in ((0.99 * mean, True), (1.01 * mean, False)):
        grpo = options.grpo.model_copy(update={"max_log_prob_difference": bound})
        before = weights(backend.policy)
        if stops:
            with pytest.raises(LogProbGapError, match="differ by .* more than grpo.max_log_prob_difference"):
                update_policy(episodes, backend.policy, backend, grpo, options.optimizer, 0, 0)
        else:
            update_policy(episodes, backend.policy, backend, grpo, options.optimizer, 0, 0)
        assert torch.equal(before, weights(backend.policy)) == stops


def test_the_update_of_a_stored_iteration_takes_its_own_denominator(setup: Setup) -> None:
    """Log-probs that a run with `recompute` stored are not those of the rollout."""
    grpo, found = settings(setup.options, {"grpo.old_log_probs": "rollout"}).grpo, []
    for stored in (None, -1.0):
        episodes = copy.deepcopy(setup.episodes)
        apply_scores(episodes, score_groups(episodes, grpo, SOKOBAN, setup.options.reward.args))
        for episode in episodes:
            episode.old_log_probs = stored if stored is None else np.full(len(episode.token_ids), stored, np.float32)
        backend = TorchBackend(copied(setup.trained), setup.options.optimizer)
        update_policy(episodes, backend.policy, backend, grpo, setup.options.optimizer, 0, 0)
        found.append(weights(backend.policy))
    assert torch.equal(*found) and not torch.equal(found[0], weights(setup.trained))


class Products(TorchDispatchMode):
    """Notes the rows of every matrix product of a width."""

    def __init__(self, width: int, rows: list[int]) -> None:
        super().__init__()
        self.width, self.rows = width, rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.shape[-1] == self.width:
            self.rows.append(len(result))
        return result


@effect_of("optimizer.max_tokens", "optimizer.logit_chunk")
def size_of_passes(setup: Setup, _: Path) -> None:
    """Rows of logits that are computed at once; that the step stays the same is a case of the reference step."""
    episodes = copy.deepcopy(setup.episodes)
    apply_scores(episodes, score_groups(episodes, setup.options.grpo, SOKOBAN, setup.options.reward.args))
    samples = [build_sample(episode, setup.policy) for episode in episodes]
    tokens = sum(len(sample.targets) for sample in samples)

    def rows(**changes: int) -> list[int]:
        seen: list[int] = []
        policy = copied(setup.policy)
        options = setup.options.optimizer.model_copy(update=changes)
        with Products(policy.model.config.text_config.vocab_size, seen):
            TorchBackend(policy, options).log_probs(samples)
        return seen

    assert rows() == [tokens]
    longest = max(sample.length for sample in samples)
    assert len(rows(max_tokens=longest)) > len(rows(max_tokens=3 * longest)) > 1
    assert len(rows(max_tokens=1)) == len(samples)
    chunks = rows(logit_chunk=7)
    assert sum(chunks) == tokens and set(chunks[:-1]) == {7} and chunks[-1] <= 7


@effect_of("prompts.floor")
def floor_of_weights(setup: Setup, _: Path) -> None:
    """How often prompts of the first length are drawn that are never solved, while others are every second time."""
    lengths = [row["solution_length"] for row in setup.rows]
    first, shares = min(lengths), []
    for floor in (1e-4, 1.0):
        changes = {"prompts.order": "solve_rate", "prompts.floor": floor}
        sampler = build_sampler(setup.rows, settings(setup.options, changes), 0, None)
        seen = [0.0 if length == first else 0.5 for length in lengths]
        sampler.update([*range(len(lengths))] * 200, seen * 200)
        shares.append(sum(lengths[index] == first for turn in range(400) for index in sampler.draw(turn, 1)) / 400)
    assert shares[0] < 0.02
    assert abs(shares[1] - 1 / len(set(lengths))) < 0.06


@effect_of("threads")
def threads_of_torch(setup: Setup, _: Path) -> None:
    assert torch.get_num_threads() == 1
    try:
        run(setup, {"grpo.groups": 1, "grpo.group_size": 1, "rollout.max_turns": 1, "threads": 2})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@effect_of("loop.iterations", "loop.save_interval", "loop.eval_interval", "loop.eval_prompts", "loop.keep_last")
def length_and_intervals(setup: Setup, _: Path) -> None:
    changes = {"loop.iterations": 5, "loop.save_interval": 2, "loop.eval_interval": 2, "loop.eval_prompts": 3}
    changes |= {"loop.keep_last": 1, "loop.keep_best": False, "grpo.groups": 1}
    _, *chunks, done = run(setup, changes)
    assert done[3] == Complete(5) and len(chunks) == 5
    saved = [name for chunk in chunks for name in chunk[3]]
    assert saved == ["iter=00001", "iter=00003", "iter=00004"]
    assert [new.keep for chunk in chunks for new in chunk[3].values()] == [[1], [3], [4]]
    entries = chunks[-1][3]["iter=00004"].write.entries
    start, newest = (
        [chunks[at][2][f"iter={at:05d}"][f"eval/{name}/sampled_{what}"] for what in ("solve_rate", "low", "high")]
        for at, name in ((0, "start"), (3, "validation"))
    )
    assert entries["validated"] == {
        "start": {"iteration": -1, "solve_rate": start[0], "episodes": 3, "error": (start[2] - start[1]) / 2},
        "newest": {"iteration": 3, "solve_rate": newest[0], "episodes": 3, "error": (newest[2] - newest[1]) / 2},
    }
    evaluated = [name for chunk in chunks for name in chunk[1]]
    assert evaluated == ["iter=00000/part-000", "iter=00002/part-000", "iter=00004/part-000"]
    for chunk in chunks:
        for table in chunk[1].values():
            assert {e.task_id for e in table_to_trajectories(table)} == {row["level_hash"] for row in setup.rows[:3]}


SHORT = {
    "warm_start.steps": 3,
    "warm_start.episodes_per_step": 1,
    "warm_start.warmup_steps": 2,
    "warm_start.decay_fraction": 0.0,
    "warm_start.validate_every": 1,
    "warm_start.validation_episodes": 1,
}
# All fields of a run at once: each must matter, set back alone to what `SHORT` and the defaults have.
SFT_RUNS: list[dict[str, Any]] = [
    {
        "warm_start.steps": 4,
        "warm_start.episodes_per_step": 2,
        "warm_start.learning_rate": 0.002,
        "warm_start.weight_decay": 1.0,
        "warm_start.warmup_steps": 1,
        "warm_start.decay_fraction": 0.75,
    },
    {
        "warm_start.matrices": "adamw",
        "warm_start.betas": [0.3, 0.4],
        "warm_start.clip": 0.02,
        "warm_start.learning_rate": 1e-3,
    },
]


def sft(setup: Setup, changes: dict[str, Any], *, written_out: bool) -> torch.Tensor:
    """Displacement of the weights by a short SFT."""
    options = settings(setup.options, SHORT | changes)
    policy, warm = copied(setup.trained), options.warm_start
    if written_out:
        expert = Demonstrator(setup.rows, policy, options, 0, "training")
        size = warm.episodes_per_step
        numbers = [range(step * size, (step + 1) * size) for step in range(warm.steps)]
        reference.imitate(policy, [[expert.demonstrate(n) for n in step] for step in numbers], warm)
    else:
        run_sft(policy, setup.rows, setup.rows, options, 0)
    return weights(policy) - weights(setup.trained)


@effect_of(*(name for changes in SFT_RUNS for name in changes))
def sft_steps(setup: Setup, _: Path) -> None:
    for changes in SFT_RUNS:
        wanted = sft(setup, changes, written_out=True)
        error = float((sft(setup, changes, written_out=False) - wanted).norm() / wanted.norm())
        assert error < 1e-3, (changes, error)
        for name in changes:
            without = sft(setup, {other: changes[other] for other in changes if other != name}, written_out=True)
            effect = float((without - wanted).norm() / wanted.norm())
            assert effect > 1e-2, (name, effect)


@effect_of("warm_start.max_tokens")
def size_of_sft_passes(setup: Setup, _: Path) -> None:
    seen: list[int] = []
    policy = copied(setup.policy)
    policy.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    counts = []
    for budget in (8192, 1):
        changes = {"warm_start.steps": 1, "warm_start.episodes_per_step": 2, "warm_start.max_tokens": budget}
        run_sft(policy, setup.rows, setup.rows, settings(setup.options, SHORT | changes), 0)
        counts.append(len(seen))
        seen.clear()
    assert counts == [1 + 1, 2 + 1], "two demonstrations together or apart, and the validation"


@effect_of("warm_start.validate_every", "warm_start.validation_episodes", "warm_start.play_every")
def sft_validations(setup: Setup, _: Path) -> None:
    changes = {"warm_start.steps": 5, "warm_start.validate_every": 2, "warm_start.validation_episodes": 3}
    changes |= {"warm_start.play_every": 3, "loop.eval_prompts": 1}
    options = settings(setup.options, SHORT | changes)
    policy = copied(setup.policy)
    history, _ = run_sft(policy, setup.rows, setup.rows, options, 0)
    assert [row["step"] for row in history if "validation_loss" in row] == [2, 4, 5]
    assert [row["step"] for row in history if "greedy_solve_rate" in row] == [3, 5]
    held_out = Demonstrator(setup.rows, policy, options, 0, "validation")
    with torch.no_grad():
        values = [sample_log_probs(policy, held_out.demonstrate(number)) for number in range(3)]
    assert history[-1]["validation_loss"] == pytest.approx(-float(torch.cat(values).mean()), rel=1e-3)


@effect_of("warm_start.stop_below")
def end_of_sft(setup: Setup, _: Path) -> None:
    for bound, steps in ((100.0, 1), (1e-6, 3)):
        options = settings(setup.options, SHORT | {"warm_start.stop_below": bound})
        history, _ = run_sft(copied(setup.policy), setup.rows, setup.rows, options, 0)
        assert history[-1]["step"] == steps


EXPERT = """
class Expert:
    def __init__(self, *words):
        self.words = words

    def respond(self, env, generator):
        return " ".join(self.words)


def build_teacher(name, patience, noise, word=""):
    return Expert(name, str(patience), str(noise), word)
"""


@effect_of(*(f"warm_start.teacher.{name}" for name in ("factory", "name", "patience", "noise", "args", "max_turns")))
def the_expert(setup: Setup, folder: Path) -> None:
    """An own expert that says what it was made with, in so many turns; what the built-in ones do has its own tests."""
    (folder / "expert.py").write_text(EXPERT, encoding="utf-8")
    expert = {"factory": str(folder / "expert.py"), "name": "random", "patience": 7, "noise": 0.25}
    expert |= {"args": {"word": "hello"}, "max_turns": 2}
    options = settings(setup.options, {f"warm_start.teacher.{name}": value for name, value in expert.items()})
    sample = Demonstrator(setup.rows, setup.policy, options, 0, "training").demonstrate(0)
    text = setup.policy.tokenizer.decode(sample.labels, skip_special_tokens=True)
    assert text == "random 7 0.25 hello" * 2


@pytest.mark.parametrize("check", dict.fromkeys(EFFECTS.values()), ids=lambda check: check.__name__)
def test_effects(check: Effect, setup: Setup, tmp_path: Path) -> None:
    check(setup, tmp_path)
