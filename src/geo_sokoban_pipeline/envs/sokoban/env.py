"""Sokoban as a conversation: the policy sees an image, responds with moves, and sees the image after them.

The environment is a pure function of the level and the responses. The first answer block of a response decides; words
outside it are no moves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from geo_sokoban_pipeline.config.base import MOST, REWARD_BOUNDS, Bounds, check_number, checked_arguments
from geo_sokoban_pipeline.envs.base import Info, Observation, user_message
from geo_sokoban_pipeline.envs.sokoban.board import DEFAULT_REWARDS, DIRECTIONS, Board, MoveRewards
from geo_sokoban_pipeline.envs.sokoban.drawing import MIN_CELL_PX, render_observation

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_SEPARATORS = re.compile(r"[,;\s]+")
_THINK_END = "</think>"


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
        text = text.rpartition(_THINK_END)[2]
    block = _ANSWER.search(text)
    tokens = _SEPARATORS.split((block.group(1) if block else text).lower())
    return [token for token in tokens if token in DIRECTIONS][:max_actions]


def answer_blocks(text: str) -> list[str]:
    """Contents of the answer blocks behind the last `</think>`, in order; the first one decides."""
    return _ANSWER.findall(text.rpartition(_THINK_END)[2])


# Arguments of the environment, and the errors that refuse them.


# Of every number among the arguments, the same as of the data's options where these have it too.
BOUNDS: Mapping[str, Bounds] = {
    "max_actions_per_turn": Bounds(1, MOST),
    "max_steps": Bounds(1, MOST),
    "cell_px": Bounds(MIN_CELL_PX, 512),
    "optimal_steps": Bounds(0, MOST),
    **{f"rewards.{field.name}": REWARD_BOUNDS for field in fields(MoveRewards)},
}


def read_arguments(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """`env.args` as keyword arguments, the mapping `rewards` as `MoveRewards`.

    Raises:
        ValueError: a name is unknown, and the message names the nearest known one; or a number is out of its bounds.
    """
    options = checked_arguments("env.args", given, known)
    for name, value in options.items():
        # The optimum of a level may be unknown.
        if name in BOUNDS and not (name == "optimal_steps" and value is None):
            check_number(f"env.args.{name}", value, BOUNDS[name])
    if "rewards" in options:
        options["rewards"] = _read_rewards(options["rewards"])
    return options


def _read_rewards(given: Any) -> MoveRewards:
    names = [field.name for field in fields(MoveRewards)]
    if not isinstance(given, Mapping):
        raise ValueError(f"env.args.rewards={given!r}: must be a mapping of {', '.join(names)}")
    rewards = checked_arguments("env.args.rewards", given, names)
    for name, value in rewards.items():
        check_number(f"env.args.rewards.{name}", value, BOUNDS[f"rewards.{name}"])
    return MoveRewards(**rewards)


# Observation texts beside the image. `full` explains and asks, `brief` costs next to no tokens.


STYLES = ("full", "brief")


def observation_text(board: Board, executed: Sequence[str] | None, style: str, grid: bool, image: bool) -> str:
    """Text of one observation.

    Args:
        board: the position to be described.
        executed: moves of the last turn, those that were blocked included; None at reset.
        style: `full` or `brief`.
        grid: whether the position is written out in the data set's symbols; without an image `brief` puts nothing
            between the cells.
        image: whether an image of it comes with the text.
    """
    compact = style == "brief" and not image
    rows = (board.to_grid() if compact else board.to_symbols()) if grid else None
    if style == "brief":
        return f"{rows}\nNext?" if rows else "Next?"
    shown = [text for text in ("See the image." if image else None, rows) if text]
    done = ", ".join(action.capitalize() for action in executed or ()) or "None"
    return "\n".join(
        [
            "Current board:",
            *shown,
            f"Moves just made: {done}",
            "Which moves come next? Answer with Up, Down, Left or Right.",
        ]
    )


# Sokoban as a conversation: the policy sees an image, answers with moves, sees the image after them.


class SokobanEnv:
    """One episode on one level; see `InteractionEnv`. docs/deviations.md has slime's rules.

    Args:
        board: the level.
        max_actions_per_turn: moves of a response that are carried out; further ones are ignored.
        max_steps: moves after which the episode ends, blocked ones included.
        cell_px: side of a cell in the image, in pixels, 8 to 512.
        rewards: what moves, a turn without a move, and success are worth.
        observation_style: `full`, or `brief` for policies that pay for every token.
        text_grid: write the position into the text as well.
        render_mode: `vision`, or `text` for the grid as text and no image.
        malformed_counts_step: a response without a move costs one of `max_steps`. Off is slime's rule, where such a
            response changes nothing.
        after_think: read actions only after the last `</think>`. Off is slime's rule.
        end_when_lost: the episode ends once a box can never reach a target (`Board.is_lost`), and the turn is charged
            `rewards.lost`; a level that is lost from its start continues. No solvable position ends so: scoring a
            given policy does not depend on it, training does. Off is slime's rule.
        distance: `greedy` (slime's rule) or `assignment`, see `Board.box_target_distance`.
        optimal_steps: fewest moves of the level; None: unknown, and left out of the metrics.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    def __init__(
        self,
        board: Board,
        max_actions_per_turn: int = 3,
        max_steps: int = 100,
        cell_px: int = 64,
        rewards: MoveRewards = DEFAULT_REWARDS,
        observation_style: Literal["full", "brief"] = "full",
        text_grid: bool = False,
        *,
        render_mode: Literal["vision", "text"] = "vision",
        malformed_counts_step: bool = False,
        after_think: bool = True,
        end_when_lost: bool = False,
        distance: Literal["greedy", "assignment"] = "greedy",
        optimal_steps: int | None = None,
    ) -> None:
        for name, value in (
            ("max_actions_per_turn", max_actions_per_turn),
            ("max_steps", max_steps),
            ("cell_px", cell_px),
        ):
            check_number(name, value, BOUNDS[name])
        for name, word, choices in (
            ("observation_style", observation_style, STYLES),
            ("render_mode", render_mode, ("vision", "text")),
            ("distance", distance, ("greedy", "assignment")),
        ):
            if word not in choices:
                raise ValueError(f"{name}={word!r}: must be one of {', '.join(choices)}")
        self.initial_board = board
        self.max_actions_per_turn = max_actions_per_turn
        self.max_steps = max_steps
        self.cell_px = cell_px
        self.rewards = rewards
        self.observation_style = observation_style
        self.render_mode = render_mode
        self.text_grid = text_grid or render_mode == "text"
        self.malformed_counts_step = malformed_counts_step
        self.after_think = after_think
        self.end_when_lost = end_when_lost
        self.distance = distance
        self.optimal_steps = optimal_steps
        # A deadlock is final: a level that begins deadlocked is not charged for it.
        self._can_be_lost = end_when_lost and not board.is_lost
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
        actions = parse_actions(text, self.max_actions_per_turn, after_think=self.after_think)
        effective = self._play(actions)
        success = self.board.is_solved
        lost = self._can_be_lost and effective and self.board.is_lost
        if lost:
            self.turn_rewards[-1] += self.rewards.lost
        self.done = (success and bool(actions)) or lost or self.steps >= self.max_steps
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
            self.turn_rewards.append(self.rewards.malformed)
            self.invalid_turns += 1
            self.steps += self.malformed_counts_step
            return False
        reward, effective = 0.0, False
        for action in actions:
            move = self.board.move(action, self.rewards)
            self.board = move.board
            self.executed.append(action)
            self.steps += 1
            reward += move.reward
            effective |= move.moved
            if self.board.is_solved or self.steps >= self.max_steps:
                break
        self.turn_rewards.append(reward)
        return effective

    def _observe(self) -> Observation:
        text = self._text(self.board, self.executed)
        if self.render_mode == "text":
            return {"obs_str": text}
        return {"obs_str": text, "multi_modal_data": {"<image>": [render_observation(self.board, self.cell_px)]}}

    def _text(self, board: Board, executed: list[str] | None) -> str:
        return observation_text(board, executed, self.observation_style, self.text_grid, self.render_mode == "vision")

    def format_observation(self, observation: Observation | None) -> dict[str, Any]:
        """See `base.user_message`."""
        return user_message(observation)

    def box_target_distance(self) -> int:
        """Summed distance of boxes to targets now, in cells."""
        return self.board.box_target_distance(self.distance)

    @property
    def final_bonus(self) -> float:
        """Bonus for success if the board is solved now, else 0."""
        return self.rewards.success_bonus if self.board.is_solved else 0.0

    def final_metrics(self) -> dict[str, float]:
        """Numbers of the episode.

        Keys: success (0 or 1), lost (0 or 1), steps, turns (responses that `step` has seen: the loop does not step with
        one that was cut off), invalid_turns (those without a move), invalid_share (of turns), boxes_on_target,
        dist0 and dist1 (cells); where the level's fewest moves are known optimal_steps, and steps_over_optimal if it
        was solved.
        """
        turns, success = len(self.turn_rewards), self.board.is_solved
        metrics = {
            "success": float(success),
            "lost": float(self.board.is_lost),
            "steps": float(self.steps),
            "turns": float(turns),
            "invalid_turns": float(self.invalid_turns),
            "invalid_share": self.invalid_turns / turns if turns else 0.0,
            "boxes_on_target": float(self.board.boxes_on_target),
            "dist0": float(self.initial_board.box_target_distance(self.distance)),
            "dist1": float(self.box_target_distance()),
        }
        if self.optimal_steps is not None:
            metrics["optimal_steps"] = float(self.optimal_steps)
            if success and self.optimal_steps > 0:
                metrics["steps_over_optimal"] = self.steps / self.optimal_steps
        return metrics

    def metadata(self) -> dict[str, Any]:
        """Slime's `metadata["sokoban"]`; `seed` is None, because a level's key is its hash."""
        return {
            "seed": None,
            "initial_state_text": self.initial_board.to_symbols(),
            "initial_obs_text": self._text(self.initial_board, None),
            "dist0": self.initial_board.box_target_distance(self.distance),
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
        args: keyword arguments of `SokobanEnv`, with `rewards` as a mapping of `MoveRewards` fields. They win over
            the row's.

    Raises:
        ValueError: an argument is unknown or out of range, or the level is malformed.
    """
    config = sample["extra_info"]["env_config"]
    options = {key: config[key] for key in ("max_steps", "render_mode") if config.get(key) is not None}
    options["optimal_steps"] = sample.get("solution_length")
    options |= read_arguments(args or {}, _ARGUMENTS)
    return SokobanEnv(Board.from_env_config(config), **options)


_ARGUMENTS = frozenset(inspect.signature(SokobanEnv).parameters) - {"board"}
