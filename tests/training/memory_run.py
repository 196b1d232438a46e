"""What `test_ranks_memory.py` runs as a program of its own: ranks that load, train, save and send a policy they share.

    python -m training.memory_run FOLDER RANKS TENSOR_PARALLEL BUCKET

FOLDER holds the policy, BUCKET is in bytes. Prints JSON: bytes by which each process has grown at most, on the whole
and while weights were sent, driver first, and what each holds.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.qwen3_vl import extend_positions
from geo_sokoban_pipeline.policies.weights import plan_buckets
from geo_sokoban_pipeline.rollout.engines.sglang.sender import pack_tensors
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.training.worker import Worker
from geo_sokoban_pipeline.training.worker_group import load_driver_policy
from open_workers import apply_on_all, open_group
from rollout.engines.sglang.material import request_with
from task_options import TrainOptions
from training.large import forget_peak, peak


def watch_gradients(worker: Worker) -> None:
    """Have a rank's backend note the bytes of its gradients before it drops them."""
    backend = worker.backend
    clear = backend.optimizers.clear_gradients

    def note() -> None:
        backend.gradient_bytes = held(parameter.grad for parameter in trained(backend) if parameter.grad is not None)
        clear()

    backend.optimizers.clear_gradients = note


def trained(backend: Any) -> list[torch.Tensor]:
    groups = [group for optimizer in backend.optimizers.in_force for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that this rank holds of tensors; gradients of a unit share their memory."""
    storages = [own_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_bytes(worker: Worker) -> dict[str, int]:
    """Bytes of parameters, gradients and moments of a rank."""
    backend = worker.backend
    moments, _ = backend.optimizers.state()
    return {
        "parameters": held(trained(backend)),
        "gradients": backend.gradient_bytes,
        "moments": held(moments.values()),
    }


def import_megatron(worker: Worker) -> None:
    """Import the library, whose own memory is not that of a policy."""
    importlib.import_module("geo_sokoban_pipeline.training.backends.megatron.backend")


def samples_of(policy: Policy, count: int) -> list[TrainSample]:
    """Samples with an image and a few trained tokens each."""
    made = []
    for number in range(count):
        request = request_with(policy, [number])
        ids, codec = request.token_ids.astype(np.int64), policy.codec
        grids = [image.grid for image in request.images]
        positions, _ = extend_positions(ids, grids, codec.image_pad_id, codec.merge_size)
        targets = np.arange(len(ids) - 4, len(ids))
        values = np.full(4, -6.0, np.float32)
        made.append(
            TrainSample(
                ids[:-1],
                positions[:, :-1],
                targets,
                ids[targets],
                list(request.images),
                old_log_probs=values,
                rollout_log_probs=values,
                advantages=np.full(4, 1.0 - number, np.float32),
            )
        )
    return made


def main(folder: str, count: int, tensor_parallel: int, bucket_bytes: int) -> None:
    """Run it: by FSDP2, or by Megatron-Core where `tensor_parallel` is not 0."""
    values: dict[str, Any] = {"processes": count, "threads": 1, "sharding": "full", "policy": {"device": "cpu"}}
    if tensor_parallel:
        values |= {"backend": "megatron", "megatron": {"tensor_parallel": tensor_parallel}}
    options = TrainOptions.model_validate(values)
    prepare_process(1)
    policy = load_driver_policy(options, Path(folder))
    samples = samples_of(policy, 4)
    with closing(open_group(policy, options)) as workers, tempfile.TemporaryDirectory() as place:
        everywhere = partial(apply_on_all, workers)
        if tensor_parallel:
            everywhere(import_megatron)
        before = everywhere(forget_peak)
        backend: Any = build_backend(policy, OptimizerOptions(), 1.0, workers)
        everywhere(watch_gradients)
        norms = [backend.step(samples, GrpoObjective(GrpoOptions()), 1e-4)["grad_norm"] for _ in range(3)]
        states = everywhere(state_bytes)
        saved = backend.export(Path(place)) | backend.save_state(Path(place))
        trained = everywhere(peak)
        source, sent, waiting = backend.weight_source(), 0, everywhere(forget_peak)
        source = source.cast(dict.fromkeys(source.specs, "bfloat16"))
        for specs in plan_buckets(source.specs, bucket_bytes // 2):
            sent += sum(map(len, pack_tensors(source.collect(specs, None), specs)))
        after = everywhere(peak)
    found = {
        "grown": [max(most) - first for *most, first in zip(trained, after, before, strict=True)],
        "sending": [most - first for most, first in zip(after, waiting, strict=True)],
        "states": states,
        "norms": norms,
        "saved": sum(file["bytes"] for file in saved.values()),
        "sent": sent,
        "is_empty": policy.is_empty,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
