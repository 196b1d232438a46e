"""Stand-ins for the worked examples of the episode loop: a character-level codec and an engine that reads a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.rollout import RolloutOptions, RolloutRules, SamplingOptions
from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key
from geo_sokoban_pipeline.rollout.engines.base import Request, Result
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import EnvOptions, RewardOptions

PROMPT = "nine char"
OWN_LOOP = f"{__name__}.same_loop"
Response = tuple[str, str]
EPISODE_RETURN = "geo_sokoban_pipeline.rewards.returns.episode_return"


class CharacterCodec:
    """One token a character; an observation costs its length and 8 more, as in the worked examples."""

    def encode_prompt(self, messages: Sequence[dict[str, Any]], grids: Sequence[Any], tools: Any = None) -> np.ndarray:
        return self.encode_text(messages[0]["content"][0]["text"])

    def encode_observation(
        self, message: dict[str, Any], grids: Sequence[Any], *, separator: bool, tools: Any = None
    ) -> np.ndarray:
        return self.encode_text(("\n" if separator else "") + "<user>" + message["content"][-1]["text"] + "<>")

    def encode_text(self, text: str) -> np.ndarray:
        return np.array([ord(character) for character in text], np.int32)

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(token) for token in token_ids)

    decode_response = decode


class CharacterPolicy:
    """What the episode loop needs of a policy, without a model."""

    codec = CharacterCodec()
    reader = None
    end_ids: tuple[int, ...] = ()


class ScriptedEngine:
    """Gives each conversation its responses in order, one conversation a poll, and keeps what it was asked."""

    name, software_version, seeded, version = "scripted", "1", True, 0

    def __init__(
        self, responses: dict[int, list[Response]] | list[Response], codec: Any = CharacterPolicy.codec
    ) -> None:
        self.codec = codec
        self.responses = (
            {0: list(responses)} if isinstance(responses, list) else {k: list(v) for k, v in responses.items()}
        )
        self.requests: list[Request] = []
        self.released: list[int] = []
        self.versions: Callable[[int], int] = lambda answered: 3
        self._queue: list[Request] = []
        self._answered = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self._queue += requests

    def poll(self) -> list[Result]:
        if not self._queue:
            return []
        # Last in, first out: the loop must not depend on the order of the answers.
        request = self._queue.pop()
        text, reason = self.responses[request.id].pop(0)
        ids = self.codec.encode_text(text)
        version, self._answered = self.versions(self._answered), self._answered + 1
        return [Result(request.id, ids, np.full(len(ids), -0.5, np.float32), reason, version)]

    def abort(self, ids: Iterable[int]) -> None:
        """Queued requests are answered with half of their text."""
        dropped = set(ids)
        for request in self._queue:
            if request.id in dropped:
                text, _ = self.responses[request.id].pop(0)
                self.responses[request.id].insert(0, (text[: len(text) // 2], "abort"))

    def release(self, ids: Iterable[int]) -> None:
        self.released += ids

    @property
    def asked(self) -> list[tuple[int, int | None]]:
        """(tokens, max_new_tokens) of each request."""
        return [(len(request.token_ids), request.max_new_tokens) for request in self.requests]


class BatchEngine(ScriptedEngine):
    """Answers all that is asked in one poll, as the transformers engine does."""

    def poll(self) -> list[Result]:
        results = [result for found in iter(super().poll, []) for result in found]
        return sorted(results, key=lambda result: result.id)


class TalkEnv:
    """Answers every response with the same two characters; ends after so many of them, or never."""

    def __init__(self, ends_after: int | None = None, raises: str = "", observation: str = "ok") -> None:
        self.ends_after, self.raises, self.observation = ends_after, raises, observation
        self.heard: list[str] = []
        self.closed = 0

    def _maybe_raise(self, place: str) -> None:
        if self.raises == place:
            raise RuntimeError(f"broken {place}")

    def reset(self):
        self._maybe_raise("reset")
        return None, {}

    def step(self, text):
        self._maybe_raise("step")
        self.heard.append(text)
        return {"obs_str": self.observation}, len(self.heard) == self.ends_after, {"turn_reward": 0.25}

    def format_observation(self, observation):
        self._maybe_raise("format_observation")
        return {"role": "user", "content": [{"type": "text", "text": observation["obs_str"]}]}

    def close(self):
        self.closed += 1
        self._maybe_raise("close")


# The episode loop takes environments and rewards by dotted path; tests put theirs here.
made: list[TalkEnv] = []


def build_env(sample: dict[str, Any], args: dict[str, Any]) -> TalkEnv:
    """Environment of a row: its `env` entry, or the arguments."""
    made.append(TalkEnv(**(sample.get("env") or args)))
    made[-1]._maybe_raise("build")
    return made[-1]


def one_per_response(outcome: Any, args: dict[str, Any]) -> dict[str, float]:
    """Reward: number of responses, times a factor."""
    return {"reward": float(len(outcome.responses)) * args.get("factor", 1.0), "length": float(len(outcome.response))}


def make_settings(
    env: dict[str, Any] | None = None,
    reward: str = "one_per_response",
    factory: str = f"{__name__}.build_env",
    **rollout: Any,
) -> RolloutSettings:
    """Settings over the stand-ins; the separator is off, so that an observation costs 8 tokens more than its text."""
    rules = RolloutRules(**{"turn_separator": False, **rollout.pop("rules", {})})
    options = RolloutOptions(**{"max_tokens_per_turn": None, "max_failed_share": 1.0, "rules": rules} | rollout)
    function = reward if "." in reward else f"{__name__}.{reward}"
    return RolloutSettings(
        EnvOptions(factory=factory, args=env or {}),
        RewardOptions(function=function),
        options,
        SamplingOptions(),
        iteration=0,
        task="talk",
    )


async def same_loop(session, request):
    """The built-in loop, written by a user."""
    await session.open()
    session.prompt(request.prompt)
    while (text := await session.respond()) is not None:
        await asyncio.sleep(0)
        observation, done, info = await session.step(text)
        session.end_turn(info, done=done)
        if session.is_pending:
            session.observe(await session.call(session.env.format_observation, observation))


def requests_of(rows: Sequence[dict[str, Any]], size: int | None = None) -> list[EpisodeRequest]:
    """A request for each row, in groups of a size; None: in one group."""
    size = size or len(rows)
    return [
        EpisodeRequest(f"t{n}", {"id": f"r{n}", "prompt": PROMPT, **row}, n // size, n % size, n)
        for n, row in enumerate(rows)
    ]


def play_scripted(
    responses: dict[int, list[Response]] | list[Response],
    settings: RolloutSettings,
    rows: list[dict[str, Any]] | None = None,
) -> tuple[list[Trajectory], ScriptedEngine]:
    """Play one episode per row (one row by default) with scripted responses."""
    made.clear()
    engine = ScriptedEngine(responses)
    return rollout(engine, CharacterPolicy(), requests_of(rows or [{}]), settings), engine


def play_right(rows: list[dict[str, Any]], settings: RolloutSettings) -> list[Trajectory]:
    """One episode per row, of up to 8 responses `right`."""
    return play_scripted({number: [("right", "stop")] * 8 for number in range(len(rows))}, settings, rows)[0]


def replayer_of(settings: RolloutSettings) -> Replayer:
    """A replayer of episodes with these settings."""
    policy: Any = CharacterPolicy()
    return Replayer(policy, settings.env, settings.reward, settings.rollout, task_or_plain("talk"))


def check_replay(row: dict[str, Any], settings: RolloutSettings) -> None:
    """Episodes of one row differ by chance; a replay draws what they drew, and with other seeds it would not."""
    episodes, replayer = play_right([row] * 6, settings), replayer_of(settings)
    assert len({episode.response for episode in episodes}) > 2
    rows = prompts_by_key([{"id": one.task_id, "prompt": PROMPT, **row} for one in episodes], replayer.task)
    assert replayer.differences(episodes, rows) == []
    others = [replace(episode, seed=episode.seed + 100) for episode in episodes]
    assert len(replayer.differences(others, rows)) > 2


def geometry_settings(turns: int, reward: str = "math_reward") -> RolloutSettings:
    """Settings of geometry with the scoring tool, of which no episode may fail."""
    return RolloutSettings(
        EnvOptions(factory="geo_sokoban_pipeline.envs.geo3k.env.build_env", args={"max_turns": turns}),
        RewardOptions(function=f"geo_sokoban_pipeline.rewards.geo3k.{reward}"),
        RolloutOptions(max_turns=turns, max_tokens_per_turn=None, max_failed_share=0.0),
        SamplingOptions(),
        iteration=0,
        task="geo3k_multi_turn",
    )
