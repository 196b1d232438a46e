"""Sokoban as a conversation: the policy sees an image, responds with moves, and sees the image after them.

The environment is a pure function of the level and the responses. The first answer block of a response decides; words
outside it are no moves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from geo_sokoban_pipeline.config.base import Count, CountOrZero, StrictModel, validate_parameters
from geo_sokoban_pipeline.envs.base import Info, Observation, user_message
from geo_sokoban_pipeline.envs.sokoban.board import DEFAULT_REWARDS, DIRECTIONS, MIN_CELL_PX, Board, MoveRewards
from geo_sokoban_pipeline.rewards.text import ANSWER, visible_text

_SEPARATORS = re.compile(r"[,;\s]+")


def parse_actions(text: str, max_actions: int | None = None, *, after_think: bool = True) -> list[str]:
    """Moves in a response, in order.

    Commas, semicolons and white space separate tokens; a token counts if it equals up, down, left or right in any
    case, so attached punctuation disqualifies it. Other tokens are skipped.

    Args:
        text: the whole response.
        max_actions: moves after which reading stops; None: no limit.
        after_think: read only what follows the last `</think>`, if there is one. Off is the original's rule.
    """
    if after_think:
        text = visible_text(text)
    block = ANSWER.search(text)
    tokens = _SEPARATORS.split((block.group(1) if block else text).lower())
    return [token for token in tokens if token in DIRECTIONS][:max_actions]


# Arguments of the environment.


class SokobanEnvOptions(StrictModel):
    """Arguments of Sokoban's environment."""

    max_actions_per_turn: Count = Field(
        3, description="Moves of a response that are carried out; further ones are ignored."
    )
    max_steps: Count = Field(
        100,
        description="Moves after which the episode ends, blocked ones included. Not given: that of the prompt "
        "(`sokoban.max_steps`).",
    )
    cell_px: int = Field(
        64,
        ge=MIN_CELL_PX,
        le=512,
        description="Side of a cell in the image; as `sokoban.cell_px`, which the first image has.",
    )
    rewards: MoveRewards = DEFAULT_REWARDS
    observation_style: Literal["full", "brief"] = Field(
        "full", description="Words of an observation: explained, or as few tokens as possible."
    )
    text_grid: bool = Field(False, description="Write the position into the text as well.")
    render_mode: Literal["vision", "text"] = Field(
        "vision",
        description="`vision`: an image. `text`: the position as a grid of characters, no image. Not given: that of "
        "the prompt.",
    )
    malformed_counts_step: bool = Field(
        False,
        description="A response without a move costs one of `max_steps`. Off is slime's rule, where it changes "
        "nothing.",
    )
    after_think: bool = Field(True, description="Read actions only after the last `</think>`. Off is slime's rule.")
    end_when_lost: bool = Field(
        False,
        description="End the episode once a box can never reach a target (a deadlock), and charge the turn with "
        "`rewards.lost`. A level that is deadlocked from its start is played on. Off is slime's rule.",
    )
    distance: Literal["greedy", "assignment"] = Field(
        "greedy",
        description="Distance of boxes to targets, in cells and walls ignored: each box to a target that is still "
        "free, taken greedily (slime's rule), or the smallest sum over all assignments.",
    )
    optimal_steps: CountOrZero | None = Field(
        None,
        description="Fewest moves of the level. Not given: that of the prompt. None: unknown, and left out of the "
        "metrics.",
    )


_DEFAULTS = SokobanEnvOptions()


# Sokoban as a conversation: the policy sees an image, answers with moves, sees the image after them.


class SokobanEnv:
    """One episode on one level; see `InteractionEnv`. docs/deviations.md has slime's rules.

    Args:
        board: the level.
        max_actions_per_turn, max_steps, cell_px, arguments: fields of `SokobanEnvOptions`.

    Raises:
        ParameterError: an argument is unknown or out of range; the message names it.
    """

    def __init__(
        self,
        board: Board,
        max_actions_per_turn: int = _DEFAULTS.max_actions_per_turn,
        max_steps: int = _DEFAULTS.max_steps,
        cell_px: int = _DEFAULTS.cell_px,
        **arguments: Any,
    ) -> None:
        sizes = {"max_actions_per_turn": max_actions_per_turn, "max_steps": max_steps, "cell_px": cell_px}
        self.options = validate_parameters({**sizes, **arguments}, SokobanEnvOptions, prefix="env.args")
        self.initial_board = board
        # A deadlock is final: a level that begins deadlocked is not charged for it. No solvable position is lost, so
        # the score of a given policy does not depend on it; training does.
        self._can_be_lost = self.options.end_when_lost and not board.is_lost
        self._restart()

    def _restart(self) -> None:
        self.board = self.initial_board
        self.steps = 0
        self.done = False
        self.turn_rewards: list[float] = []
        self.invalid_turns = 0
        self.executed: list[str] | None = None

    def reset(self) -> tuple[Observation, Info]:
        """Back to the level's start; the info holds `box_target_distance`."""
        self._restart()
        return self._observe(), {"box_target_distance": self.box_target_distance()}

    def step(self, text: str) -> tuple[Observation, bool, Info]:
        """Carry out the moves of a response until success, the step limit, or the last one.

        Returns:
            Observation after the moves; done, which is success, a lost level, or the step limit; and the info:
            raw_action, parsed_actions, metrics.turn_metrics.{action_is_valid, action_is_effective},
            metrics.traj_metrics.success, turn_reward, box_target_distance.

        Raises:
            RuntimeError: the episode is over.
        """
        if self.done:
            raise RuntimeError("step after the end of the episode; call reset first")
        actions = parse_actions(text, self.options.max_actions_per_turn, after_think=self.options.after_think)
        effective = self._play(actions)
        success = self.board.is_solved
        lost = self._can_be_lost and effective and self.board.is_lost
        if lost:
            self.turn_rewards[-1] += self.options.rewards.lost
        self.done = (success and bool(actions)) or lost or self.steps >= self.options.max_steps
        info: Info = {
            "raw_action": text,
            "parsed_actions": actions,
            "metrics": {
                "turn_metrics": {"action_is_valid": bool(actions), "action_is_effective": effective},
                "traj_metrics": {"success": success},
            },
            "turn_reward": self.turn_rewards[-1],
            "box_target_distance": self.box_target_distance(),
        }
        return self._observe(), self.done, info

    def _play(self, actions: list[str]) -> bool:
        """Carry out moves and record the turn's reward; returns whether any move changed the board."""
        self.executed = []
        if not actions:
            self.turn_rewards.append(self.options.rewards.malformed)
            self.invalid_turns += 1
            self.steps += self.options.malformed_counts_step
            return False
        reward, effective = 0.0, False
        for action in actions:
            move = self.board.move(action, self.options.rewards)
            self.board = move.board
            self.executed.append(action)
            self.steps += 1
            reward += move.reward
            effective |= move.moved
            if self.board.is_solved or self.steps >= self.options.max_steps:
                break
        self.turn_rewards.append(reward)
        return effective

    def _observe(self) -> Observation:
        text = self._text(self.board, self.executed)
        if self.options.render_mode == "text":
            return {"obs_str": text}
        from geo_sokoban_pipeline.envs.sokoban.drawing import render_observation  # loads numpy

        image = render_observation(self.board, self.options.cell_px)
        return {"obs_str": text, "multi_modal_data": {"<image>": [image]}}

    def _text(self, board: Board, executed: list[str] | None) -> str:
        """Text of one observation: `full` explains and asks, `brief` costs next to no tokens.

        Args:
            executed: moves of the last turn, those that were blocked included; None at reset.
        """
        shows_image, is_brief = self.options.render_mode == "vision", self.options.observation_style == "brief"
        rows = None
        if self.options.text_grid or not shows_image:
            rows = board.to_grid() if is_brief and not shows_image else board.to_symbols()
        if is_brief:
            return f"{rows}\nNext?" if rows else "Next?"
        shown = [text for text in ("See the image." if shows_image else None, rows) if text]
        done = ", ".join(action.capitalize() for action in executed or ()) or "None"
        return "\n".join(
            [
                "Current board:",
                *shown,
                f"Moves just made: {done}",
                "Which moves come next? Answer with Up, Down, Left or Right.",
            ]
        )

    def format_observation(self, observation: Observation | None) -> dict[str, Any]:
        """See `base.user_message`."""
        return user_message(observation)

    def box_target_distance(self) -> int:
        """Summed distance of boxes to targets now, in cells."""
        return self.board.box_target_distance(self.options.distance)

    @property
    def final_bonus(self) -> float:
        """Bonus for success if the board is solved now, else 0."""
        return self.options.rewards.success_bonus if self.board.is_solved else 0.0

    def final_metrics(self) -> dict[str, float]:
        """Numbers of the episode.

        Keys: success (0 or 1), lost (0 or 1), steps, turns (responses that `step` has seen: the loop does not step with
        one that was cut off), invalid_turns (those without a move), invalid_share (of turns), boxes_on_target,
        dist0 and dist1 (cells); where the level's fewest moves are known optimal_steps, and steps_over_optimal if it
        was solved.
        """
        turns, success = len(self.turn_rewards), self.board.is_solved
        optimal = self.options.optimal_steps
        metrics = {
            "success": float(success),
            "lost": float(self.board.is_lost),
            "steps": float(self.steps),
            "turns": float(turns),
            "invalid_turns": float(self.invalid_turns),
            "invalid_share": self.invalid_turns / turns if turns else 0.0,
            "boxes_on_target": float(self.board.boxes_on_target),
            "dist0": float(self.initial_board.box_target_distance(self.options.distance)),
            "dist1": float(self.box_target_distance()),
        }
        if optimal is not None:
            metrics["optimal_steps"] = float(optimal)
            if success and optimal > 0:
                metrics["steps_over_optimal"] = self.steps / optimal
        return metrics

    def metadata(self) -> dict[str, Any]:
        """Slime's `metadata["sokoban"]`; `seed` is None, because a level's key is its hash."""
        return {
            "seed": None,
            "initial_state_text": self.initial_board.to_symbols(),
            "initial_obs_text": self._text(self.initial_board, None),
            "dist0": self.initial_board.box_target_distance(self.options.distance),
            "turns": len(self.turn_rewards),
            "final_state_text": self.board.to_symbols(),
            "final_obs_text": self._text(self.board, self.executed),
            "dist1": self.box_target_distance(),
            "turn_rewards": list(self.turn_rewards),
            "final_bonus": self.final_bonus,
        }

    def close(self) -> None:
        """Part of the protocol; there is nothing to release."""

    def __enter__(self) -> SokobanEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any] | None = None) -> SokobanEnv:
    """The environment of one prompts row.

    Args:
        sample: `extra_info.env_config` holds the level, and may hold `max_steps` and `render_mode`;
            `solution_length`, if there is one, becomes `optimal_steps`.
        args: fields of `SokobanEnvOptions`. They win over the row's.

    Raises:
        ParameterError: an argument is unknown or out of range.
        ValueError: the level is malformed.
    """
    config = sample["extra_info"]["env_config"]
    given = {key: config[key] for key in ("max_steps", "render_mode") if config.get(key) is not None}
    given |= {"optimal_steps": sample.get("solution_length"), **(args or {})}
    options = validate_parameters(given, SokobanEnvOptions, prefix="env.args")
    return SokobanEnv(Board.from_env_config(config), **dict(options))
