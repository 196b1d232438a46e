"""Jobs of a worker process, run in this one: demonstrations and gradients are those that the driver would compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.grpo.loss import SftObjective
from geo_sokoban_pipeline.training.backends.torch import LogProbs, PassSetting, SftGradients
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.shared_tensors import share_like
from geo_sokoban_pipeline.training.worker import SetDemonstrations, Worker
from training import reference
from training.setup import Setup, copied

SETTING = PassSetting(1.0, 8192, 16_384)


def test_demonstrations_and_gradients_of_a_worker(setup: Setup) -> None:
    policy = copied(setup.policy)
    gradients = share_like(dict(policy.model.named_parameters()))
    worker = Worker(policy, setup.options, gradients)
    SetDemonstrations(setup.rows, 5, "training")(worker)
    part = SftGradients(range(2, 5), SftObjective(), SETTING)(worker)
    assert all(parameter.grad is None for parameter in policy.model.parameters()), "moved to the shared buffer"

    own = copied(setup.policy)
    expert = Demonstrator(setup.rows, own, setup.options, 5, "training")
    samples = [expert.demonstrate(number) for number in range(2, 5)]
    values = [reference.demonstrated_log_probs(own, sample) for sample in samples]
    loss = -torch.cat(values).mean()
    loss.backward()
    assert part.tokens == sum(len(sample.targets) for sample in samples)
    assert part.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    wanted = {name: p.grad for name, p in own.model.named_parameters() if p.grad is not None}
    assert set(part.names) == set(wanted)
    for name, gradient in gradients.views().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5, msg=name)

    scored = LogProbs(samples, SETTING)(worker)
    for row, value in zip(scored, values, strict=True):
        np.testing.assert_allclose(row, value.detach(), atol=1e-4)
