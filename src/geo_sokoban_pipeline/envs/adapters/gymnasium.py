"""Environments of gymnasium: `env.factory=gymnasium:<id>`, and the base of a task in one.

Responses are mapped to actions by the words of `actions`, or by a parser of the user's. The column `seed` of a prompt
decides the first state; the seed of the episode decides all that the environment draws from there on.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.envs.adapters.base import (
    AdapterTask,
    EnvAdapter,
    EnvAdapterOptions,
    Step,
    as_pixels,
    build_teacher,
    check_words,
)
from geo_sokoban_pipeline.envs.plugins import PluginError, load_module, load_object
from geo_sokoban_pipeline.formats import type_name

if TYPE_CHECKING:
    import numpy as np

SCHEME = "gymnasium"


class GymnasiumOptions(EnvAdapterOptions):
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


# The environment.


class GymnasiumEnv(EnvAdapter):
    """One episode of an environment of gymnasium; see `EnvAdapter`.

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

    options: GymnasiumOptions

    def __init__(self, name: str, level: int, arguments: Mapping[str, Any]) -> None:
        options = validate_parameters(arguments, GymnasiumOptions, prefix="env.args")
        self._level_seed = level
        self.env = _make(name, options)
        given, actions = options.actions, dict[str, Any]()
        self._parse: Callable[[str, Any], Any] | None = None
        if isinstance(given, str):
            self._parse = _load("actions", partial(load_object, default_name="parse_action"), given)
        else:
            actions = _check_actions(given, self.env.action_space)
        super().__init__(str(self.env), options, actions)

    def begin(self, seed: int | None) -> Any:
        """See `EnvAdapter`."""
        observation, _ = self.env.reset(seed=self._level_seed)
        if seed is not None:
            self.reseed(seed)
        return observation

    def reseed(self, seed: int) -> None:
        """Draw by another seed from here on; it reaches what draws by `np_random` of the environment."""
        from gymnasium.utils import seeding

        self.env.unwrapped.np_random, _ = seeding.np_random(seed)

    def act(self, word: str, action: Any) -> Step:
        """See `EnvAdapter`."""
        step: Step = self.env.step(action)
        return step

    def read(self, text: str) -> tuple[str, Any] | None:
        """Name and action that a response chooses, by words or by the user's parser; None: it chooses none."""
        if self._parse is None:
            return super().read(text)
        action = self._parse(text, self.env)
        if action is not None and not self.env.action_space.contains(action):
            raise ValueError(
                f"env.args.actions={self.options.actions}: gave {action!r}, which is no action of "
                f"{self.env.action_space}; return one, or None."
            )
        return None if action is None else (str(action), action)

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
            found, way_out = self.observation, "name another part of it, or a wrapper that makes one"
            if name:
                found = found.get(name) if isinstance(found, Mapping) else None
        if (pixels := as_pixels(found)) is not None:
            return pixels
        shape = f" of {found.dtype} {found.shape}" if isinstance(found, np.ndarray) else ""
        raise ValueError(
            f"{source}: an image is an array of uint8 (height, width, 3); this is {type_name(found)}{shape}; {way_out}."
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


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
        word: np.asarray(value, space.dtype) if isinstance(value, list) else value
        for word, value in check_words(actions).items()
    }
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


class GymnasiumTask(AdapterTask):
    """A task in an environment of gymnasium; `environment` is its id."""

    scheme = SCHEME
    expert = f"{__name__}.{build_teacher.__name__}"  # the name that stored runs know
