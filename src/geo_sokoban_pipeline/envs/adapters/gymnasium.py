"""Environments of gymnasium: `env.factory=gymnasium:<id>`, and the base of a task in one.

A response is text and an action is not, so every response is mapped: by the words of `actions`, or by a parser of the
user's. An environment gets actions of the mapping alone, and none after the end of an episode.

The column `seed` of a prompt decides the first state, which the prompt shows; all that the environment draws from there
on follows from the seed of the episode.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
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
from geo_sokoban_pipeline.envs.plugins import PluginError, load_module, load_object
from geo_sokoban_pipeline.envs.rows import SPLITS, share_out
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.rewards.text import answer_blocks, visible_text
from geo_sokoban_pipeline.seeding import content_hash, derive_seed, python_generator

if TYPE_CHECKING:
    import numpy as np

SCHEME = "gymnasium"
EXPERT = f"{__name__}.build_teacher"
REWARD = "geo_sokoban_pipeline.rewards.returns.episode_return"


class GymnasiumOptions(StrictModel):
    """Arguments of an environment of gymnasium."""

    imports: list[str] = Field(
        default_factory=list, description="Modules that register environments: `minigrid`, or a `.py` file."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keywords of `gymnasium.make`.")
    wrappers: list[str] = Field(
        default_factory=list,
        description="Classes or functions that take the environment and return another one, the innermost first: "
        "dotted paths, or `file.py:name`.",
    )
    actions: dict[str, Any] | str = Field(
        description="Actions by the words that choose them, as `{left: 0, right: 1}`; other actions of the space "
        "cannot be chosen. Or a parser, `parse_action(text, env)`, that returns an action, or None: a dotted path, "
        "`file.py` or `file.py:name`."
    )
    image: str | None = Field(
        "render",
        pattern=r"^(render|observation(\..+)?)$",
        description="Image of an observation: what `render()` draws, the `observation` itself, or "
        "`observation.<name>`, one of its parts. None: no image.",
    )
    text: str = Field(
        "",
        description="Text of an observation, behind the image. `{observation}` stands for the observation, and "
        "`{<name>}` for a part of it, as `{mission}`.",
    )


# The environment.


class GymnasiumEnv:
    """One episode of an environment of gymnasium; see `InteractionEnv`.

    Args:
        name: id of the environment.
        level: seed of the first state.
        arguments: fields of `GymnasiumOptions`.

    Attributes:
        env: the environment, with its wrappers.

    Raises:
        ParameterError: an argument is unknown or not allowed.
        ValueError: there is no such environment, or it has no such action; the message names field and value.
    """

    def __init__(self, name: str, level: int, arguments: Mapping[str, Any]) -> None:
        self.options = validate_parameters(arguments, GymnasiumOptions, prefix="env.args")
        self._level_seed = level
        self.env = _make(name, self.options)
        given, self._actions = self.options.actions, dict[str, Any]()
        self._parse: Callable[[str, Any], Any] | None = None
        if isinstance(given, str):
            self._parse = _load("actions", partial(load_object, default_name="parse_action"), given)
        else:
            self._actions = _check_actions(given, self.env.action_space)
        self._restart(None)

    @property
    def words(self) -> list[str]:
        """Words that choose an action; none with a parser."""
        return list(self._actions)

    def _restart(self, observation: Any) -> None:
        self._seen = observation
        self.done = self._truncated = False
        self.turn_rewards: list[float] = []
        self.steps = self.invalid_turns = 0
        self._succeeded: bool | None = None

    def reset(self, seed: int | None = None) -> tuple[Observation, Info]:
        """To the first state of the row.

        Args:
            seed: of all that is drawn from there on; None: it follows from the row.
        """
        observation, _ = self.env.reset(seed=self._level_seed)
        if seed is not None:
            self.reseed(seed)
        self._restart(observation)
        return self._observe(), {}

    def reseed(self, seed: int) -> None:
        """Draw by another seed from here on; it reaches what draws by `np_random` of the environment."""
        from gymnasium.utils import seeding

        self.env.unwrapped.np_random, _ = seeding.np_random(seed)

    def step(self, text: str) -> tuple[Observation | None, bool, Info]:
        """Carry out the action of a response; without one, time stands still.

        Returns:
            Observation, None after the end; whether the episode has ended; and the info: raw_action, parsed_actions,
            turn_reward, truncated, and in `info` the numbers and texts of the environment's own.

        Raises:
            RuntimeError: the episode is over.
            ValueError: a parser's action is not in the space, or an observation is not as the options say.
        """
        if self.done:
            raise RuntimeError("step after the end of the episode; call reset first")
        chosen = self._read(text)
        if chosen is None:
            self.invalid_turns += 1
            self.turn_rewards.append(0.0)
            return self._observe(), False, {"raw_action": text, "parsed_actions": [], "turn_reward": 0.0}
        word, action = chosen
        self._seen, reward, terminated, truncated, info = self.env.step(action)
        if not math.isfinite(reward):
            raise ValueError(f"{self.env}: its reward for {word} is {reward}; rewards must be finite.")
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
                "parsed_actions": [word],
                "turn_reward": self.turn_rewards[-1],
                "truncated": self._truncated,
                "info": {name: value for name, value in info.items() if _is_plain(value)},
            },
        )

    def _read(self, text: str) -> tuple[str, Any] | None:
        """Name and action that a response chooses; None: it chooses none.

        The first word of the answer block decides, without a block that of the whole response.
        """
        if self._parse is None:
            said = next(iter(answer_blocks(text)), visible_text(text))
            words = "|".join(re.escape(word) for word in sorted(self._actions, key=len, reverse=True))
            found = re.search(rf"(?<!\w)({words})(?!\w)", said, re.IGNORECASE)
            return None if found is None else (word := found[0].lower(), self._actions[word])
        action = self._parse(text, self.env)
        if action is not None and not self.env.action_space.contains(action):
            raise ValueError(
                f"env.args.actions={self.options.actions}: gave {action!r}, which is no action of "
                f"{self.env.action_space}; return one, or None."
            )
        return None if action is None else (str(action), action)

    def _observe(self) -> Observation:
        text = self._text()
        if self.options.image is None:
            return {"obs_str": text}
        from PIL import Image

        return {"obs_str": text, "multi_modal_data": {"<image>": [Image.fromarray(self.pixels())]}}

    def _text(self) -> str:
        parts = self._seen if isinstance(self._seen, Mapping) else {}
        try:
            return self.options.text.format(**{"observation": self._seen, **parts})
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(f"{{{name}}}" for name in ("observation", *parts))
            raise ValueError(f"env.args.text={self.options.text!r}: {error!r}; it may hold {known}.") from error

    def pixels(self) -> np.ndarray:
        """(height, width, 3) uint8: the image of the present state.

        Raises:
            ValueError: there is none.
        """
        import numpy as np

        source = f"env.args.image={self.options.image}"
        if self.options.image == "render":
            found: Any = self.env.render()
            way_out = "its render mode must be rgb_array (env.args.kwargs.render_mode)"
        else:
            name = str(self.options.image).partition(".")[2]
            found, way_out = self._seen, "name another part of it, or a wrapper that makes one"
            if name:
                found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, np.ndarray) and found.dtype == np.uint8:
            if found.ndim == 2:
                found = np.repeat(found[..., None], 3, axis=2)
            if found.ndim == 3 and found.shape[2] == 3 and found.size:
                return found
        shape = f" of {found.dtype} {found.shape}" if isinstance(found, np.ndarray) else ""
        raise ValueError(
            f"{source}: an image is an array of uint8 (height, width, 3); this is {type_name(found)}{shape}; {way_out}."
        )

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

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _is_plain(value: Any) -> bool:
    """Whether a value of an info can be stored."""
    return isinstance(value, str) or (isinstance(value, Real) and math.isfinite(value))


def _load(field: str, load: Callable[[str], Any], name: str) -> Any:
    """The module or object that an argument names.

    Raises:
        ValueError: it cannot be found.
    """
    try:
        return load(name)
    except PluginError as error:
        raise ValueError(f"env.args.{field}: {error}.") from error


def _check_actions(actions: Mapping[str, Any], space: Any) -> dict[str, Any]:
    """Actions by their words in lower case.

    Raises:
        ValueError: there is no word, one stands twice, or an action is not in the space.
    """
    import numpy as np

    # A list of YAML is an array in spaces of arrays.
    found = {
        word.lower(): np.asarray(value, space.dtype) if isinstance(value, list) else value
        for word, value in actions.items()
    }
    if len(found) < max(1, len(actions)):
        raise ValueError(f"env.args.actions={dict(actions)}: name at least one action, and none twice.")
    for word, value in found.items():
        if not space.contains(value):
            raise ValueError(f"env.args.actions.{word}={value}: there is no such action in {space}.")
    return found


def _make(name: str, options: GymnasiumOptions) -> Any:
    """The environment of an id, with its wrappers.

    Raises:
        ValueError: it cannot be made; the message is gymnasium's own, behind the field.
    """
    import gymnasium

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a screen, and looks for none
    for module in options.imports:
        _load("imports", load_module, module)
    drawn = {"render_mode": "rgb_array"} if options.image == "render" else {}
    try:
        # The checker warns of what a step returns; here each value is checked, and a wrong one is an error.
        env = gymnasium.make(name, disable_env_checker=True, **{**drawn, **options.kwargs})
    except (gymnasium.error.Error, ImportError) as error:
        known = f"env.args.imports={options.imports}" if options.imports else "env.args.imports is empty"
        text = " ".join(str(error).split())
        raise ValueError(
            f"env.factory={SCHEME}:{name}: {text} ({known}: modules that register environments)."
        ) from error
    except TypeError as error:
        raise ValueError(f"env.args.kwargs={options.kwargs}: {' '.join(str(error).split())}.") from error
    for wrapper in options.wrappers:
        env = _load("wrappers", load_object, wrapper)(env)
    return env


def factory(name: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], GymnasiumEnv]:
    """`build_env(sample, args)` of an id.

    Raises:
        PluginError: gymnasium is not installed.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise PluginError(f"'{SCHEME}:{name}' needs gymnasium: pip install 'geo-sokoban-pipeline[gym]'")
    return partial(build_env, name)


def build_env(name: str, sample: Mapping[str, Any], args: Mapping[str, Any]) -> GymnasiumEnv:
    """The environment of a prompts row.

    Args:
        name: id of the environment.
        sample: `seed` decides the first state.
        args: fields of `GymnasiumOptions`.

    Raises:
        ParameterError, ValueError: see `GymnasiumEnv`; or the row has no seed.
    """
    if sample.get("seed") is None:
        raise ValueError(
            f"env.factory={SCHEME}:{name}: the prompt has no column `seed`, which decides its first state; make "
            "prompts with make_row (docs/gymnasium.md)."
        )
    return GymnasiumEnv(name, int(sample["seed"]), args)


# Random play.


class RandomActions:
    """One of the words for actions, each as likely."""

    def respond(self, env: GymnasiumEnv, generator: Random) -> str:
        """The word, and nothing else."""
        if not env.words:
            raise ValueError(
                f"env.args.actions={env.options.actions}: random play needs words for actions; name an expert of your "
                "own in warm_start.teacher.factory."
            )
        return generator.choice(env.words)


def build_teacher(name: str, patience: int | None, noise: float) -> RandomActions:
    """Random play, under any name."""
    return RandomActions()


def describe_expert(options: ExpertOptions, rows: Rows) -> str:
    """The warm start in words."""
    return "SFT on random play"


# A task.


class GymnasiumDataOptions(DataOptions):
    """Prompts in an environment of gymnasium: first observations of its levels."""

    env: EnvOptions = Field(description="The environment, as that of the training.")
    instruction: str = Field("", description="Text of a prompt before the first observation.")
    seed: Seed = Field(0, description="Seed of the levels; independent of the run's seed.")
    counts: SplitCounts = Field(
        SplitCounts(train=512, validation=64, eval=128),
        description="Levels of each split. Those with the same first observation belong to one split, so with few "
        "different ones the numbers are near these.",
    )


def make_row(env: GymnasiumEnv, level: int, instruction: str = "") -> dict[str, Any]:
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


class GymnasiumTask(Task):
    """A task in an environment of gymnasium; its data are levels. Subclasses give names, words and vocabulary.

    Attributes:
        environment: id of the environment where the parameters name none.
    """

    environment: str
    difficulty = "difficulty"

    def __init__(self) -> None:
        self._factory = {"env": {"factory": f"{SCHEME}:{self.environment}"}}
        self.data_config = with_defaults(GymnasiumDataOptions, self._factory)
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
            "warm_start": {"teacher": {"factory": EXPERT, "name": "random"}},
        }

    def describe(self, env: GymnasiumEnv) -> Mapping[str, Any]:
        """Further columns of a level at its start, such as its difficulty."""
        return {}

    def sample_prompt(self, options: Any) -> dict[str, Any]:
        """The first level."""
        return self._row(options, 0)

    def _row(self, options: GymnasiumDataOptions, number: int) -> dict[str, Any]:
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
            agents["random"] = ExpertOptions(factory=EXPERT, name="random")
        if options.warm_start.steps and expert.factory != EXPERT:
            agents[expert_label(expert, self.train_defaults["warm_start"]["teacher"]["factory"])] = expert
        return agents
