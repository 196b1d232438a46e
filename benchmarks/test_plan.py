"""The plan of a rank's memory for the presets of full size, against a trace of their updates at full depth.

Run with `pytest benchmarks/test_plan.py -s`, about three CPU-minutes on one core: tensors are fake, so nothing is
computed but sizes. The traces are those of `tests/preflight/test_memory_plan.py`, which has three layers. Threshold:
planned bytes are within a tenth of the traced ones.
"""

from __future__ import annotations

from typing import Any

from benchmarks.records import keep
from benchmarks.tables import plan_ratio
from scripts.scaling_docs.page import PRESETS, Preset, parameters_of

from geo_sokoban_pipeline.grpo.loss import StepSize
from geo_sokoban_pipeline.preflight.estimate import Estimate
from geo_sokoban_pipeline.preflight.memory import StepLoad, held_bytes, plan_rank
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.published_sizes import published_config, published_name
from preflight.test_memory_plan import SummedLogProbs, apart, fake_pass, living_bytes, text_sample

THRESHOLD = 0.1
LANGUAGE = ("output head", "decoder layers", "embeddings", "gathering")  # phases


def compare(preset: Preset) -> dict[str, Any]:
    """Planned and traced bytes of a rank, without what the language model's passes do not touch."""
    found = parameters_of(preset.env, preset.words)
    options = getattr(found, f"train_{preset.task}")
    name = published_name(options.policy.path)
    assert name is not None
    config = published_config(name)
    model = ModelShape.of(options.policy, config)
    estimate = Estimate.of(options, getattr(found, f"estimate_{preset.task}"), model)
    longest = estimate.shape.longest(options) or model.context
    load, offloads = StepLoad.of(options, estimate.shape, longest), options.optimizer.offload
    assert load.passes > 1
    rank = plan_rank(options, model, load, on_gpu=offloads)
    assert rank.phase in LANGUAGE
    if offloads:
        planned = sum(rank.phases[rank.phase].values())
    else:
        planned = rank.total - apart(rank, held_bytes(options, model, model.vision), model.vision, options)
    trained = load.tokens * estimate.sampled // estimate.length
    samples = [text_sample(load.tokens, trained) for _ in range(2)]
    layout = {"processes": options.processes, "replicas": options.replicas, "offload": offloads}
    with fake_pass(config, options, layout) as gradients:
        traced = living_bytes(
            gradients.policy.network.language,
            lambda: gradients.accumulate(samples, SummedLogProbs(), StepSize.of(samples)),
        )
    if offloads:  # the memory of the CPU is that of the device here; gradients come there behind the peak
        traced -= model.value_bytes * (model.parameters - model.vision.parameters)
    return {
        "command": f"{preset.task} --env={preset.env}",
        "model": name,
        "ranks": options.processes,
        "tokens": load.tokens,
        "phase": rank.phase,
        "planned": planned,
        "traced": traced,
    }


def test_the_plan_of_the_presets() -> None:
    found = {"rows": [compare(preset) for preset in PRESETS if not preset.words]}
    keep("plan", found)
    assert all(abs(plan_ratio(row) - 1) <= THRESHOLD for row in found["rows"])
