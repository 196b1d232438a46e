"""Forks of stored episodes: exact where the truth is known, and the episode itself where the seed is its own."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.grpo import ForkPipelineOptions, SourceOptions
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.env import build_env
from geo_sokoban_pipeline.envs.sokoban.solver import moves_to_goal, solve
from geo_sokoban_pipeline.evaluation.forks import Node, Outcome, describe_state, find_forks, fork_episodes, value_nodes
from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key
from geo_sokoban_pipeline.evaluation.rollouts import rollout_prompts
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.rollout.engines.base import Result
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings, responses_of
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.runs.policy_folder import write_policy
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of, task_or_plain
from geo_sokoban_pipeline.training.fork_players import AgentPlayer, PolicyPlayer
from rollout.scripted import PROMPT, CharacterPolicy, make_settings
from task_options import EnvOptions, RewardOptions

BOUNDS = (0.0, 0.0)
ABOUT = {"run": "train_sokoban", "run_id": "default", "forked_by": "sampler"}


def fork_options(**given: Any) -> ForkPipelineOptions:
    return ForkPipelineOptions(source=SourceOptions(run="train_sokoban"), **given)


@pytest.fixture(scope="module")
def played(tiny_policy, train_options, sokoban_rows):
    """Episodes with images each turn of an untrained policy that can say nothing but moves, and how to make more."""
    policy = replace(tiny_policy)
    said = [*policy.end_ids, *(int(policy.codec.encode_text(word)[0]) for word in ("Up", "Left", "Down", "Right"))]
    vars(policy)["banned_ids"] = np.setdiff1d(np.arange(policy.model.config.text_config.vocab_size), said)
    limits = train_options.rollout.model_copy(update={"max_turns": 4, "max_failed_share": 0.0})
    options = train_options.model_copy(update={"rollout": limits})
    rows, engine = sokoban_rows(6, max_solution=3), build_engine(policy, limits)
    episodes = rollout_prompts("e", 3, options, rows, policy, engine, sampling=limits.sampling, samples=3)
    settings = RolloutSettings(options.env, options.reward, limits, limits.sampling, 0, "sokoban")
    replayer = Replayer(policy, options.env, options.reward, limits, task_of("sokoban"))
    known = prompts_by_key(rows, task_of("sokoban"))
    return SimpleNamespace(
        episodes=episodes,
        known=known,
        replayer=replayer,
        roll=lambda requests: rollout(engine, policy, requests, settings),
    )


def test_a_fork_with_the_seed_of_the_episode_is_the_episode(played):
    turns = find_forks(played.episodes, played.replayer, played.known)
    assert len(turns) > len(played.episodes) and all(turn.left_out is None for turn in turns)
    requests = [
        EpisodeRequest(str(number), dict(turn.before.row), number, 0, turn.episode.seed, turn.before.past)
        for number, turn in enumerate(turns)
    ]
    for turn, again in zip(turns, played.roll(requests), strict=True):
        stored = turn.episode
        assert again.token_ids.tolist() == stored.token_ids.tolist() and again.images == stored.images
        assert np.abs(again.rollout_log_probs - stored.rollout_log_probs).max() < 1e-5
        assert (again.reward, again.status, again.metrics) == (stored.reward, stored.status, stored.metrics)


def play_of(played):
    def play(nodes, numbers):
        requests = [one for group, node in enumerate(nodes) for one in node.requests(group, 5, numbers)]
        ends: list[list[Outcome]] = [[] for _ in nodes]
        for episode in played.roll(requests):
            ends[episode.group_index].append(Outcome.of(episode.reward, episode.metrics))
        return ends

    return play


def test_advantages_of_an_episode_add_up(played):
    """From the value of its prompt to its reward; and the state after a turn is the one before the next."""
    table, counts = fork_episodes(
        played.episodes, played.replayer, played.known, play_of(played), fork_options(continuations=8), ABOUT, BOUNDS
    )
    rows = table.to_pylist()
    assert counts["turns"] == len(rows) > counts["histories"] and counts["left_out"] == 0
    assert counts["unshared"] == sum(row["continuations"] for row in rows) > counts["continuations"]
    for episode in played.episodes:
        own = [row for row in rows if row["trajectory_id"] == episode.trajectory_id]
        assert sum(row["advantage"] for row in own) == pytest.approx(episode.reward - own[0]["value"], abs=1e-12)
        assert [row["value_after"] for row in own] == [*(row["value"] for row in own[1:]), episode.reward]
        assert (own[-1]["continuations_after"], own[0]["turns_left"]) == (0, 4)
        assert own[0]["steps_left"] == episode.metrics["optimal_steps"] and own[0]["is_solvable"]
    # Episodes of a prompt begin in one state.
    first = {(row["group_index"], row["history"], row["value"]) for row in rows if row["turn"] == 1}
    assert len(first) == len({episode.group_index for episode in played.episodes})
    # The table does not depend on which other episodes it is about.
    few, _ = fork_episodes(
        played.episodes[5:6],
        played.replayer,
        played.known,
        play_of(played),
        fork_options(continuations=8),
        ABOUT,
        BOUNDS,
    )
    names = ["trajectory_id", "turn", "history", "value", "value_after", "advantage", "success"]
    same = [row for row in rows if row["trajectory_id"] == played.episodes[5].trajectory_id]
    assert few.select(names).to_pylist() == [{name: row[name] for name in names} for row in same]


def _with(values, place, value):
    changed = copy.copy(values)
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("change", "kept", "reason"),
    [
        (lambda one: replace(one, token_ids=_with(one.token_ids, one.turns[4].token_start, 7)), 1, "token_ids, token"),
        (lambda one: replace(one, images=_with(one.images, 2, one.images[1])), 1, "image 2 shows"),
        (lambda one: replace(one, task_id="elsewhere"), 0, "is no prompt"),
        (lambda one: replace(one, reward=None, status="failed"), 0, "the episode is failed"),
        (lambda one: replace(one, status="aborted"), 3, "the replay is"),
    ],
)
def test_turns_that_do_not_come_out_again_are_named(played, change, kept, reason):
    episode = next(one for one in played.episodes if len(one.turns) == 9 and one.images[1] != one.images[2])
    forked = find_forks([change(episode)], played.replayer, played.known)
    left = [turn for turn in forked if turn.left_out is not None]
    assert (len(forked), len(forked) - len(left)) == (4, kept)
    assert all(reason in turn.left_out and not turn.nodes for turn in left)
    table, counts = fork_episodes(
        [change(episode)], played.replayer, played.known, play_of(played), fork_options(), ABOUT, BOUNDS
    )
    assert counts["left_out"] == len(left) == table.num_rows - table["left_out"].null_count


def test_turns_are_spread(played):
    episode = next(one for one in played.episodes if len(one.turns) == 9)
    turns = find_forks([episode], played.replayer, played.known, turns=2)
    assert [turn.turn for turn in turns] == [1, 7] and turns[0].after.history != turns[1].before.history


# Values against the truth.


@cache
def truth(board: Board, moves: int) -> float:
    """Chance to solve a level by random legal moves, as the environment plays: a lost level ends the episode."""
    if board.is_solved:
        return 1.0
    legal = board.legal_actions()
    if not moves or not legal or board.is_lost:
        return 0.0
    return sum(truth(board.move(action).board, moves - 1) for action in legal) / len(legal)


@pytest.mark.slow
def test_intervals_cover_exact_values(train_options, sokoban_rows):
    """1,000 states of random legal play, levels of up to three moves, six turns of one move."""
    options = train_options.model_copy(
        update={"rollout": train_options.rollout.model_copy(update={"max_turns": 6, "max_failed_share": 0.0})}
    )
    agent = task_of("sokoban").baselines(options, [])["random_legal"]
    nodes, exact, generator = [], [], random.Random(0)
    rows = sokoban_rows(600, max_solution=3)
    for number, row in enumerate(rows):
        env, texts = build_env(row, options.env.args), []
        env.reset()
        for left in range(6, 0, -1):
            if env.board.legal_actions():
                past = tuple(texts)
                nodes.append(Node(f"{number} {past}", row, (), row["id"], texts=past))
                exact.append(truth(env.board, left))
            action = generator.choice(env.board.legal_actions() or ["up"])
            texts.append(f"<answer>{action}</answer>")
            if env.step(texts[-1])[1]:
                break
    chosen = generator.sample(range(len(nodes)), 1000)
    player = AgentPlayer(agent, options, seed=1)
    values = value_nodes([nodes[index] for index in chosen], player.play, 8, 32, BOUNDS)
    pairs = [(value, exact[index]) for value, index in zip(values, chosen, strict=True)]
    covered = [value.success_low <= known <= value.success_high for value, known in pairs]
    assert 0.92 <= np.mean(covered) <= 0.98
    errors = [value.success - known for value, known in pairs if value.continuations == 32]
    assert len(errors) > 200 and abs(np.mean(errors)) < 0.02

    def exact_reward(node: Node) -> float:
        """By all ways to go on, of a state with few turns left."""
        env = build_env(node.row, options.env.args)
        env.reset()
        over = any([env.step(text)[1] for text in node.texts])
        legal = [] if over or len(node.texts) == 6 else env.board.legal_actions()
        if not legal:
            return player.play([node], range(1))[0][0].reward
        further = [replace(node, texts=(*node.texts, f"<answer>{action}</answer>")) for action in legal]
        return float(np.mean([exact_reward(one) for one in further]))

    # The interval of the reward is as wide as a coin would need: it covers at least as often.
    late = [(value, nodes[index]) for value, index in zip(values, chosen, strict=True) if len(nodes[index].texts) > 3]
    assert len(late) > 200
    assert np.mean([value.low <= exact_reward(node) <= value.high for value, node in late]) > 0.95


@pytest.mark.parametrize(
    ("rewards", "solved", "bounds", "value", "low", "high", "variance"),
    [
        ([1.0] * 8, [True] * 8, (0.0, 1.0), 1.0, 0.67559, 1.0, 0.0),
        ([0.0] * 4 + [1.0] * 4, [False] * 4 + [True] * 4, (0.0, 1.0), 0.5, 0.21521, 0.78479, 2 / 7),
        ([-1.0, None, 1.0], [None, None, None], (-1.0, 1.0), 0.0, -0.81094, 0.81094, 2.0),
        ([0.3] * 7, [True] * 7, (0.3, 0.3), 0.3, 0.3, 0.3, 0.0),
        ([0.7] * 64, [True] * 64, (0.1, 0.7), 0.7, 0.66603, 0.7, 0.0),  # their mean is 0.7000000000000001
    ],
)
def test_states_are_described(rewards, solved, bounds, value, low, high, variance):
    found = describe_state([Outcome(*end) for end in zip(rewards, solved, strict=True)], *bounds)
    assert (found.value, found.low, found.high, found.variance) == pytest.approx((value, low, high, variance), abs=1e-5)
    assert (found.continuations, found.failed) == (len(rewards) - rewards.count(None), rewards.count(None))
    assert (found.success is None) == (solved[0] is None)
    assert found.low <= found.value <= found.high


def test_more_continuations_where_ends_differ():
    """Of the goal, or of the reward where the environment names no goal."""
    asked: list[tuple[str, int]] = []
    ends = {
        "always": lambda number: Outcome(1.0 + 0.1 * number, True),
        "sometimes": lambda number: Outcome(float(number % 2), number % 2 == 0),
        "no goal": lambda number: Outcome(float(number % 3), None),
        "no goal, alike": lambda number: Outcome(2.0, None),
        "fails": lambda number: Outcome(None, None),
    }

    def play(nodes, numbers):
        asked.extend((node.history, len(numbers)) for node in nodes)
        return [[ends[node.history](number) for number in numbers] for node in nodes]

    nodes = [Node(name, {}, (), name) for name in ends]
    values = value_nodes(nodes, play, 4, 10, BOUNDS)
    assert asked == [*((name, 4) for name in ends), ("sometimes", 6), ("no goal", 6)]
    assert [value.continuations for value in values] == [4, 10, 10, 4, 0]
    assert (values[4].value, values[4].failed, values[1].success) == (None, 4, 0.5)


def test_moves_to_the_goal(sokoban_rows):
    env = build_env(sokoban_rows(1, min_solution=3, max_solution=3)[0], {})
    assert (moves_to_goal(env.board), moves_to_goal(Board.from_text("#####\n#$ .#\n#@  #\n#####"))) == (3, -1)
    task = task_of("sokoban")
    assert (task.steps_to_goal(env), task.steps_to_goal(object())) == (len(solve(env.board)), None)
    assert task_of("geo3k").steps_to_goal(env) is None


def test_a_player_opens_one_policy_at_a_time(tiny_policy, train_options, sokoban_rows, tmp_path):
    """Each again after it was closed, as when ranks were lost; the sampling is that of the node."""
    folder, asked = write_policy(tmp_path / "policy", policy_writer(tiny_policy, {})), []
    limits = train_options.rollout.model_copy(update={"max_turns": 1})

    def policy_of(version):
        asked.append(version)
        return folder

    player = PolicyPlayer(policy_of, train_options.model_copy(update={"rollout": limits}), 0)
    (row,) = sokoban_rows(1)
    greedy = json.dumps({"greedy": True, "engine": "transformers"})
    nodes = [
        Node(f"h{version}", row, (), "e", sampler=(version, sampling))
        for version, sampling in ((0, ""), (2, greedy), (0, ""))
    ]
    for _ in range(2):
        with player:
            ends = player.play(nodes, range(4))
    assert asked == [0, 2, 0, 2]
    assert ends[0] == ends[2] and all(len(own) == 4 for own in ends) and len(set(ends[1])) == 1
    with player:  # all continuations of greedy decoding are one
        (_, certain, _) = value_nodes(nodes, player.play, 2, 4, BOUNDS)
    assert (certain.continuations, certain.low, certain.high) == (1, certain.value, certain.value)


# A random environment.


class FixedDice:
    """Three throws, the same in every episode; a response "a" adds the throw, any other one takes it away."""

    def __init__(self) -> None:
        self.dice, self.total, self.throws = random.Random(11), 0, 0

    def reset(self):
        return None, {}

    def step(self, text):
        self.throws += 1
        self.total += self.dice.randint(1, 6) * (1 if text == "a" else -1)
        return {"obs_str": str(self.total)}, self.throws == 3, {}

    def format_observation(self, observation):
        return {"role": "user", "content": [{"type": "text", "text": observation["obs_str"]}]}

    def metadata(self):
        return {"total": self.total}

    def close(self):
        pass


class Dice(FixedDice):
    """Other throws from a seed on."""

    def reseed(self, seed):
        self.dice = random.Random(seed)


class BegunDice(FixedDice):
    """Throws of the episode's own, which nothing changes later."""

    def reset(self, seed):
        self.dice = random.Random(seed)
        return None, {}


class SeededDice(Dice, BegunDice):
    """Throws of the episode's own, and other ones from a seed on."""


DICE = {dice.__name__: dice for dice in (FixedDice, Dice, BegunDice, SeededDice)}


def build_dice(row, args):
    return DICE[args["dice"]]()


def total(outcome, args):
    return float(outcome.env["total"])


class CoinEngine:
    """Says "a" or "b", by the seed and the number of the draw."""

    name, software_version, seeded, version = "coin", "1", True, 0

    def __init__(self) -> None:
        self.queue: list[Any] = []

    def submit(self, requests):
        self.queue += requests

    def poll(self):
        asked, self.queue = self.queue, []
        return [self._answer(request) for request in asked]

    def _answer(self, request):
        text = python_generator(request.seed, "coin", request.sampled).choice("ab")
        return Result(request.id, np.array([ord(text)], np.int32), np.full(1, -0.7, np.float32), "stop", 0)

    def release(self, ids):
        pass


@pytest.mark.parametrize("dice", DICE)
def test_a_random_environment_is_drawn_anew(dice):
    """A throw is worth 3.5 before it is known; without `reseed` it counts as what it was."""
    fixed = dice in ("FixedDice", "BegunDice")
    settings = make_settings(reward=f"{__name__}.total", max_turns=3)
    settings = replace(settings, env=EnvOptions(factory=f"{__name__}.build_dice", args={"dice": dice}))
    task, policy = task_or_plain("talk"), CharacterPolicy()

    def play(nodes, numbers):
        requests = [one for group, node in enumerate(nodes) for one in node.requests(group, 5, numbers)]
        ends: list[list[Outcome]] = [[] for _ in nodes]
        for episode in rollout(CoinEngine(), policy, requests, settings):
            ends[episode.group_index].append(Outcome.of(episode.reward, episode.metrics))
        return ends

    row = {"id": "r0", "prompt": PROMPT}
    requests = [EpisodeRequest(f"e{seed}", row, 0, seed, seed) for seed in (4, 5)]
    episode, other = rollout(CoinEngine(), policy, requests, settings)
    replayer = Replayer(policy, settings.env, RewardOptions(function=f"{__name__}.total"), settings.rollout, task)
    options = fork_options(continuations=600, first_continuations=600)
    table, _ = fork_episodes([episode], replayer, prompts_by_key([row], task), play, options, ABOUT, BOUNDS)
    totals = [0, *(int(turn.text) for turn in episode.turns[2::2]), int(episode.reward)]
    signs = [1 if result.token_ids[0] == ord("a") else -1 for result in responses_of(episode)]
    for number, found in enumerate(table.to_pylist()):
        gain = totals[number + 1] - totals[number] if fixed else 3.5 * signs[number]
        assert found["value"] == pytest.approx(totals[number], abs=1.2)
        assert found["value_after"] == pytest.approx(totals[number] + gain, abs=1.2)
        assert found["is_reseeded"] is not fixed
        assert found["continuations_after"] == (0 if fixed and number == 2 else 600)
        assert found["success"] is None

    # Both begin with one prompt: it is one state, unless the seed decides over all that follows.
    found = find_forks([episode, other], replayer, prompts_by_key([row], task))
    histories = {turn.before.history for turn in found if turn.turn == 1}
    assert len(histories) == (2 if dice == "BegunDice" else 1)
