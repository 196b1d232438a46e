"""`docs/your_own_estimator.md`: its examples give their papers' numbers, run together, and see the fields it names."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from geo_sokoban_pipeline.grpo import reduce_tokens
from geo_sokoban_pipeline.grpo.groups import Episodes
from geo_sokoban_pipeline.grpo.loss import token_batch
from geo_sokoban_pipeline.grpo.sequences import TokenBatch
from runs import ROOT, Project

PAGE = (ROOT / "docs" / "your_own_estimator.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(SETTINGS,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FILES = dict(zip(("opo", "dppo", "near"), CODE, strict=True))
ARGS = yaml.safe_load(SETTINGS)["run"]["params"]["train_sokoban"]["grpo"]


def example(name: str, function: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(FILES[name], namespace)  # noqa: S102 - the page's own code
    return namespace[function]


def test_every_field_is_on_the_page() -> None:
    fields = {field.name for kind in (Episodes, TokenBatch) for field in dataclasses.fields(kind)}
    assert fields == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_the_advantage_is_the_papers() -> None:
    lengths = [np.array([count]) for count in (2, 4, 3, 1, 3, 4)]
    rewards = np.array([1, 0, 0.25, 2, 2, -1])
    episodes = Episodes(np.array([0, 0, 0, 1, 1, 1]), rewards, np.ones(6, bool), lengths)
    found = example("opo", "advantage")(episodes, ARGS["advantage_args"])
    np.testing.assert_allclose(found, [0.694444, -0.305556, -0.055556, 1.5, 1.5, -1.5], atol=1e-6)


@pytest.fixture
def tokens() -> TokenBatch:
    """Two episodes with holes, in which there is junk."""
    new = torch.tensor([[-0.5, -0.6, -1, -2.1], [-0.5, -0.9, -1, -1]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1, -0.5, -9, -2], [-2, -0.3, -9, -9]], dtype=torch.float64)
    rollout = torch.tensor([[-1.1, -0.45, -5, -2.8], [-2.02, -0.2, -5, -5]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])
    return token_batch(new, old, rollout, torch.tensor([1.0, -0.5], dtype=torch.float64), mask)


def test_the_loss_is_the_papers(tokens: TokenBatch) -> None:
    terms, metrics = example("dppo", "loss")(tokens, ARGS["loss_args"])
    loss = reduce_tokens(terms, tokens.mask, "token_mean")
    (gradient,) = torch.autograd.grad(loss, tokens.log_probs)
    assert float(loss.detach()) == pytest.approx(-0.116935, abs=1e-6)
    wanted = [[0.000240, -0.172202, 0, -0.402471], [0.457831, -0.000280, 0, 0]]
    np.testing.assert_allclose(gradient.numpy(), wanted, atol=1e-6)
    assert metrics["dropped"].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]


def test_the_rule_keeps_tokens_that_nearly_agree(tokens: TokenBatch) -> None:
    weights = example("near", "importance")(tokens, ARGS["importance_args"]).masked_fill(~tokens.mask, 0)
    np.testing.assert_allclose(weights, [[1.105171, 0.951229, 0, 0], [1.020201, 0.904837, 0, 0]], atol=1e-6)


@pytest.mark.slow
def test_the_examples_train_together(tmp_path: Path) -> None:
    settings = yaml.safe_load(SETTINGS)["run"]["params"]["train_sokoban"]
    for name, code in FILES.items():
        assert len(code.splitlines()) < 40
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    for kind in ("advantage", "loss", "importance"):
        settings["grpo"][kind] = str(tmp_path / settings["grpo"][kind])
    settings["loop"] = {"iterations": 2}
    project = Project(tmp_path / "data")
    project.run(params={"train_sokoban": settings})
    rows = [json.loads(path.read_text()) for path in sorted(project.root.rglob("metrics/iter=*.json"))]
    assert len(rows) == 2 and all(row["train/steps"] for row in rows)
    assert all(0 <= row["train/dropped"] <= 1 and row["train/tis"] > 0 for row in rows)
