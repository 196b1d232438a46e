"""Sokoban as a task: a rendered board each turn, moves as answers, a level solved or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.base import Setting
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.base import (
    PATIENT,
    Breakdown,
    Column,
    DataStep,
    Info,
    Task,
    Vocabulary,
    Words,
    expert_label,
)
from geo_sokoban_pipeline.envs.inspection import Check, DataSample
from geo_sokoban_pipeline.envs.metrics import Rows
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.rows import HubReader
from geo_sokoban_pipeline.envs.sokoban import data_steps
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.evaluation import (
    move_limit,
    moves_per_turn,
    record_level,
    summarise_levels,
    tag_level,
)
from geo_sokoban_pipeline.envs.sokoban.report import SokobanReport
from geo_sokoban_pipeline.envs.sokoban.solver import moves_to_goal
from geo_sokoban_pipeline.rewards.sokoban import turn_values

if TYPE_CHECKING:
    from geo_sokoban_pipeline.envs.images import ImagePart
    from geo_sokoban_pipeline.trajectories.index import StoredEpisode

ENV = "geo_sokoban_pipeline.envs.sokoban.env.build_env"
EXPERT = "geo_sokoban_pipeline.envs.sokoban.expert.build_teacher"
REWARD = "geo_sokoban_pipeline.rewards.sokoban.compute_reward"
BASELINES = ("random", "random_legal", "solver")
_ROWS = 8  # rows of a file to read for one prompt
_LEVEL = "#####\n#@$.#\n#####"
_PLAYED = SimpleNamespace(env={"turn_rewards": [0.0], "final_bonus": 0.0, "dist0": 1, "dist1": 1})


class SokobanTask(Task):
    """See `Task`."""

    name = "sokoban"
    title = "Sokoban"
    words = Words("level", "levels", "solve rate", "solved", "not solved")
    data_config = SokobanDataOptions
    data_steps = (
        DataStep(
            "read_levels", data_steps.read_levels, (), ("raw_levels", "rejected", "reading"), asks=("hub", "track")
        ),
        DataStep(
            "make_prompts",
            data_steps.make_prompts,
            ("raw_levels",),
            ("prompts", "validation_prompts", "eval_prompts"),
        ),
        DataStep(
            "report_data",
            data_steps.report_data,
            ("raw_levels", "rejected", "reading", "prompts", "validation_prompts", "eval_prompts"),
            ("data_report",),
        ),
    )
    schemas = "geo_sokoban_pipeline.envs.sokoban.data"
    train_defaults = {
        "policy": {"tiny": {"texts": "sokoban"}},
        "warm_start": {
            "teacher": {
                "factory": EXPERT,
                "name": Setting("direct", "Rule that chooses moves.", ("direct", "solver", "random_legal", "random")),
                "patience": Setting(1, "`direct`: blocked moves before it gives up. None: it never does."),
                "noise": Setting(0.0, "Share of moves replaced by random legal ones."),
            }
        },
        "env": {"factory": ENV},
        "reward": {"function": REWARD},
    }
    vocabulary = Vocabulary(
        frequent=("Up", "Down", "Left", "Right", "up", "down", "left", "right", "user", "assistant", "system", "Next"),
        corpus="""
Up Down Left Right,Up,Down,Left,Right up down left right
system user assistant You are playing Sokoban. Push the yellow box onto the red target. The board is shown in the image.
You are the green player. Walls are brick. Floor is black. You push boxes, you never pull them. Avoid walls and corners.
Reply with up to three moves, for example: Up, Left. Decide the next action: Current Observation: see the image.
Actions executed: None. Next move? Choose your next moves from Up, Down, Left and Right.
Find the angle, the length x, the area, the perimeter. The answer is boxed. Answer: \\boxed{12} calc_score
\\frac{1}{2} \\sqrt{3} \\pi 0 1 2 3 4 5 6 7 8 9 10 20 30 45 60 90 100 180 360 degrees
triangle circle parallel lines square rectangle find the value
name arguments answer {"name": "calc_score", "arguments": {"answer": "5"}} correct wrong try again last chance
""",
        markup=("<answer>", "</answer>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    )
    difficulty = "solution_length"
    ordered = True
    optimal = "solver"
    plain_response = "<answer>Up</answer>"
    key = "level_hash"
    apart = ("layout_hash", "layouts")
    credited = "turn rewards, distance and final bonus"
    columns = (
        Column(
            "moves ÷ fewest",
            lambda row: row.get("steps_over_optimal"),
            "number",
            note="mean over solved episodes whose fewest moves are known",
        ),
        Column(
            "invalid responses",
            lambda row: row.get("invalid_share"),
            note="share of the responses without a move; those that the token limit cut off are not counted",
        ),
    )
    breakdowns = (Breakdown("fewest moves", lambda row: {cell["length"]: cell for cell in row.get("by_length") or []}),)
    report = SokobanReport()
    studies = {
        "default": "The recipe of `make run`.",
        "one_behind": "The same with rollouts beside the training.",
        "from_zero": "GRPO after SFT on random legal moves.",
        "long": "One long run.",
    }
    comparisons = {
        "estimators": "Advantages and losses at equal cost.",
        "importance": "Importance rules on episodes of older weights, at equal cost.",
        "adapters": "LoRA adapters and full training, at equal cost.",
    }

    def check_data_fits(self, data: Any, options: TrainOptions) -> None:
        """Data and environment must draw alike: the first image of an episode is from the data, the others are not."""
        own = options.env.args.get("cell_px")
        if options.env.factory == ENV and own is not None and data.cell_px != own:
            raise ValueError(
                f"env.args.cell_px={own}: differs from {self.name}.cell_px={data.cell_px}, the size of an episode's "
                "first image. Give both the same value."
            )

    def check_limits(self, options: TrainOptions, longest: int, shortest: int = 0) -> list[Check]:
        """A finding if levels need more moves than an episode has; none for environments of one's own."""
        limit = move_limit(options)
        if limit >= longest or options.env.factory != ENV:
            return []
        text = f"{self.run}.rollout.max_turns={options.rollout.max_turns}: {limit} moves at most, and "
        way_out = "raise it, or take shorter levels"
        if limit < shortest:
            text += f"every training level needs {shortest} or more: none can be solved"
            return [Check("parameters", "moves", "failure", text, way_out)]
        text += f"levels need up to {longest}: some can never be solved"
        return [Check("parameters", "moves", "warning", text, way_out)]

    def inspect_data(self, options: Any, rows: int, hub: HubReader | None, stored: Path) -> DataSample:
        """Make or read the first levels, and compare the stored prompts with the options."""
        from geo_sokoban_pipeline.envs.sokoban.inspection import inspect_levels

        return inspect_levels(options, rows, hub, stored)

    def sample_prompt(self, options: Any) -> dict[str, Any] | None:
        """A small level of the generated size, or the first one of a file."""
        from geo_sokoban_pipeline.envs.sokoban.inspection import first_prompt, sample_level

        if options.source == "hub":
            return None
        return sample_level(options) if options.source == "generate" else first_prompt(options, _ROWS)

    def trial_environments(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        """The environment on a small level."""
        return [(load_object(ENV), {"extra_info": {"env_config": Board.from_text(_LEVEL).to_env_config()}})]

    def trial_rewards(self) -> Sequence[tuple[Any, Any]]:
        """The reward on an episode of one turn."""
        return [(load_object(REWARD), _PLAYED)]

    def baselines(self, options: TrainOptions, training: Rows) -> Mapping[str, ExpertOptions]:
        """Random moves, random legal moves, the solver; the expert with its patience, and without giving up.

        They make as many moves a turn as a policy may.
        """
        expert = options.warm_start.teacher
        rules = {"max_states": options.evaluation.solver_states, "moves": moves_per_turn(options)}
        build = partial(ExpertOptions, factory=EXPERT, args=rules)
        agents = {name: build(name=name) for name in BASELINES}
        own = expert.factory == EXPERT
        if not options.warm_start.steps or (own and not expert.noise and expert.name in BASELINES):
            return agents
        name = expert_label(expert, EXPERT)
        agents[name] = expert.model_copy(update={"args": {**rules, **expert.args}}) if own else expert
        if own and expert.name == "direct" and expert.patience is not None:
            # An expert that gives up is fine for demonstrations, but as a baseline it loses the level.
            agents[name + PATIENT] = agents[name].model_copy(update={"patience": None})
        return agents

    def turn_values(
        self, rewards: Sequence[float], infos: Sequence[Info], parts: Mapping[str, float], args: Mapping[str, Any]
    ) -> Sequence[float]:
        """Rewards of the moves, the distance that boxes came nearer to targets, and the bonus of the last turn."""
        distances = [parts.get("dist0"), *(info.get("box_target_distance") for info in infos)]
        cells = [float(distance) for distance in distances if distance is not None]
        return turn_values(
            rewards,
            cells if len(cells) == len(distances) else None,
            parts.get("final_bonus", 0.0),
            args.get("aggregate", "mean"),
            float(args.get("distance_weight", 1.0)),
        )

    def steps_to_goal(self, env: Any) -> int | None:
        """Moves of the shortest solution from the present position."""
        board = getattr(env, "board", None)
        return moves_to_goal(board) if isinstance(board, Board) else None

    def answer(self, episode: StoredEpisode) -> str | None:
        """All moves."""
        return ",".join(said.action for said in episode.responses if said.action) or None

    tags = staticmethod(tag_level)

    def image_parts(self, png: bytes) -> Sequence[ImagePart]:
        """The cells of a board, with what stands there; a grid over an image that is no board of ours."""
        from geo_sokoban_pipeline.envs.sokoban.drawing import board_cells

        return board_cells(png) or super().image_parts(png)

    def describe_prompts(self, prompts: Rows, options: TrainOptions) -> dict[str, Any]:
        """`layouts` (of walls) among the levels, and `move_limit`."""
        layouts = {row["layout_hash"] for row in prompts if row.get("layout_hash")}
        return {"layouts": len(layouts), "move_limit": move_limit(options)}

    record = staticmethod(record_level)
    summarise = staticmethod(summarise_levels)


SOKOBAN = SokobanTask()
