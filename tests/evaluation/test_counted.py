"""The whole evaluation on counted prompts and images: who plays what, how often, what is shown, what is summed up.

Real environments, rewards and images; `rollout.function` is one of the tests' own, which answers every request with
a given text and keeps what was asked, so that each number of a summary can be counted again by hand.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.base import make_expert
from geo_sokoban_pipeline.envs.geo3k.evaluation import AnswerRecord
from geo_sokoban_pipeline.envs.images import read_data_uri
from geo_sokoban_pipeline.envs.metrics import wilson_interval
from geo_sokoban_pipeline.envs.sokoban.env import build_env
from geo_sokoban_pipeline.envs.sokoban.evaluation import LevelRecord
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.evaluation.rollouts import summary_row, validate_policy
from geo_sokoban_pipeline.evaluation.summary import evaluate_policies, shuffle_images
from geo_sokoban_pipeline.pipelines.train import nodes
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.base import Request, Result
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, write_policy
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from task_options import (
    ExpertOptions,
    Geo3kMultiTurnTrainOptions,
    Geo3kTrainOptions,
    TrainOptions,
)

MAX_BYTES, MAX_PIXELS = 1 << 24, 1 << 24
LIMITED = "!"  # before a response that ends at the limit of tokens


@dataclass
class Played:
    """One call of the rollout function."""

    settings: RolloutSettings
    tasks: Sequence[EpisodeRequest]
    requests: list[Request]
    trajectories: list[Trajectory]

    @property
    def label(self) -> str:
        return self.tasks[0].trajectory_id.rsplit("/", 2)[0]

    @property
    def prompts(self) -> list[str]:
        return [task.prompt["id"] for task in self.tasks]


calls: list[Played] = []
# (prompt row, number of the episode of it, number of the response) → its text
script: dict[str, Callable[[dict[str, Any], int, int], str]] = {}


class Answering:
    """Answers at once by the script; the engine that it stands before is only asked for its version."""

    name, software_version, seeded = "answering", "1", True

    def __init__(self, version: int, policy: Policy, tasks: Sequence[EpisodeRequest]) -> None:
        self.version, self._policy, self._tasks = version, policy, tasks
        self.requests: list[Request] = []
        self._queue: list[Request] = []
        self._responses: Counter[int] = Counter()

    def submit(self, requests: Sequence[Request]) -> None:
        # An episode goes on with its own list of images.
        self.requests += [replace(request, images=list(request.images)) for request in requests]
        self._queue += requests

    def poll(self) -> list[Result]:
        asked, self._queue = self._queue, []
        return [self._answer(request) for request in asked]

    def _answer(self, request: Request) -> Result:
        task = self._tasks[request.id]
        text = script["now"](task.prompt, task.sample_index, self._responses[request.id])
        self._responses[request.id] += 1
        ids = self._policy.codec.encode_text(text.removeprefix(LIMITED))
        if not text.startswith(LIMITED):
            ids = np.append(ids, np.int32(self._policy.codec.end_id))
        reason: Any = "length" if text.startswith(LIMITED) else "stop"
        return Result(request.id, ids, np.full(len(ids), -0.5, np.float32), reason, self.version)

    def abort(self, ids: Any) -> None:
        raise AssertionError("an evaluation aborts nothing")

    def release(self, ids: Any) -> None:
        """Nothing is held."""


def play(engine: Any, policy: Policy, tasks: Any, settings: RolloutSettings, *rest: Any) -> list[Trajectory]:
    answering: Any = Answering(engine.version, policy, tasks)
    trajectories = rollout(answering, policy, tasks, settings, *rest)
    calls.append(Played(settings, tasks, answering.requests, trajectories))
    return trajectories


@pytest.fixture(autouse=True)
def _forget() -> None:
    calls.clear()


def set_options(options: TrainOptions, **changes: dict[str, Any]) -> TrainOptions:
    values = options.model_dump()
    values["rollout"] |= {"function": f"{__name__}.play"}
    for section, change in changes.items():
        values[section] |= change
    return type(options).model_validate(values)


@pytest.fixture(scope="module")
def folder(tiny_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> PolicyFolder:
    return write_policy(tmp_path_factory.mktemp("policy") / "policy", policy_writer(tiny_policy, {"policy_version": 7}))


@pytest.fixture(scope="module")
def geometry_folder(tmp_path_factory: pytest.TempPathFactory) -> PolicyFolder:
    policy = build_tiny_policy(Geo3kTrainOptions().policy.tiny, 0)
    return write_policy(tmp_path_factory.mktemp("geometry") / "policy", policy_writer(policy, {}))


@pytest.fixture(scope="module")
def levels(sokoban_rows: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows, and others to evaluate on."""
    rows = [{**row, "id": f"level{number}"} for number, row in enumerate(sokoban_rows(20))]
    return rows[:12], rows[12:]


def evaluate(
    options: TrainOptions, folder: PolicyFolder, levels: Any, **kw: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    training, held_out = levels
    policies = {"warm_start": folder, "final": folder}
    return evaluate_policies("train_sokoban", 0, policies, held_out, options, training=training, **kw)


def up(row: dict[str, Any], sample: int, turn: int) -> str:
    return "<answer>Up</answer>"


TURNS = {"max_turns": 2, "max_tokens_per_turn": None}


@pytest.mark.parametrize(
    ("evaluation", "counts"),
    [
        ({}, {"sampled": 8, "greedy": 8, "blank_sampled": 8, "blank_greedy": 8}),
        ({"prompts": 5}, {"sampled": 5, "greedy": 5, "blank_sampled": 5, "blank_greedy": 5}),
        ({"prompts": 99}, {"sampled": 8, "greedy": 8, "blank_sampled": 8, "blank_greedy": 8}),
        ({"prompts": 3, "samples": 4}, {"sampled": 12, "greedy": 3, "blank_sampled": 3, "blank_greedy": 3}),
        ({"greedy": False}, {"sampled": 8, "blank_sampled": 8}),
        ({"blank_images": False}, {"sampled": 8, "greedy": 8}),
        ({"prompts": 2, "greedy": False, "blank_images": False, "samples": 2}, {"sampled": 4}),
    ],
    ids=str,
)
def test_prompts_and_episodes(
    evaluation: dict[str, Any], counts: dict[str, int], folder: PolicyFolder, levels: Any, train_options: TrainOptions
) -> None:
    """The first evaluation prompts, each as often as the options say, for policies and players alike."""
    script["now"] = up
    training, held_out = levels
    options = set_options(train_options, rollout=TURNS, evaluation=evaluation)
    summary, parts = evaluate(options, folder, levels)
    wanted = [row["id"] for row in held_out[: evaluation.get("prompts")]]
    assert summary["prompts"] == len(wanted)
    assert not set(wanted) & {row["id"] for row in training}

    names = {"warm_start": ["sampled", "greedy"], "final": ["sampled", "greedy", "blank_sampled", "blank_greedy"]}
    expected = {
        f"train_sokoban/{name}{'_blank' if 'blank' in mode else ''}/{mode.removeprefix('blank_')}": counts[mode]
        for name, modes in names.items()
        for mode in modes
        if mode in counts
    }
    assert {call.label: len(call.tasks) for call in calls} == expected
    for call in calls:
        samples = len(call.tasks) // len(wanted)
        assert call.prompts == [identity for identity in wanted for _ in range(samples)]
        assert [task.sample_index for task in call.tasks] == list(range(samples)) * len(wanted)
        assert len({(task.prompt["id"], task.seed) for task in call.tasks}) == len(call.tasks)
        assert call.settings.rollout == options.rollout and call.settings.env == options.env
    rows = {f"train_sokoban/{row['policy']}/{row['mode']}": row for row in summary["rows"] if row["mode"] != "-"}
    assert {label: row["episodes"] for label, row in rows.items()} == expected
    players = [row for row in summary["rows"] if row["mode"] == "-"]
    assert len(players) >= 4 and {row["episodes"] for row in players} == {len(wanted)}

    # What is stored is what was played with true images, by policy.
    stored = {name: table_to_trajectories(table) for name, table in parts.items()}
    assert sorted(stored) == ["iter=00000/part-000", "iter=00001/part-000"]
    for number, name in enumerate(names):
        episodes = stored[f"iter={number:05d}/part-000"]
        played = [e for call in calls if f"/{name}/" in call.label for e in call.trajectories]
        assert [e.trajectory_id for e in episodes] == [e.trajectory_id for e in played]
        assert {(e.iteration, e.policy_version) for e in episodes} == {(number, 7)}


@pytest.mark.parametrize(
    ("rollout", "evaluation", "expected"),
    [
        ({}, {}, SamplingOptions()),
        ({"temperature": 0.7, "top_p": 0.9}, {}, SamplingOptions(temperature=0.7, top_p=0.9)),
        ({"top_k": 5}, {"temperature": 0.6, "top_p": 0.8}, SamplingOptions(temperature=0.6, top_p=0.8, top_k=5)),
        ({"top_k": 5, "temperature": 2.0}, {"top_k": 3}, SamplingOptions(temperature=2.0, top_k=3)),
    ],
)
def test_sampling(
    rollout: dict[str, Any],
    evaluation: dict[str, Any],
    expected: SamplingOptions,
    folder: PolicyFolder,
    levels: Any,
    train_options: TrainOptions,
    tiny_policy: Policy,
) -> None:
    """As in the rollout but for the overrides; greedy episodes are greedy and nothing else."""
    script["now"] = up
    options = set_options(
        train_options, rollout=TURNS | {"sampling": rollout}, evaluation={"prompts": 1, "sampling": evaluation}
    )
    evaluate(options, folder, levels, baselines=False)
    assert len(calls) == 6
    validate_policy("run", 0, options, levels[1][:1], tiny_policy, build_engine(tiny_policy, options.rollout), 0)
    for call in calls:
        wanted = SamplingOptions(greedy=True) if call.label.endswith("greedy") else expected
        assert call.settings.sampling == wanted, call.label
        assert {request.sampling for request in call.requests} == {wanted}


def shown(request: Request) -> list[np.ndarray]:
    return [np.asarray(Image.open(io.BytesIO(image.png)).convert("RGB")) for image in request.images]


def true_images(row: dict[str, Any]) -> list[np.ndarray]:
    images = (read_data_uri(uri, max_bytes=MAX_BYTES, max_pixels=MAX_PIXELS) for uri in row["images"])
    return [np.asarray(image.convert("RGB")) for image in images]


def test_images_of_levels(folder: PolicyFolder, levels: Any, train_options: TrainOptions) -> None:
    """Blank means every image, the prompt's and each later one; nobody else is shown a blank one. Shuffled prompts
    change the first image alone, so they prove no use of the images.
    """
    script["now"] = up
    options = set_options(train_options, rollout=TURNS, evaluation={"prompts": 4, "shuffled_images": True})
    summary, _ = evaluate(options, folder, levels)
    kinds = Counter()
    for call in calls:
        kind = call.label.split("/")[1].removeprefix("final").removeprefix("warm_start")
        assert len(call.requests) == 2 * len(call.tasks)
        for request in call.requests:
            row = call.tasks[request.id].prompt
            images, (first,) = shown(request), true_images(row)
            assert [image.shape for image in images] == [first.shape] * len(images)
            kinds[kind] += len(images)
            for number, image in enumerate(images):
                assert image.any() != (kind == "_blank"), (call.label, number)
            if kind != "_blank":
                np.testing.assert_array_equal(images[0], first)  # of the prompt that was rolled out
            own = next(one for one in levels[1] if one["id"] == row["id"])
            assert (row["images"] == own["images"]) == (kind != "_shuffled")
        assert max(len(request.images) for request in call.requests) == 2
    assert kinds == {"": 4 * 4 * (1 + 2), "_blank": 2 * 4 * (1 + 2), "_shuffled": 2 * 4 * (1 + 2)}
    # Whatever the rate of an ablation is, only blank images replace every image.
    rows = {row["policy"]: row for row in summary["rows"] if row["mode"] == "sampled"}
    assert {"final", "final_blank", "final_shuffled_first"} <= set(rows) and "final_shuffled" not in rows
    for name in ("final_blank", "final_shuffled_first"):
        rows[name]["change"] = {"difference": -0.5, "low": -0.7, "high": -0.3, "is_change": True}
    blank, _, first = " ".join(SOKOBAN.report.compare(summary, ["final"])).partition("With the first image")
    assert "so it does use the image" in blank
    assert first.startswith(" from another problem it solves ") and "use the image" not in first
    assert SOKOBAN.report.label("final_shuffled_first") == "after GRPO, first image from another problem"


def test_images_of_problems(geometry_folder: PolicyFolder, geometry_rows: Any) -> None:
    """Where observations have no images, shuffled prompts replace all of them; text and label stay."""
    problems = geometry_rows(6)
    script["now"] = lambda row, sample, turn: "\\boxed{1}"
    options = set_options(Geo3kTrainOptions(), rollout={}, evaluation={"greedy": False})
    evaluate_policies("train_geo3k", 3, {"final": geometry_folder}, problems, options, training=problems)
    by_name = {call.label.split("/")[1]: call for call in calls}
    shuffled = shuffle_images(problems, 3)
    assert set(by_name) == {"final", "final_blank", "final_shuffled"}
    for name, call in by_name.items():
        assert len(call.requests) == len(problems)
        for request in call.requests:
            (image,), problem, prompt = shown(request), problems[request.id], call.tasks[request.id].prompt
            assert {**prompt, "images": None} == {**problem, "images": None}
            expected = shuffled[request.id] if name == "final_shuffled" else problem
            assert prompt["images"] == expected["images"]
            (own,) = true_images(prompt)
            np.testing.assert_array_equal(image, 0 * own if name == "final_blank" else own)


def solution(row: dict[str, Any]) -> list[str]:
    env = build_env(row, {})
    env.reset()
    expert = make_expert(ExpertOptions(name="solver"), row)
    responses: list[str] = []
    done = False
    while not done:
        responses.append(expert.respond(env, python_generator(0)))
        _, done, _ = env.step(responses[-1])
    return responses


def test_numbers_of_levels(folder: PolicyFolder, levels: Any, train_options: TrainOptions) -> None:
    """Episodes that are solved, that go astray, that are invalid and that are cut off; each is counted by hand."""
    held_out = levels[1]
    solutions = {row["id"]: solution(row) for row in held_out}

    def answer(row: dict[str, Any], sample: int, turn: int) -> str:
        number = held_out.index(row)
        if (number + sample) % 3 == 0:
            return solutions[row["id"]][turn]
        if (number + sample) % 3 == 1:
            return "no move at all" if turn % 2 else "<answer>Down</answer>"
        return LIMITED + "<answer>Up"

    script["now"] = answer
    options = set_options(
        train_options, rollout={"max_turns": 8, "max_tokens_per_turn": None}, evaluation={"samples": 4}
    )
    summary, parts = evaluate_policies("run", 0, {"final": folder}, held_out, options)
    episodes = [e for table in parts.values() for e in table_to_trajectories(table)]
    assert summary["task"] == "sokoban" and summary["move_limit"] == 8 * options.env.args.get("max_actions_per_turn", 1)
    for mode, samples in (("sampled", 4), ("greedy", 1)):
        row = next(row for row in summary["rows"] if (row["policy"], row["mode"]) == ("final", mode))
        own = [e for e in episodes if f"/{mode}/" in e.trajectory_id]
        assert len(own) == samples * len(held_out)
        # A response that follows the solution ends its episode as solved; the others hold no moves that push a box
        # home.
        solved = [(held_out.index(held_out[e.group_index]) + e.sample_index) % 3 == 0 for e in own]
        assert [e.metrics.get("success", 0.0) == 1.0 for e in own] == solved and 0 < sum(solved) < len(solved)
        records = []
        for episode, success in zip(own, solved, strict=True):
            level = held_out[episode.group_index]
            responses = [turn.text for turn in episode.turns if turn.role == "assistant"]
            # A response that is cut off does not reach the environment, whose turns these are.
            turns = sum(not text.endswith("Up") for text in responses)
            invalid = sum("no move" in text for text in responses)
            moves, length = turns - invalid, level["solution_length"]
            records.append(
                LevelRecord(
                    level["level_hash"],
                    success,
                    episode.reward,
                    turns,
                    invalid,
                    moves,
                    length,
                    cluster=level["layout_hash"],
                )
            )
        assert row == summary_row(SOKOBAN, records, policy="final", mode=mode)
        assert row["steps_over_optimal"] == 1.0 and row["invalid_share"] > 0
    assert summary["cluster_of"] == {row["level_hash"]: row["layout_hash"] for row in held_out}
    assert summary["clusters"] == summary["layouts"] == len({row["layout_hash"] for row in held_out})
    solver = next(row for row in summary["rows"] if row["policy"] == "solver")
    assert (solver["episodes"], solver["solved"]) == (len(held_out), len(held_out))


def test_numbers_of_problems(geometry_folder: PolicyFolder, geometry_rows: Any) -> None:
    """Right, plausible, wrong and missing answers, with and without the tool; each number counted by hand."""
    problems = geometry_rows(8, "geo3k_multi_turn")
    kinds = ("right", "plausible", "wrong", "none")

    def kind_of(number: int, sample: int) -> str:
        return kinds[(number + 2 * sample + number // 4) % 4]

    def other(row: dict[str, Any]) -> str:
        """A rule's answer that is not the label."""
        return next(one["label"] for one in row["candidates"] if one["label"] != row["answer"])

    def call(answer: str) -> str:
        arguments = f'{{"answer": "{answer}"}}'
        return f'<tool_call>{{"name": "calc_score", "arguments": {arguments}}}</tool_call>'

    def answer(row: dict[str, Any], sample: int, turn: int) -> str:
        number = [one["id"] for one in problems].index(row["id"])
        kind = kind_of(number, sample)
        if number % 2 and turn == 0:
            # The tool hears something wrong first; the last answer of an episode is another one.
            return call("0")
        said = {"right": row["answer"], "plausible": other(row), "wrong": "0.123", "none": ""}[kind]
        return f"It is \\boxed{{{said}}}" if said else "I do not know"

    script["now"] = answer
    options = set_options(
        Geo3kMultiTurnTrainOptions(),
        rollout={"max_tokens_per_turn": None},
        evaluation={"samples": 2, "greedy": False, "blank_images": False, "shuffled_images": False},
    )
    summary, parts = evaluate_policies("run", 0, {"final": geometry_folder}, problems, options, training=problems)
    row = next(row for row in summary["rows"] if row["policy"] == "final")
    own = [e for table in parts.values() for e in table_to_trajectories(table)]
    records = []
    for episode in own:
        problem, kind = problems[episode.group_index], kind_of(episode.group_index, episode.sample_index)
        called = episode.group_index % 2
        records.append(
            AnswerRecord(
                prompt_id=problem["id"],
                success=kind == "right",
                ret=float(kind == "right"),
                turns=1 + called,
                invalid_turns=int(kind == "none"),
                cluster=problem["problem_hash"],
                first_attempt=kind == "right" and not called,
                answered=kind != "none",
                tool_calls=called,
                valid_tool_calls=called,
                plausible=kind in ("right", "plausible"),
                tokens=int((episode.loss_mask == 1).sum()),
                truncated=False,
                repetition=False,
                labels={column: problem[column] for column in ("family", "answer_form", "difficulty")},
            )
        )
    assert Counter(record.success for record in records) == {True: 4, False: 12}
    assert row == summary_row(task_of("geo3k_multi_turn"), records, policy="final", mode="sampled")


def test_numbers_of_a_validation(tiny_policy: Policy, levels: Any, train_options: TrainOptions) -> None:
    held_out = levels[1]
    solutions = {row["id"]: solution(row) for row in held_out}
    script["now"] = lambda row, sample, turn: solutions[row["id"]][turn] if held_out.index(row) % 4 else "nothing"
    options = set_options(train_options, rollout={"max_turns": 8, "max_tokens_per_turn": None})
    engine = build_engine(tiny_policy, options.rollout)
    episodes, metrics = validate_policy("run", 0, options, held_out, tiny_policy, engine, 3)
    assert [call.prompts for call in calls] == [[row["id"] for row in held_out]] * 2
    assert len(episodes) == 16 and {e.iteration for e in episodes} == {3}
    low, high = wilson_interval(6, 8)
    for mode in ("sampled", "greedy"):
        assert metrics[f"eval/validation/{mode}_solve_rate"] == 6 / 8
        assert metrics[f"eval/validation/{mode}_low"] == pytest.approx(low, abs=1e-9)
        assert metrics[f"eval/validation/{mode}_high"] == pytest.approx(high, abs=1e-9)


def test_the_node_evaluates_on_the_evaluation_prompts(
    folder: PolicyFolder, levels: Any, train_options: TrainOptions
) -> None:
    script["now"] = up
    training, held_out = levels
    options = set_options(train_options, rollout=TURNS, evaluation={"prompts": 3})
    frames = [pd.DataFrame(rows) for rows in (training, held_out)]
    summary, _ = nodes.evaluate_policies(folder, folder, *frames, options, {"id": "levels"}, 0)
    assert (summary["prompts"], summary["data_id"]) == (3, "levels")
    assert {identity for call in calls for identity in call.prompts} == {row["id"] for row in held_out[:3]}
    # Without baselines and ablations.
    summary, _ = evaluate(options, folder, levels, baselines=False, ablations=False)
    rows = [(row["policy"], row["mode"]) for row in summary["rows"]]
    assert rows == [(name, mode) for name in ("warm_start", "final") for mode in ("sampled", "greedy")]


def test_solver_gives_up_beyond_its_states(folder: PolicyFolder, levels: Any, train_options: TrainOptions) -> None:
    script["now"] = up
    rates = {}
    for states in (1, 200_000):
        options = set_options(train_options, rollout={"max_turns": 8}, evaluation={"solver_states": states})
        summary, _ = evaluate_policies("run", 0, {"final": folder}, levels[1], options)
        rates[states] = next(row["solve_rate"] for row in summary["rows"] if row["policy"] == "solver")
    assert rates[1] < rates[200_000] == 1.0
