"""Estimators against the truth: planted errors are found for what they are, where everything is known exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from builders import make_trajectories
from geo_sokoban_pipeline.config.credit import RECIPE, CreditPipelineOptions, name_estimators
from geo_sokoban_pipeline.config.estimators import ESTIMATORS
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.evaluation.credit import (
    Turns,
    choose_turns,
    describe_turns,
    estimate_turns,
    measure_credit,
)
from geo_sokoban_pipeline.evaluation.forks import history_of
from geo_sokoban_pipeline.grpo.estimators import estimate_advantages, load_estimator
from geo_sokoban_pipeline.grpo.groups import Episodes
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.schema import TURN_VALUES

PROMPTS, GROUPS, SIZE = 12, 60, 8
FIRST, SECOND = 0.6, 0.7  # chances of action 1 in the first and in the second state


@pytest.fixture(scope="module")
def game():
    return play_game(0)


def play_game(seed):
    """Two turns with two actions each; a coin decides the reward, whose chance depends on prompt and actions."""
    generator = np.random.default_rng(seed)
    chances = generator.uniform(0, 1, (PROMPTS, 2, 2))
    values = chances @ [1 - SECOND, SECOND]  # after the first action
    roots = values @ [1 - FIRST, FIRST]
    count = PROMPTS * GROUPS * SIZE
    prompt = np.arange(count) // (GROUPS * SIZE)
    one, two = generator.random(count) < FIRST, generator.random(count) < SECOND
    one, two = one.astype(int), two.astype(int)
    chance = chances[prompt, one, two]
    reward = (generator.random(count) < chance).astype(np.float64)
    middle = PROMPTS + 2 * prompt + one  # numbers of states
    end = 3 * PROMPTS + 4 * prompt + 2 * one + two

    def pairs(first, second):
        return np.stack([first, second], axis=1).ravel()

    group = np.arange(count) // SIZE
    nothing = np.zeros(2 * count)
    turns = Turns(
        prompt=pairs(prompt, prompt),
        group=pairs(group, group),
        place=np.tile([0, 1], count),
        state=pairs(prompt, middle),
        result=pairs(middle, end),
        action=pairs(middle, end),
        value=pairs(roots[prompt], values[prompt, one]),
        gain=pairs(values[prompt, one] - roots[prompt], chance - values[prompt, one]),
        before=nothing,
        after=nothing,
        is_whole=pairs(group % GROUPS == 0, group % GROUPS == 0),
    )
    episodes = Episodes(
        group=group,
        reward=reward,
        trained=np.ones(count, bool),
        lengths=[np.ones(2, np.int64)] * count,
        turn_rewards=[np.array([0.0, one]) for one in reward],
        state_keys=[(int(a), int(b)) for a, b in zip(prompt, middle, strict=True)],
        success=[bool(one) for one in reward],
    )
    noise = pairs(
        (values * (1 - values))[prompt, one], chance * (1 - chance)
    )  # variance of the reward after each action
    ends = SimpleNamespace(values=values, roots=roots, middle=middle, prompt=prompt, one=one)
    return SimpleNamespace(turns=turns, episodes=episodes, rewards=pairs(reward, reward), noise=noise, ends=ends)


def measure(game, estimates, turns=None, **given):
    return measure_credit(estimates, game.turns if turns is None else turns, 0, **given)


def test_a_right_estimator_and_planted_errors(game):
    """An offset of the state, a bias of the action, and noise are each found, and nothing else is."""
    turns, generator = game.turns, np.random.default_rng(1)
    right = game.rewards - turns.value
    of_state = np.where(turns.place == 0, 0.3, -0.3)
    biased = 0.4 * ((turns.action + turns.prompt) % 2)
    noisy = generator.normal(0, 1.0, len(right))
    noise = np.sqrt(game.noise.mean())
    found = measure(game, right)
    assert found.scale.value == pytest.approx(1, abs=0.05)  # 3 standard deviations
    assert found.noise.value * found.scale.value == pytest.approx(noise, abs=0.01)
    assert found.offset.low == 0 and found.bias.low == 0 and max(found.offset.value, found.bias.value) < 0.03
    found = measure(game, 3 * right + of_state)
    assert found.scale.value == pytest.approx(3, abs=0.15) and found.bias.low == 0
    assert found.offset.value == pytest.approx(0.1, abs=0.01) and 0.08 < found.offset.low < found.offset.high < 0.12
    found = measure(game, right + biased)
    # The noise is that of the coin, as without the bias.
    assert found.bias.low > 0.1 and found.noise.value * found.scale.value == pytest.approx(noise, abs=0.01)
    assert found.bias_within.low > 0.1
    weighed = measure(game, right * (1 + turns.prompt % 3))
    assert weighed.bias.low > 0.02 and weighed.bias_within.low == 0  # prompts have other weights, and that is all
    found = measure(game, right + noisy)
    assert found.bias.low == 0 and found.noise.value * found.scale.value == pytest.approx(np.hypot(noise, 1), abs=0.02)
    found = measure(game, -right)
    assert found.scale.value < 0 and found.sign_errors.value > 0.5 and found.correlation.value < -0.3


def test_false_alarms_are_rare():
    """Of 40 right estimators: with intervals of 95 % 2 scales should miss 1, and 1 part be seen that is not there.

    More than 6 and 4 have chances below 1 %.
    """
    found = [measure(game, game.rewards - game.turns.value) for game in map(play_game, range(40))]
    assert np.mean([one.scale.value for one in found]) == pytest.approx(1, abs=0.01)
    assert sum(not one.scale.low < 1 < one.scale.high for one in found) <= 6
    assert sum(one.bias.low > 0 for one in found) <= 4 and sum(one.offset.low > 0 for one in found) <= 4


def test_errors_of_the_truth_are_subtracted(game):
    """A measured truth varies: unsubtracted, it would look like a smaller scale, a bias, and a weaker correlation."""
    turns, generator = game.turns, np.random.default_rng(2)
    error = generator.normal(0, 0.25, turns.result.max() + 1)
    variance = np.full(len(turns.gain), 0.25**2)
    measured = replace(
        turns, gain=turns.gain + error[turns.result] - error[turns.state], before=variance, after=variance
    )
    exact, found = measure(game, turns.gain), measure(game, turns.gain, measured)
    assert exact.correlation.value == pytest.approx(1) and exact.scale.value == pytest.approx(1)
    assert found.scale.low < 1 < found.scale.high and found.bias.low == 0
    assert found.correlation.low < 1.05 and found.correlation.high > 0.95
    plain = replace(measured, before=np.zeros_like(variance), after=np.zeros_like(variance))
    assert measure(game, turns.gain, plain).scale.high < 0.8 and measure(game, turns.gain, plain).correlation.high < 0.8
    # An estimate with the measured value in it has a part of the truth's error; it looks better unless that is told.
    ceiling = game.rewards - (turns.value + error[turns.state])
    told = measure(game, ceiling, measured, shared=variance)
    exact, untold = measure(game, game.rewards - turns.value), measure(game, ceiling, measured)
    assert told.correlation.value == pytest.approx(exact.correlation.value, abs=0.05) and told.offset.low == 0
    assert untold.correlation.low > exact.correlation.high and untold.offset.value > 0.2


@pytest.mark.parametrize(
    ("name", "args", "scale", "offset"),
    [
        ("dr_grpo", {}, 7 / 8, "prompt"),
        ("rloo", {}, 1.0, "prompt"),
        ("turn_return", {"gamma": 1.0, "leave_one_out": True}, 1.0, "prompt"),
        ("turn_return", {"gamma": 1.0, "baseline": "state", "leave_one_out": True}, 1.0, None),
    ],
)
def test_what_is_derived_of_estimators(game, name, args, scale, offset):
    """docs/credit.md: a baseline of the group leaves the value of the state over that of the prompt; one of the state
    nothing. Leaving the own episode out takes the factor (n − 1)/n away.
    """
    options = GrpoOptions(advantage=name, advantage_args=args)
    found = estimate_advantages(load_estimator("advantage", options), game.episodes)
    values = np.array([np.broadcast_to(row, 2) for row in found.values]).ravel()
    credit = measure(game, values)
    assert credit.scale.low < scale < credit.scale.high and credit.bias.low == 0
    ends = game.ends
    expected = np.sqrt(np.mean((ends.values[ends.prompt, ends.one] - ends.roots[ends.prompt]) ** 2)) if offset else 0.0
    by_turn = [row["offset"].value for row in credit.by_turn]
    assert by_turn[0] == pytest.approx(0, abs=0.04)
    assert by_turn[1] == pytest.approx(expected, abs=0.03)


def test_a_state_of_one_group_is_no_evidence(game):
    """Its square would hold its own noise."""
    turns = replace(game.turns, group=np.zeros_like(game.turns.group))
    found = measure(game, game.rewards, turns)
    assert np.isnan(found.offset.value) and np.isnan(found.scale.value)
    assert found.to_dict()["scale"] == {"value": None, "low": None, "high": None}


def test_the_table_has_every_advantage():
    """That of another policy is none of them. A row of the user's has neither filter nor scale unless it says so."""
    recipe = GrpoOptions(advantage_args={"gamma": 0.9})
    found = name_estimators(recipe, {"mine": {"advantage": "rloo", "filter": "zero_variance"}})
    assert {one.advantage for one in found.values()} == ESTIMATORS["advantage"].keys() - {"distillation", "vine"}
    assert found[RECIPE] == recipe and found["turn_return"].advantage_args["gamma"] == 0.95
    assert (found["grpo"].filter, found["grpo"].normalize, found["grpo"].advantage_clip) == ("none", "none", None)
    assert (found["mine"].filter, found["mine"].normalize) == ("zero_variance", "none")


def test_estimates_of_turns():
    """Each iteration by itself; the advantage of an episode is that of its turns; 0 where it is not trained."""
    episodes = [*make_trajectories(4, group_size=2), *make_trajectories(4, group_size=2, iteration=1)]
    for episode, reward in zip(episodes, (1.0, 0.0, 1.0, 1.0, 3.0, 0.0, 0.0, 0.0), strict=True):
        episode.reward = reward
    options = partial(GrpoOptions, advantage="dr_grpo", normalize="none", advantage_clip=None, min_groups=0)
    wanted = np.repeat([0.5, -0.5, 0, 0, 1.5, -1.5, 0, 0], 3)  # turns
    found = estimate_turns(episodes, options(filter="none"), task_of("sokoban"), {})
    assert found.tolist() == wanted.tolist()
    episodes[5].loss_mask[:] = 0
    wanted[15:18] = 0
    assert estimate_turns(episodes, options(filter="zero_variance"), task_of("sokoban"), {}).tolist() == wanted.tolist()


def test_turns_that_many_groups_have_taken_are_measured():
    (first,) = make_trajectories(1)

    def turn(iteration, group, said):
        tokens = first.token_ids.copy()
        tokens[first.turns[1].token_start] = said
        episode = replace(first, iteration=iteration, group_index=group, token_ids=tokens)
        return SimpleNamespace(episode=episode, turn=1)

    turns = [turn(1, 0, 1), turn(1, 0, 1), turn(2, 0, 1), turn(2, 0, 2), turn(2, 0, 2), turn(3, 1, 1), turn(0, 0, 3)]
    assert choose_turns(turns, 3, 0) == [*turns[:3], turns[5], turns[6]]
    assert choose_turns(turns, 4, 2) == turns[2:5]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"source": {"run": "train_sokoban", "checkpoint": "tiny"}}, "continuations need a stored policy"),
        ({"estimators": {"grpo": {"advantage": "rloo"}}}, "'grpo' is a row that every table has"),
        ({"estimators": {RECIPE: {"advantage": "rloo"}}}, "is a row that every table has"),
        ({"estimators": {"mine": {"advantage": "gpro"}}}, "did you mean grpo"),
        ({"estimators": {"mine": {"advantge": "grpo"}}}, "advantge"),
    ],
)
def test_what_no_table_can_have_is_refused_at_once(given, text):
    with pytest.raises(ValidationError, match=text):
        CreditPipelineOptions.model_validate({"source": {"run": "train_sokoban"}, **given})


def test_values_of_other_states_are_not_taken():
    """The same names, rolled out again with other tokens."""
    (episode,) = make_trajectories(1)
    rows = [
        {
            **dict.fromkeys(TURN_VALUES.names),
            **{"trajectory_id": episode.trajectory_id, "turn": 1, "history": history_of(episode, 1)},
            **{"value": 0.5, "advantage": 0.25, "variance": 0.2, "continuations": 10, "continuations_after": 0},
        }
    ]
    values = pa.Table.from_pylist(rows, schema=TURN_VALUES)
    turns = describe_turns([episode], values)
    assert (turns.gain[0], turns.before[0], turns.after[0]) == (0.25, 0.02, 0.0) and np.isnan(turns.gain[1:]).all()
    episode.token_ids[0] += 1
    with pytest.raises(ValueError, match="turn 1: the value was measured in another state"):
        describe_turns([episode], values)
