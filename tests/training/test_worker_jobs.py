"""Methods of a worker, called in this process: demonstrations, gradients and log-probs are those of the driver."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import SftObjective
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.worker import Worker
from policies.library import sample_log_probs
from training.setup import Setup, copied

RATE = 0.5


def test_demonstrations_and_gradients_of_a_worker(setup: Setup) -> None:
    worker = Worker(copied(setup.policy), setup.options)
    worker.demonstrate(setup.rows, 5, "training")
    worker.build_backend(None, OptimizerOptions(clip=1e6), 1.0)
    worker.backend.optimizers = Descent(dict(worker.policy.model.named_parameters()))
    before = {name: weight.detach().clone() for name, weight in worker.policy.model.named_parameters()}
    row = worker.step(range(2, 5), SftObjective(), RATE, None)

    own = copied(setup.policy)
    expert = Demonstrator(setup.rows, own, setup.options, 5, "training")
    samples = [expert.demonstrate(number) for number in range(2, 5)]
    values = [sample_log_probs(own, sample) for sample in samples]
    loss = -torch.cat(values).mean()
    loss.backward()
    assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    for name, parameter in worker.policy.model.named_parameters():
        wanted = dict(own.model.named_parameters())[name].grad
        gradient = torch.zeros_like(parameter) if wanted is None else wanted
        torch.testing.assert_close((before[name] - parameter) / RATE, gradient, rtol=1e-3, atol=1e-5, msg=name)
        with torch.no_grad():
            parameter.copy_(before[name])

    scored = worker.backend.log_probs(samples)
    for row_, value in zip(scored, values, strict=True):
        np.testing.assert_allclose(row_, value.detach(), atol=1e-4)


class Descent:
    """In place of the optimizers: plain gradient descent, whose step shows the gradients."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=learning_rate)

    def clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
