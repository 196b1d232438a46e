"""TRL's side: `GRPOTrainer` with an environment, at its fastest honest settings on a CPU.

TRL's own code runs unchanged. Its generations are stored, and checked only after the clock has stopped.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from benchmarks.peer.setting import (
    Setting,
    StepReport,
    copy_weights,
    describe_episodes,
    describe_running,
    largest_change,
)
from benchmarks.peer.tools import TimedImageProcessor, ToolEnv, build_processor, score
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from datasets import Dataset
from geo_sokoban_pipeline.policies.policy import load_policy

Rows = list[dict[str, Any]]


class WatchedTrainer(GRPOTrainer):
    """`GRPOTrainer` that stores its generations for the checks after the clock has stopped."""

    generated: dict[str, Any]
    generation_seconds = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        began = time.process_time()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.generation_seconds = time.process_time() - began
        self.generated = output
        return output


class Clock(TrainerCallback):
    """Stops after every optimizer step, reports it, and waits for the next request."""

    def __init__(self, wait: Callable[[], bool], tell: Callable[[StepReport], None]) -> None:
        self._wait, self._tell = wait, tell
        self.trainer: Any = None
        self.patches = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock of the first step."""
        vision = self.trainer.model.model.visual
        vision.register_forward_pre_hook(self._count)
        self._start(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock, report, wait, start it again."""
        wall, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._tell(self._report(wall, cpu, state.global_step - self._steps))
        self._start(control)

    def _start(self, control: Any) -> None:
        if not self._wait():
            control.should_training_stop = True
            return
        self._weights = copy_weights(self.trainer.model.model.visual)
        self._steps = self.trainer.state.global_step
        self.patches, TimedImageProcessor.seconds = 0, 0.0
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def _count(self, module: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            self.patches += len(args[0])

    def _report(self, wall: float, cpu: float, steps: int) -> StepReport:
        trainer = self.trainer
        batch = trainer.generated
        pixels = batch.get("pixel_values")
        token_ids, masks = _unpadded(batch)
        return StepReport(
            wall=wall,
            cpu=cpu,
            generation=trainer.generation_seconds,
            update=cpu - trainer.generation_seconds,
            processing=TimedImageProcessor.seconds,
            writing=0.0,
            levels=[env._level for env in trainer.environments],
            images=0 if pixels is None else sum(batch["num_images"]),
            trained_episodes=len(token_ids),
            optimizer_steps=steps,
            vision_moved=largest_change(self._weights, trainer.model.model.visual),
            running=describe_running(trainer.model, trainer.optimizer),
            notes={
                "pixel_rows": 0 if pixels is None else len(pixels),
                "trained_patches": self.patches,
                "env_turns": [env._turns_done() for env in trainer.environments],
            },
            **describe_episodes(token_ids, masks, trainer._image_pad_token_id),
        )


def run_theirs(setting: Setting, rows: Rows, wait: Callable[[], bool], tell: Callable[[StepReport], None]) -> None:
    """Do one step whenever `wait` returns True, and report it; rows are taken in order."""
    policy = load_policy(setting.policy)
    ToolEnv.turns = setting.turns
    samples = [{name: row[name] for name in ("prompt", "extra_info", "level_hash")} for row in rows]
    dataset = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": ""}]] * len(rows), "sample": [json.dumps(row) for row in samples]}
    )
    arguments = make_arguments(setting)
    # One sampled token that stands for an image, and the library looks for an image that is not there.
    arguments["generation_kwargs"]["suppress_tokens"] = policy.banned_ids.tolist()
    clock = Clock(wait, tell)
    with tempfile.TemporaryDirectory() as folder:
        trainer = WatchedTrainer(
            model=policy.model,
            reward_funcs=score,
            args=GRPOConfig(output_dir=folder, **arguments),
            train_dataset=dataset,
            processing_class=build_processor(policy),
            callbacks=[clock],
            environment_factory=ToolEnv,
        )
        trainer.remove_callback(PrinterCallback)
        clock.trainer = trainer
        trainer.train()


def make_arguments(setting: Setting) -> dict[str, Any]:
    """Arguments of `GRPOConfig`: the shared setting, everything that would cost time needlessly switched off."""
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_vllm": False,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": setting.clip,
        "num_generations": setting.group_size,
        "per_device_train_batch_size": setting.group_size,
        "gradient_accumulation_steps": setting.groups,
        "max_steps": setting.steps,
        "shuffle_dataset": False,
        "max_completion_length": 64 * setting.turns,
        "max_tool_calling_iterations": setting.turns - 1,
        "generation_kwargs": {"max_new_tokens": setting.max_new_tokens},
        "temperature": setting.temperature,
        "learning_rate": setting.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": setting.betas[0],
        "adam_beta2": setting.betas[1],
        "weight_decay": 0.0,
        "max_grad_norm": setting.gradient_norm,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _unpadded(batch: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(L,) ids and sampled masks of each conversation."""
    rows, masks = [], []
    for index in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][index][batch["prompt_mask"][index].bool()].numpy()
        here = batch["completion_mask"][index].bool()
        rows.append(np.concatenate([prompt, batch["completion_ids"][index][here].numpy()]))
        masks.append(np.concatenate([np.zeros(len(prompt), np.int64), batch["tool_mask"][index][here].numpy()]))
    return rows, masks
