"""Estimators of the user's own: what they may return, and the one line about what they may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.estimators import Kind
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.envs.plugins import PluginError
from geo_sokoban_pipeline.grpo.estimators import (
    Estimator,
    EstimatorError,
    estimate_advantages,
    estimate_loss,
    estimate_weights,
    keeps_zeros,
    load_estimator,
)
from geo_sokoban_pipeline.grpo.groups import Episodes
from geo_sokoban_pipeline.grpo.loss import token_batch
from geo_sokoban_pipeline.preflight.own_code import try_estimators
from task_options import TrainOptions

EPISODES = Episodes(
    group=np.zeros(2, np.int64),
    reward=np.array([1.0, 0.0]),
    trained=np.ones(2, bool),
    lengths=[np.array([3, 2]), np.array([4])],
)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
BATCH = token_batch(
    torch.full((2, 3), -0.5, requires_grad=True), torch.full((2, 3), -0.6), torch.zeros(2, 3), torch.ones(2), MASK
)
CALLS: dict[Kind, Callable[[Estimator], Any]] = {
    "advantage": lambda one: estimate_advantages(one, EPISODES),
    "loss": lambda one: estimate_loss(one, BATCH),
    "importance": lambda one: estimate_weights(one, BATCH),
}


def options_of(kind: Kind, spec: str, **arguments: Any) -> GrpoOptions:
    return GrpoOptions.model_validate({"old_log_probs": "recompute", kind: spec, f"{kind}_args": arguments})


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Kind, str], str]:
    """A writer of a file with an estimator of this body; gives what names it."""
    monkeypatch.chdir(tmp_path)

    def write(kind: Kind, body: str) -> str:
        (tmp_path / "own.py").write_text(f"import numpy, torch\n\n\ndef {kind}(data, args):\n    {body}\n")
        return "own.py"

    return write


@pytest.mark.parametrize(
    ("body", "values", "per_turn"),
    [
        ("return data.reward * args['factor']", [[3.0], [0.0]], False),
        ("return [1, True]", [[1.0], [1.0]], False),
        ("return [[1.0, 2.0], numpy.array([3])]", [[1.0, 2.0], [3.0]], True),
        ("return [own * 1.0 for own in data.lengths]", [[3.0, 2.0], [4.0]], True),
    ],
)
def test_advantages_of_episodes_or_of_turns(write: Any, body: str, values: Any, per_turn: bool) -> None:
    options = options_of("advantage", write("advantage", body), factor=3.0)
    found = estimate_advantages(load_estimator("advantage", options), EPISODES)
    assert [row.tolist() for row in found.values] == values and found.per_turn is per_turn
    assert not keeps_zeros(options)  # it has promised nothing


def test_losses_and_weights_count_where_the_mask_is(write: Any) -> None:
    loss = write("loss", "return data.log_probs / data.mask, {'halves': torch.full((2, 3), args['half'])}")
    terms, metrics = estimate_loss(load_estimator("loss", options_of("loss", loss, half=0.5)), BATCH)
    assert terms.tolist() == [[-0.5, -0.5, -0.5], [-0.5, 0.0, 0.0]]
    assert metrics["halves"].tolist() == [[0.5, 0.5, 0.5], [0.5, 0.0, 0.0]]


WRONG: list[tuple[Kind, str, str]] = [
    ("advantage", "return None", "must return one number, or one array of turns, for each of 2 episodes, not None"),
    ("advantage", "return [0.5]", "must return one number, or one array of turns, for each of 2 episodes, not a list"),
    ("advantage", "return 'ab'", "must return one number, or one array of turns, for each of 2 episodes, not a str of"),
    ("advantage", "return ['a', 'b']", "must return numbers; the first is a str"),
    ("advantage", "return [[1.0, 2.0], 3.0]", "episode 1 has 1 turns and advantages of shape ()"),
    ("advantage", "return [[1.0], [2.0]]", "episode 0 has 2 turns and advantages of shape (1,)"),
    ("advantage", "return [1.0, float('nan')]", "episode 1 has the advantage nan; it must be finite"),
    ("advantage", "return [[1.0, -float('inf')], [0.0]]", "episode 0 has the advantage -inf; it must be finite"),
    ("loss", "return data.old_log_probs, {}", "terms have no gradient; they must depend on batch.log_probs"),
    ("loss", "return data.log_probs, {'loss': data.mask}", "the metric 'loss' is the trainer's; give it another name"),
    ("loss", "return data.log_probs", "must return ((B, T) terms, metrics by name), not a Tensor"),
    ("loss", "return data.log_probs.sum(), {}", "terms must be a tensor of shape (2, 3), not shape ()"),
    ("loss", "return 1.0, {}", "terms must be a tensor of shape (2, 3), not a float"),
    ("loss", "return data.log_probs, {'clipped': 0.5}", "metric 'clipped' must be a tensor of shape (2, 3), not a"),
    ("loss", "return data.log_probs * float('nan'), {}", "terms must be finite where the mask is 1"),
    ("importance", "return None", "weights must be a tensor of shape (2, 3), not None"),
    ("importance", "return data.mask[0]", "weights must be a tensor of shape (2, 3), not shape (3,)"),
    ("importance", "return data.log_probs / 0.0", "weights must be finite where the mask is 1"),
]


@pytest.mark.parametrize(("kind", "body", "said"), WRONG)
def test_a_result_that_does_not_fit_is_told_with_the_function(write: Any, kind: Kind, body: str, said: str) -> None:
    with pytest.raises(EstimatorError) as error:
        CALLS[kind](load_estimator(kind, options_of(kind, write(kind, body))))
    text = str(error.value)
    assert text.startswith(f"grpo.{kind}=own.py: {said}") and text.endswith(", in own.py, line 4")
    assert len(text.splitlines()) == 1


def test_a_result_of_a_callable_without_lines_is_refused_too(write: Any) -> None:
    spec = write("advantage", "return None")
    Path(spec).write_text(f"import functools\n{Path(spec).read_text()}\n\nadvantage = functools.partial(advantage)\n")
    with pytest.raises(EstimatorError, match="must return one number, or one array of turns, .* not None$"):
        CALLS["advantage"](load_estimator("advantage", options_of("advantage", spec)))


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("advantage", "return data.reward", "it promises zero_on_equal_groups, but a group of equal rewards has other"),
        ("loss", "return data.log_probs - data.log_probs.mean(), {}", "terms of a row change with the other rows"),
    ],
)
def test_a_broken_promise_is_found_before_a_run(write: Any, kind: Kind, body: str, said: str) -> None:
    spec = write(kind, body)
    Path(spec).write_text(f"{Path(spec).read_text()}\n\n{kind}.zero_on_equal_groups = True\n")
    (found,) = try_estimators("train_sokoban", TrainOptions.model_validate({"grpo": {kind: spec}}))
    assert found.state == "failure" and found.found.startswith(f"train_sokoban.grpo.{kind}=own.py: {said}")


@pytest.mark.parametrize("kind", CALLS)
def test_an_error_within_is_told_with_its_line(write: Any, kind: Kind) -> None:
    with pytest.raises(EstimatorError) as error:
        CALLS[kind](load_estimator(kind, options_of(kind, write(kind, "return args['tau']"))))
    assert str(error.value) == f"grpo.{kind}=own.py: KeyError: 'tau', in own.py, line 5: return args['tau']"


@pytest.mark.parametrize("kind", CALLS)
def test_own_code_that_is_not_there_is_named(write: Any, kind: Kind) -> None:
    write(kind, "return None")
    for spec, said in (
        ("missing.py", "there is no file"),
        ("own.py:other", f"has no 'other'; it defines {kind}"),
        ("no_such.function", "no module"),
    ):
        with pytest.raises(PluginError, match=said):
            load_estimator(kind, options_of(kind, spec))
