"""Base of the adapters: episodes in environments of other libraries, whose steps take actions and give rewards.

A response is text and an action is not, so every response is mapped, by words for instance. An environment gets mapped
actions alone, and none after the end of an episode.

The row of a prompt decides the first state, which the prompt shows; all that the environment draws from there on
follows from the seed of the episode, as far as the library allows.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from numbers import Real
from random import Random
from typing import TYPE_CHECKING, Any

from pydantic import Field

from geo_sokoban_pipeline.config.base import Seed, StrictModel, refuse_first, validate_parameters, with_defaults
from geo_sokoban_pipeline.config.data import DataOptions, SplitCounts, SplitShares
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.config.rollout import EnvOptions
from geo_sokoban_pipeline.envs.base import DataStep, Info, Observation, Task, expert_label, user_message
from geo_sokoban_pipeline.envs.metrics import Rows
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.rows import SPLITS, share_out
from geo_sokoban_pipeline.rewards.text import answer_blocks, visible_text
from geo_sokoban_pipeline.seeding import content_hash, derive_seed, python_generator

if TYPE_CHECKING:
    import numpy as np

EXPERT = f"{__name__}.build_teacher"
REWARD = "geo_sokoban_pipeline.rewards.returns.episode_return"
# Observation, reward, whether the episode has ended or was truncated, and the environment's own info.
Step = tuple[Any, float, bool, bool, Mapping[str, Any]]


class EnvAdapterOptions(StrictModel):
    """Arguments of every adapter."""

    image: str | None = Field(None, description="Image of an observation. None: no image.")
    text: str = Field(
        "",
        description="Text of an observation, behind the image. `{observation}` stands for the observation, and "
        "`{<name>}` for a part of it, as `{mission}`.",
    )


# The environment.


class EnvAdapter(ABC):
    """One episode of an environment of another library; see `InteractionEnv`.

    Args:
        name: of the environment, for messages.
        actions: actions by the words that choose them, in lower case; empty: `read` maps responses otherwise.

    Attributes:
        observation: the last one, as the environment gave it.
    """

    def __init__(self, name: str, options: EnvAdapterOptions, actions: Mapping[str, Any]) -> None:
        self.options, self.name, self._actions = options, name, dict(actions)
        self._restart(None)

    @property
    def words(self) -> list[str]:
        """Words that choose an action; none if responses are mapped otherwise."""
        return list(self._actions)

    def _restart(self, observation: Any) -> None:
        self.observation = observation
        self.done = self._truncated = False
        self.turn_rewards: list[float] = []
        self.steps = self.invalid_turns = 0
        self._succeeded: bool | None = None

    @abstractmethod
    def begin(self, seed: int | None) -> Any:
        """The observation of the first state; what is drawn from there on follows from the seed, if one is given."""

    @abstractmethod
    def act(self, word: str, action: Any) -> Step | None:
        """Carry out an action; None: the environment does not take it, and nothing has changed.

        Args:
            word: name of the action.
        """

    @abstractmethod
    def pixels(self) -> np.ndarray:
        """(height, width, 3) uint8: the image of the present state.

        Raises:
            ValueError: there is none.
        """

    def reset(self, seed: int | None = None) -> tuple[Observation, Info]:
        """To the first state of the row.

        Args:
            seed: of all that is drawn from there on; None: it follows from the row.
        """
        self._restart(self.begin(seed))
        return self._observe(), {}

    def step(self, text: str) -> tuple[Observation | None, bool, Info]:
        """Carry out the action of a response; without one, time stands still.

        Returns:
            Observation, None after the end; whether the episode has ended; and the info: raw_action, parsed_actions,
            turn_reward, truncated, and in `info` the numbers and texts of the environment's own.

        Raises:
            RuntimeError: the episode is over.
            ValueError: an action, a reward or an observation is not as the options say.
        """
        if self.done:
            raise RuntimeError("step after the end of the episode; call reset first")
        chosen = self.read(text)
        taken = None if chosen is None else self.act(*chosen)
        if chosen is None or taken is None:
            self.invalid_turns += 1
            self.turn_rewards.append(0.0)
            return self._observe(), False, {"raw_action": text, "parsed_actions": [], "turn_reward": 0.0}
        self.observation, reward, terminated, truncated, info = taken
        if not math.isfinite(reward):
            raise ValueError(f"{self.name}: its reward for {chosen[0]} is {reward}; rewards must be finite.")
        self.steps += 1
        self.turn_rewards.append(float(reward))
        self._truncated = bool(truncated)
        self.done = bool(terminated) or self._truncated
        if "is_success" in info:
            self._succeeded = bool(info["is_success"])
        return (
            None if self.done else self._observe(),
            self.done,
            {
                "raw_action": text,
                "parsed_actions": [chosen[0]],
                "turn_reward": self.turn_rewards[-1],
                "truncated": self._truncated,
                "info": {name: value for name, value in info.items() if _is_plain(value)},
            },
        )

    def read(self, text: str) -> tuple[str, Any] | None:
        """Name and action that a response chooses; None: it chooses none.

        The first word of the answer block decides, without a block that of the whole response.
        """
        words = "|".join(re.escape(word) for word in sorted(self._actions, key=len, reverse=True))
        found = re.search(rf"(?<!\w)({words})(?!\w)", said_in(text), re.IGNORECASE)
        return None if found is None else (word := found[0].lower(), self._actions[word])

    def _observe(self) -> Observation:
        text = self._text()
        if self.options.image is None:
            return {"obs_str": text}
        from PIL import Image

        return {"obs_str": text, "multi_modal_data": {"<image>": [Image.fromarray(self.pixels())]}}

    def _text(self) -> str:
        parts = self.observation if isinstance(self.observation, Mapping) else {}
        try:
            return self.options.text.format(**{"observation": self.observation, **parts})
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(f"{{{name}}}" for name in ("observation", *parts))
            raise ValueError(f"env.args.text={self.options.text!r}: {error!r}; it may hold {known}.") from error

    def format_observation(self, observation: Observation | None) -> dict[str, Any]:
        """See `base.user_message`."""
        return user_message(observation)

    def final_metrics(self) -> dict[str, float]:
        """Numbers of the episode.

        Keys: success (0 or 1: the last `is_success` of the environment's info, without any a return above 0), return,
        steps (of the environment), truncated (0 or 1), invalid_turns (without an action).
        """
        total = sum(self.turn_rewards)
        return {
            "success": float(total > 0 if self._succeeded is None else self._succeeded),
            "return": total,
            "steps": float(self.steps),
            "truncated": float(self._truncated),
            "invalid_turns": float(self.invalid_turns),
        }

    @abstractmethod
    def close(self) -> None:
        """Close the environment."""


def said_in(text: str) -> str:
    """The answer in a response: its first answer block, or without a block all of it but its thoughts."""
    return next(iter(answer_blocks(text)), visible_text(text))


def check_words(actions: Mapping[str, Any]) -> dict[str, Any]:
    """Actions by their words in lower case.

    Raises:
        ValueError: there is no word, or one stands twice.
    """
    found = {word.lower(): value for word, value in actions.items()}
    if len(found) < max(1, len(actions)):
        raise ValueError(f"env.args.actions={dict(actions)}: name at least one action, and none twice.")
    return found


def as_pixels(found: Any) -> np.ndarray | None:
    """(height, width, 3) of an array of uint8, also of a grey one; None if it is no image."""
    import numpy as np

    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or not found.size:
        return None
    if found.ndim == 2:
        found = np.repeat(found[..., None], 3, axis=2)
    return found if found.ndim == 3 and found.shape[2] == 3 else None


def _is_plain(value: Any) -> bool:
    """Whether a value of an info can be stored."""
    return isinstance(value, str) or (isinstance(value, Real) and math.isfinite(value))


# Random play.


class RandomActions:
    """One of the words for actions, each as likely."""

    def respond(self, env: EnvAdapter, generator: Random) -> str:
        """The word, and nothing else."""
        if not env.words:
            raise ValueError(
                "env.args.actions: random play needs words for actions; name an expert of your own in "
                "warm_start.teacher.factory."
            )
        return generator.choice(env.words)


def build_teacher(name: str, patience: int | None, noise: float) -> RandomActions:
    """Random play, under any name."""
    return RandomActions()


def describe_expert(options: ExpertOptions, rows: Rows) -> str:
    """The warm start in words."""
    return "SFT on random play"


# A task.


class AdapterDataOptions(DataOptions):
    """Prompts in an environment of another library: first observations of its levels."""

    env: EnvOptions = Field(description="The environment, as that of the training.")
    instruction: str = Field("", description="Text of a prompt before the first observation.")
    seed: Seed = Field(0, description="Seed of the levels; independent of the run's seed.")
    counts: SplitCounts = Field(
        SplitCounts(train=512, validation=64, eval=128),
        description="Levels of each split. Those with the same first observation belong to one split, so with few "
        "different ones the numbers are near these.",
    )


def make_row(env: EnvAdapter, level: int, instruction: str = "") -> dict[str, Any]:
    """A prompts row: the first observation of a level, behind an instruction.

    Args:
        env: of this level, at its start.
    """
    from geo_sokoban_pipeline.envs.images import encode_png, png_data_uri  # Pillow, which the registry must not load

    message = env.format_observation(env.reset()[0])
    text = message["content"][-1]["text"]
    has_image = env.options.image is not None
    return {
        "id": str(level),
        "prompt": f"{instruction}{'<image>' if has_image else ''}{text}",
        "images": [png_data_uri(encode_png(env.pixels()))] if has_image else [],
        "seed": level,
    }


class AdapterTask(Task):
    """A task in an environment of another library; its data are levels. Subclasses give names, words and vocabulary.

    Attributes:
        scheme: the library, as in `env.factory`.
        environment: the environment where the parameters name none.
    """

    scheme: str
    environment: str
    difficulty = "difficulty"
    expert = EXPERT

    def __init__(self) -> None:
        self._factory = {"env": {"factory": f"{self.scheme}:{self.environment}"}}
        self.data_config = with_defaults(AdapterDataOptions, self._factory)
        prompts = ("prompts", "validation_prompts", "eval_prompts")
        self.data_steps = (
            DataStep("make_prompts", self.make_prompts, (), prompts),
            DataStep("report_data", self.report_data, prompts, ("data_report",)),
        )

    @property
    def train_defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The return as reward, and random play as the warm start's expert."""
        return {
            **self._factory,
            "policy": {"tiny": {"texts": self.name}},
            "reward": {"function": REWARD},
            "warm_start": {"teacher": {"factory": self.expert, "name": "random"}},
        }

    def describe(self, env: EnvAdapter) -> Mapping[str, Any]:
        """Further columns of a level at its start, such as its difficulty."""
        return {}

    def sample_prompt(self, options: Any) -> dict[str, Any]:
        """The first level."""
        return self._row(options, 0)

    def _row(self, options: AdapterDataOptions, number: int) -> dict[str, Any]:
        level = derive_seed(options.seed, "level", number)
        env = load_object(options.env.factory, default_name="build_env")({"seed": level}, options.env.args)
        try:
            row = make_row(env, level, options.instruction)
            return row | dict(self.describe(env))
        finally:
            env.close()

    def make_prompts(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        """Node: the prompts of each split."""
        import pandas as pd

        options: Any = validate_parameters(parameters, self.data_config, prefix=self.name)
        wanted = {split: getattr(options.counts, split) or 0 for split in SPLITS}
        total = sum(wanted.values())
        refuse_first((not total, f"{self.name}.counts are all 0; name at least one level."))
        alike: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in (self._row(options, number) for number in range(total)):
            alike[content_hash(row["prompt"], *row["images"])].append(row)
        shares = SplitShares(**{split: count / total for split, count in wanted.items()})
        parts = share_out(list(alike), shares, python_generator(options.seed, "split"))
        return tuple(pd.DataFrame([row for key in parts[split] for row in alike[key]]) for split in SPLITS)

    def report_data(self, *tables: Any) -> dict[str, Any]:
        """Node: numbers of prompts by split."""
        *frames, _ = tables
        splits = {split: {"prompts": len(frame)} for split, frame in zip(SPLITS, frames, strict=True)}
        return {"source": "generate", "splits": splits}

    def check_data_fits(self, data: Any, options: TrainOptions) -> None:
        """The first observation of an episode is from the data, the others are the environment's."""
        if data.env.model_dump() != options.env.model_dump():
            raise ValueError(f"env: differs from {self.name}.env, which made the prompts. Give both the same values.")

    def baselines(self, options: TrainOptions, training: Rows) -> Mapping[str, ExpertOptions]:
        """Random play, where actions have words, and the warm start's expert."""
        expert = options.warm_start.teacher
        agents = {}
        if not isinstance(options.env.args.get("actions"), str):
            agents["random"] = ExpertOptions(factory=self.expert, name="random")
        if options.warm_start.steps and expert.factory != self.expert:
            agents[expert_label(expert, self.train_defaults["warm_start"]["teacher"]["factory"])] = expert
        return agents
