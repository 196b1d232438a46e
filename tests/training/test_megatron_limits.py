"""Layouts and models that Megatron-Core does not train are refused before any work, with the numbers and a way out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import MegatronOptions
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.first_checks import check_megatron
from geo_sokoban_pipeline.runs.storage import write_json
from geo_sokoban_pipeline.training.backends.megatron import limits
from geo_sokoban_pipeline.training.backends.megatron.limits import find_obstacles
from geo_sokoban_pipeline.training.worker_group import open_worker_group
from task_options import TrainOptions
from training.setup import Setup

pytestmark = pytest.mark.xdist_group("ranks")

MODEL = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "intermediate_size": 6144,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default"},
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"processes": 3, "megatron": {"tensor_parallel": 2}}, "megatron.tensor_parallel=2 with processes=3: it must"),
        ({"processes": 1, "megatron": {"tensor_parallel": 4}}, "tensor_parallel=4 with processes=1.*take processes=4"),
        ({"processes": 4, "sharding": "hybrid", "replicas": 2}, "sharding=hybrid with backend=megatron.*sharding=full"),
        ({"megatron": {"sequence_parallel": True}}, "sequence_parallel=true with tensor_parallel=1.*nothing to split"),
        (
            {"processes": 2, "megatron": {"tensor_parallel": 2, "sequence_parallel": True}},
            "sequence_parallel=true with policy.device=cpu.*Set sequence_parallel=false",
        ),
        ({"megatron": {"tensor_parallel": 0}}, "greater than or equal to 1"),
        ({"megatron": {"tensor_paralel": 2}}, "tensor_paralel"),
    ],
)
def test_layouts_that_are_refused(train_options: TrainOptions, values: dict[str, Any], message: str) -> None:
    given = {**train_options.model_dump(), "threads": 1, "backend": "megatron", **values}
    with pytest.raises(ValidationError, match=message):
        TrainOptions.model_validate(given)


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({}, 4, None),
        ({}, 8, None),
        ({}, 16, "=16: it does not divide the model's 8 key and value heads; take 8"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            4,
            "4: it does not divide the model's 6 query heads; take 3",
        ),
        ({"vocab_size": 151_937}, 2, "the model's 151937 rows of the vocabulary; take 1"),
        ({"intermediate_size": 6145}, 2, "the model's 6145 numbers within an MLP"),
        ({"num_experts": 128}, 1, "with a mixture of 128 experts: .* set backend=fsdp"),
        ({"attention_bias": True}, 1, "attention_bias=True .* set backend=fsdp"),
        ({"hidden_act": "gelu"}, 1, "hidden_act=gelu .* it has silu alone"),
        ({"rope_parameters": {"rope_type": "yarn"}}, 1, "rope_type=yarn"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}, 1, None),
    ],
)
def test_models_that_are_refused(changed: dict[str, Any], ranks: int, message: str | None) -> None:
    found = find_obstacles({**MODEL, **changed}, MegatronOptions(tensor_parallel=ranks), 16)
    if message is None:
        assert found == []
        return
    with pytest.raises(ValueError, match=message):
        limits.check_limits({**MODEL, **changed}, MegatronOptions(tensor_parallel=ranks), 16)
    assert all(text.startswith("backend=megatron ") for text in found)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "find_spec", lambda name: None)
    (found,) = find_obstacles(MODEL, MegatronOptions(), 1)
    assert "pip install 'geo-sokoban-pipeline[megatron]'" in found
    assert importlib.util.find_spec("megatron.core") is not None


@pytest.mark.parametrize("place", ["tiny", "folder", "continued"])
def test_a_command_is_refused_before_any_work(place: str, train_options: TrainOptions, tmp_path: Path) -> None:
    values = train_options.model_dump()
    values |= {"backend": "megatron", "megatron": {"tensor_parallel": 4}, "processes": 4, "threads": 1}
    folder = tmp_path / ("base_policy" if place == "continued" else "mine")
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "qwen3_vl", "text_config": {**MODEL, "num_key_value_heads": 2}})
    write_json(folder / "manifest.json", {})
    values["policy"]["tiny"]["kv_heads"] = 2
    if place == "folder":
        values["policy"] |= {"source": "folder", "path": str(folder)}
    if place == "continued":
        values["policy"]["tiny"]["kv_heads"] = 4
    parameters = ProjectParameters.model_construct(train_sokoban=TrainOptions.model_validate(values))
    with pytest.raises(
        ParameterError, match=r"train_sokoban\.backend=megatron with .* 2 key and value heads; take 2\.$"
    ):
        check_megatron("train_sokoban", tmp_path, parameters)
    check_megatron("evaluate_sokoban", tmp_path, parameters)


def test_the_backend_is_given_in_any_case(train_options: TrainOptions) -> None:
    given = {**train_options.model_dump(), "backend": "Megatron"}
    assert TrainOptions.model_validate(given).backend == "megatron"
    assert json.loads(TrainOptions.model_validate(given).model_dump_json())["megatron"] == {
        "tensor_parallel": 1,
        "sequence_parallel": False,
    }


def test_sequence_parallelism_needs_a_gpu(setup: Setup) -> None:
    chosen = setup.options.policy.model_copy(update={"device": "auto"})
    layout = MegatronOptions(tensor_parallel=2, sequence_parallel=True)
    options = setup.options.model_copy(
        update={"policy": chosen, "backend": "megatron", "megatron": layout, "processes": 2}
    )
    with (
        pytest.raises(ValueError, match="policy.device=auto: torch sees no GPU"),
        open_worker_group(setup.policy, options),
    ):
        pass
