"""Thinking models, on the real tokenizer: a template that opens the thoughts and leaves them out of earlier responses.

What the policy saw stays what is stored; thoughts are trained like everything it wrote, and never graded or played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.evaluation.audit import check_token_parity
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from policies.thin import thinking_template, write_thin_policy
from rollout.scripted import ScriptedEngine, geometry_settings
from task_options import EnvOptions, RewardOptions

THOUGHT = "Perhaps \\boxed{99}. <answer>Left</answer>"


@pytest.fixture(scope="module")
def thinker(shared_data, tmp_path_factory) -> Policy:
    processor = shared_data / "qwen3_vl_processor"
    template = thinking_template((processor / "chat_template.jinja").read_text(encoding="utf-8"))
    return load_policy(write_thin_policy(tmp_path_factory.mktemp("thinking"), processor, template=template))


@pytest.fixture(scope="module")
def problem(shared_data, geometry_rows) -> dict[str, Any]:
    """The first real problem whose answer is a whole number, with the instruction of the scoring tool."""
    file = {"path": f"{shared_data / 'geometry3k_small.parquet'}@[0:20]"}
    rows = geometry_rows(None, "geo3k_multi_turn", source="file", file=file, instruction="tool")
    return next(row for row in rows if row["answer"].isdigit())


def call(answer: str) -> str:
    return f'<tool_call>{{"name": "calc_score", "arguments": {{"answer": "{answer}"}}}}</tool_call>'


def play(thinker: Policy, row: dict[str, Any], texts: Sequence[str], settings: RolloutSettings) -> Trajectory:
    engine = ScriptedEngine([(f"{text}<|im_end|>", "stop") for text in texts], thinker.codec)
    (episode,) = rollout(engine, thinker, [EpisodeRequest("t", row, 0, 0, 0)], settings)
    validate_trajectories(trajectories_to_table([replace(episode, advantage=0.0)], thinker.table_context))
    return episode


def sampled_texts(episode: Trajectory, thinker: Policy) -> list[str]:
    """Text of each run of trained tokens."""
    starts = np.flatnonzero(np.diff(np.concatenate([[0], episode.loss_mask, [0]])))
    return [thinker.codec.decode(episode.token_ids[a:b]) for a, b in starts.reshape(-1, 2)]


def test_the_template_rewrites_history(thinker, tiny_policy):
    codec = thinker.codec
    question = {"role": "user", "content": "d"}
    assert codec.render([question]).endswith("<|im_start|>assistant\n<think>\n")
    assert "secret" not in codec.render([question, {"role": "assistant", "content": "secret</think>seen"}, question])
    assert codec.rewrites_history and not tiny_policy.codec.rewrites_history


def test_tokens_masks_and_the_tool(thinker, problem):
    wrong, right = str(int(problem["answer"]) + 1), problem["answer"]
    texts = [
        f"{THOUGHT} {call(right)}\n</think>\n\n{call(wrong)} Answer: \\boxed{{{wrong}}}",
        f"{THOUGHT}\n</think>\n\n{call(right)} Answer: \\boxed{{{right}}}",
    ]
    episode = play(thinker, problem, texts, geometry_settings(3))
    assert check_token_parity([episode], thinker.codec) == []
    assert sampled_texts(episode, thinker) == [f"{text}<|im_end|>" for text in texts]
    # The call in the first thought was right, and was not made: the tool answered the wrong one behind it.
    assert (episode.reward, episode.metrics["turns"], episode.metrics["first_attempt_correct"]) == (1.0, 2.0, 0.0)
    assert episode.metrics["tool_calls"] == 2
    shown = thinker.codec.decode(episode.token_ids)
    assert shown.count("<|im_start|>assistant\n<think>\n") == 2
    assert shown.count(THOUGHT) == 2  # the first one stays before the policy's eyes
    moved = replace(episode, token_ids=np.roll(episode.token_ids, 1))
    assert check_token_parity([moved], thinker.codec)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("{thought} \\boxed{{{right}}}\n</think>\n\nNo answer.", 0.0),  # right, but only in thought
        ("{thought}\n</think>\n\nAnswer: \\boxed{{{right}}}", 1.0),
        ("{thought} \\boxed{{{right}}}\n</think>\n\nAnswer: \\boxed{{{wrong}}}", 0.0),
    ],
)
def test_thoughts_are_not_graded_and_have_the_form(thinker, problem, text, reward):
    """Also those that the prompt has opened."""
    wrong, right = str(int(problem["answer"]) + 1), problem["answer"]
    texts = [text.format(thought=THOUGHT, right=right, wrong=wrong)]
    assert play(thinker, problem, texts, geometry_settings(3)).reward == reward
    formed = play(thinker, problem, texts, geometry_settings(3, "format_reward"))
    assert (formed.reward_parts["format"], formed.reward == 1.0) == (float("Answer" in text), reward == 1.0)


def test_moves_are_read_behind_the_thoughts(thinker, sokoban_rows):
    settings = RolloutSettings(
        EnvOptions(
            factory="geo_sokoban_pipeline.envs.sokoban.env.build_env", args={"cell_px": 64, "observation_style": "full"}
        ),
        RewardOptions(),
        RolloutOptions(max_turns=2, max_tokens_per_turn=None, max_failed_share=0.0),
        SamplingOptions(),
        iteration=0,
        task="sokoban",
    )
    row = sokoban_rows(1, cell_px=64, min_solution=5)[0]
    texts = [f"{THOUGHT}\n</think>\n\n<answer>Right</answer>", f"{THOUGHT}\n</think>\n\n<answer>Up</answer>"]
    episode = play(thinker, row, texts, settings)
    assert check_token_parity([episode], thinker.codec) == []
    responses = [turn for turn in episode.turns if turn.role == "assistant"]
    assert ["right" in str(turn.action).lower() for turn in responses][0]
    assert not any("left" in str(turn.action).lower() for turn in responses)
    assert {tuple(grid) for grid in episode.image_grid_thw} == {(1, 24, 24)}
