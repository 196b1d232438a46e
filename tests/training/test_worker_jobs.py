"""Methods of a worker, called in this process: its demonstrations and its steps are those of the driver."""

from __future__ import annotations

import numpy as np
import torch

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import SftObjective
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.worker import Worker
from training.setup import Setup, copied, weights

RATE = 1e-3


def test_demonstrations_and_steps_of_a_worker(setup: Setup) -> None:
    worker = Worker(copied(setup.policy), setup.options)
    worker.demonstrate(setup.rows, 5, "training")
    worker.build_backend(None, OptimizerOptions(), 1.0)

    backend = TorchBackend(copied(setup.policy), OptimizerOptions())
    expert = Demonstrator(setup.rows, backend.policy, setup.options, 5, "training")
    samples = [expert.demonstrate(number) for number in range(2, 5)]
    expected = backend.step(samples, SftObjective(), RATE)
    assert worker.step(range(2, 5), SftObjective(), RATE, None) == expected
    assert torch.equal(weights(worker.policy), weights(backend.policy))
    assert not torch.equal(weights(worker.policy), weights(setup.policy))
    for own, other in zip(worker.backend.log_probs(samples), backend.log_probs(samples), strict=True):
        assert np.array_equal(own, other)
