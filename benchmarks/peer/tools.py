"""Adapters for TRL, so that its conversations hold the same tokens as ours; all of them help TRL.

The chat template shows no tool schema, and every response, however written, is read as one call of the environment, so
no response ends an episode. Images go through `Qwen2VLImageProcessorPil`, as on our side.
"""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.peer.env import REWARD_ARGS, FixedLengthEnv, build_env
from transformers import ProcessorMixin, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.policies.chat import split_placeholders
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rewards.sokoban import compute_reward
from geo_sokoban_pipeline.rollout.episode import EpisodeResult

# The policy's own template; results of tools are shown as its user turns, and calls are rendered, which TRL insists on.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif item.type == 'text' -%}{{- item.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- call.function.name + (call.function.arguments | tojson) -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# The whole response is the argument of one call of `move`.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"^(?=[\s\S])",
            "close_pattern": r"<\|im_end\|>|$",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "move", "arguments": {"response": "{content}"}}},
        },
        "content": {"close_pattern": "$", "content": "text"},
    },
}


class ToolEnv:
    """The shared environment in the form that `environment_factory` asks for."""

    turns = 0  # set before the trainer is built, which takes no arguments for its environments

    def reset(self, sample: str, **_: Any) -> list[dict[str, Any]]:
        """Start the level of a dataset row; returns the content of the first prompt."""
        row = json.loads(sample)
        self._env: FixedLengthEnv = build_env(row, {"turns": self.turns})
        self._level = SOKOBAN.key_of(row)
        observation, _ = self._env.reset()
        images = _content(self._env.format_observation(observation))[:1]
        return split_placeholders(row["prompt"], images)

    def move(self, response: str) -> list[dict[str, Any]]:
        """Carry out a move.

        Args:
            response: the whole response of the policy.
        """
        observation, _, _ = self._env.step(response)
        return _content(self._env.format_observation(observation))

    # Public methods are tools; these are for the benchmark.
    def _turns_done(self) -> int:
        return len(self._env.turn_rewards)

    def _reward(self) -> float:
        return compute_reward(EpisodeResult({}, "completed", [], "", [], self._env.metadata()), REWARD_ARGS)["reward"]


class TinyProcessor(Qwen3VLProcessor):
    """Qwen3-VL's processor without its video part, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class TimedImageProcessor(Qwen2VLImageProcessorPil):
    """The image processor with a clock of CPU time."""

    seconds = 0.0

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        began = time.process_time()
        try:
            return super().preprocess(*args, **kwargs)
        finally:
            TimedImageProcessor.seconds += time.process_time() - began


def score(completions: list[Any], environments: list[ToolEnv], **_: Any) -> list[float]:
    """Rewards; first it carries out the last response, which TRL's limit of calls leaves out."""
    for completion, environment in zip(completions, environments, strict=True):
        environment.move(**completion[-1]["tool_calls"][0]["function"]["arguments"])
    return [environment._reward() for environment in environments]


def build_processor(policy: Policy) -> TinyProcessor:
    """The policy's processor in the form that TRL takes."""
    tokenizer = policy.tokenizer
    tokenizer.response_template = RESPONSE_TEMPLATE
    known = policy.image_processor
    values = {name: getattr(known, name) for name in ("size", "patch_size", "temporal_patch_size", "merge_size")}
    images = TimedImageProcessor(**values, image_mean=known.image_mean, image_std=known.image_std)
    return TinyProcessor(images, tokenizer, CHAT_TEMPLATE)


def _content(message: dict[str, Any]) -> list[dict[str, Any]]:
    # RGB at once: the processor would convert a palette image again in every later turn.
    return [
        {**item, "image": item["image"].convert("RGB")} if item["type"] == "image" else item
        for item in message["content"]
    ]
