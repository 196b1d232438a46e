"""Fingerprints against everything that a run is made of: what changes a result changes them, what does not is listed.

The tables are complete by construction: each field of the models is changed in turn.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.estimators import ESTIMATORS, Kind
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.envs.geo3k import data as geometry
from geo_sokoban_pipeline.envs.sokoban import data as sokoban
from geo_sokoban_pipeline.runs.fingerprint import (
    Fingerprint,
    FingerprintError,
    as_current,
    check_fingerprint,
    differences,
    hash_files,
    hash_rows,
    layout_differences,
    loop_parameters,
    policy_parameters,
    unflatten,
    warm_start_parameters,
)
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.training.checkpoint import compare_layout, layout_of
from geo_sokoban_pipeline.training.grpo_loop import RunInputs, loop_fingerprint, run_grpo
from option_fields import leaves, value_at, with_another_value, with_value
from task_options import Geo3kMultiTurnTrainOptions, Geo3kTrainOptions, TrainOptions

# Fields of the layout: a run continues with other values, and the log names them.
LAYOUT = {
    "warm_start.max_tokens": "how many demonstrations pass at once",
    "rollout.max_conversations": "how many episodes are held at once",
    "rollout.max_environments": "how many environments are open at once",
    "rollout.prefill_tokens": "how many tokens pass at once",
    "rollout.reuse_cache": "the same log-probs, computed again",
    "rollout.draft_share": "the same tokens, several in a pass",
    "rollout.workers": "in how many processes episodes are rolled out",
    "rollout.worker_timeout": "when one of them is replaced",
    "rollout.worker_restarts": "how often",
    "optimizer.max_tokens": "how many episodes pass at once",
    "optimizer.logit_chunk": "how many positions pass at once",
    "optimizer.vision_patches": "how many patches pass at once",
    "optimizer.gradient_checkpointing": "the same gradients, of layers that run twice",
    "optimizer.offload": "where the same weights lie",
    "optimizer.gradient_sync": "the same gradients, added after each pass",
    "policy.attention": "the same products, by another implementation",
    "policy.device": "where they are computed",
    "threads": "by how many threads",
    "processes": "by how many ranks",
    "sharding": "what each of them holds",
    "replicas": "how many copies they hold together",
    "backend": "by which backend",
    "megatron.tensor_parallel": "how many ranks split a matrix",
    "megatron.sequence_parallel": "which of its ranks holds which tokens",
    "placement": "where the ranks live",
    "rank_timeout": "when they count as lost",
}
# Fields whose other values are free, and why.
FREE = {
    "warm_start.play_every": "validations watch",
    "warm_start.validate_every": "validations watch, unless stop_below ends the stage by them",
    "rollout.max_failed_share": "when a run stops",
    "rollout.env_timeout": "when an environment counts as hung",
    "loop.iterations": "a run can be extended",
    "loop.save_interval": "what is stored",
    "loop.keep_last": "what is stored",
    "loop.keep_best": "what is stored",
    "loop.report_share": "what is shown",
    **{f"loop.retention.{name}": "what is stored" for name in ("episodes", "images", "newest", "tokens")},
    **{f"ray.{name}": "on which nodes the ranks live" for name in ("address", "cpus", "gpus", "resources", "strategy")},
    "ray.patience": "when a run stops",
    "ray.max_restarts": "when a run stops",
    "ray.min_processes": "how many ranks there are",
    "evaluation.prompts": "after training",
    "evaluation.samples": "after training",
    "evaluation.greedy": "after training",
    "evaluation.blank_images": "after training",
    "evaluation.shuffled_images": "after training",
    "evaluation.solver_states": "after training",
    "evaluation.checkpoint": "after training",
    **{
        f"rollout.server.{name}": "where servers are, how many, how they are spoken to"
        for name in (
            "mode",
            "urls",
            "api_key_variable",
            "all_interfaces",
            "count",
            "host",
            "ports",
            "python",
            "log_folder",
            "router",
            "concurrency",
            "device",
            "first_gpu",
            "colocated",
            "memory_fraction",
            "max_total_tokens",
            "cuda_graph_batch_sizes",
            "update",
            "bucket_bytes",
            "update_folder",
            "faults.start_timeout",
            "faults.reply_timeout",
            "faults.control_timeout",
            "faults.health_interval",
            "faults.health_timeout",
            "faults.tries",
            "faults.first_pause",
            "faults.longest_pause",
            "faults.restarts",
            "faults.grace",
        )
    },
}
# What the demonstrations are, and who learns from them.
WARM_START = (
    *("task", "policy.", "env.", "warm_start."),
    *("rollout.max_turns", "rollout.max_response_tokens", "rollout.max_context_tokens", "rollout.preset"),
    "rollout.rules.",
)
# Without a choice: one value is allowed.
FIXED = {"rollout.sampling.greedy"}
TRUNCATED = {"grpo.importance": "truncated", "grpo.old_log_probs": "recompute"}
# What has to be changed with a field, or before it, for its other values to be allowed.
BESIDE: dict[str, dict[str, Any]] = {
    "loop.max_staleness": {"rollout.engine": "sglang", "loop.save_interval": 1},
    "policy.source": {"policy.path": "somewhere"},
    "policy.adapter": {"policy.adapter": {"rank": 3}},
    "rollout.server.mode": {"rollout.server.urls": ["http://a:1"]},
    "rollout.server.urls": {"rollout.server.mode": "attach", "rollout.server.urls": ["http://a:1"]},
    "rollout.server.api_key_variable": {"rollout.server.mode": "attach", "rollout.server.urls": ["http://a:1"]},
    "rollout.server.ports": {"rollout.server.ports": [7]},
    "rollout.workers": {"threads": 1},
    "rollout.partial": {"rollout.max_turns": 1, "rollout.over_sampling": 2.0, "grpo.mixed_versions": "mask"},
    "grpo.advantage": {"grpo.advantage": "grpo"},
    "grpo.advantage_args": {"grpo.advantage": "gigpo", "grpo.advantage_args": {"gamma": 0.5}},
    "grpo.loss": {"grpo.loss": "gspo"},
    "grpo.loss_args": {"grpo.loss_args": {"clip_low": 0.5}},
    "grpo.importance": {"grpo.importance": "masked", "grpo.old_log_probs": "recompute"},
    "grpo.importance_args": {**TRUNCATED, "grpo.importance_args": {"cap": 1.5}},
    "grpo.overlong": {"grpo.overlong": {"length": 9, "buffer": 3}},
    "grpo.max_log_prob_difference": {"grpo.old_log_probs": "recompute"},
    "optimizer.reduce_dtype": {
        "optimizer.gradient_sync": "micro_batch",
        "policy.compute": "bfloat16",
        "processes": 2,
        "sharding": "full",
        "threads": 1,
    },
    "processes": {"threads": 1},
    "sharding": {"threads": 1, "processes": 4},
    "backend": {"threads": 1},
    "megatron.tensor_parallel": {"threads": 1, "processes": 4, "backend": "megatron"},
    "megatron.sequence_parallel": {
        "threads": 1,
        "processes": 4,
        "backend": "megatron",
        "megatron.tensor_parallel": 2,
        "policy.device": "auto",
    },
    "replicas": {"threads": 1, "processes": 4, "sharding": "hybrid"},
}
MODELS = {model.__name__: model for model in (TrainOptions, Geo3kTrainOptions, Geo3kMultiTurnTrainOptions)}
FIELDS = sorted({(name, path) for name, model in MODELS.items() for path in leaves(model)})


def stages(options: TrainOptions, seed: int = 0, data: dict[str, Any] | None = None) -> dict[str, Fingerprint]:
    return {
        "policy": policy_parameters(options.policy, seed),
        "warm start": warm_start_parameters(options, seed, data or {}),
        "loop": loop_parameters(options, seed, data or {}),
    }


def changed_stages(before: dict[str, Fingerprint], after: dict[str, Fingerprint]) -> set[str]:
    return {name for name in before if differences(before[name], after[name])}


def change(model: type[TrainOptions], path: str) -> tuple[TrainOptions, TrainOptions] | None:
    """Options before and after a change of one field; None where it has no other value."""
    before = with_value(model(), {"rollout.engine": "sglang"} if ".server." in path else {})
    beside = {name: value for name, value in BESIDE.get(path, {}).items() if name != path}
    if path == "rollout.max_turns" and "max_turns" in before.env.args:
        beside = {"env.args": {"max_turns": before.rollout.max_turns + 1}}
    elif path == "rollout.partial" and "max_turns" in before.env.args:
        before = with_value(before, beside | {"env.args": {"max_turns": 1}})
    elif beside and not path.startswith(("policy.", "rollout.server.")):
        before = with_value(before, beside)
    if path in FIXED or (path == "task" and model is not TrainOptions):
        return None
    if path in BESIDE.get(path, ()):
        return before, with_value(before, BESIDE[path])
    return before, with_another_value(before, path, beside)


@pytest.mark.parametrize(("model", "path"), FIELDS, ids=lambda value: value)
def test_each_field_is_compared_or_free(model: str, path: str) -> None:
    found = change(MODELS[model], path)
    if found is None:
        return
    before, after = found
    assert value_at(before, path) != value_at(after, path)
    continued = [line.partition(":")[0] for line in layout_differences(layout(before), layout(after))]
    assert continued == sorted(set(LAYOUT) & {path})
    if path in LAYOUT | FREE:
        expected: set[str] = set()
        if path in ("rollout.server.mode", "rollout.server.urls"):
            return  # the engine is asked which model it serves
    elif path.startswith("policy."):
        expected = {"policy", "warm start", "loop"}
    else:
        expected = {"warm start", "loop"} if path.startswith(WARM_START) else {"loop"}
    assert changed_stages(stages(before), stages(after)) == expected, FREE.get(path, "not among those that are free")


def layout(options: TrainOptions) -> Fingerprint:
    return {**layout_of(options, options.threads or 8)["layout"]}


def test_runs_that_are_older_than_an_option_go_on_without_it() -> None:
    later = ("policy.adapter", "rollout.max_environments")
    for options in (TrainOptions(), with_value(TrainOptions(), {"rollout.over_sampling": 2.0})):
        assert not any(name.startswith(later) for stage in stages(options).values() for name in stage)


def test_no_reason_is_left_over() -> None:
    known = {path for _, path in FIELDS}
    assert set(LAYOUT) | set(FREE) | set(BESIDE) | FIXED <= known
    assert set(LAYOUT) == set(layout(TrainOptions())) and not set(LAYOUT) & set(FREE)
    assert all(any(path.startswith(start) for path in known) for start in WARM_START)


def test_values_of_server_variables_are_compared_and_never_stored() -> None:
    def parameters(value: str) -> Fingerprint:
        server = {"environment": {"HF_TOKEN": value}}
        return loop_parameters(TrainOptions.model_validate({"rollout": {"engine": "sglang", "server": server}}), 0, {})

    name, stored = "rollout.server.environment.HF_TOKEN", parameters("swordfish")
    assert "swordfish" not in str(stored) and stored[name].startswith("hash:")
    assert differences(stored, parameters("swordfish")) == []  # so a run continues
    (line,) = differences(stored, parameters("marlin"))
    assert line.startswith(f"{name}: stored hash:") and "marlin" not in line


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, known in ESTIMATORS.items() for name in known])
def test_each_option_of_an_estimator_is_compared(kind: Kind, name: str) -> None:
    model = ESTIMATORS[kind][name].arguments
    arguments = model.model_validate({"teacher": "me/teacher"} if name == "distillation" else {})
    chosen = {"grpo.old_log_probs": "recompute", f"grpo.{kind}": name, f"grpo.{kind}_args": arguments.model_dump()}
    before = with_value(TrainOptions(), chosen)
    for option in model.model_fields:
        changed = with_another_value(arguments, option).model_dump()
        after = with_value(before, {f"grpo.{kind}_args": changed})
        assert changed_stages(stages(before), stages(after)) == {"loop"}, option


# Options of GRPO before its estimators had names, as a run has stored them.
BEFORE_ESTIMATORS = {
    "groups": 32,
    "group_size": 8,
    "credit": "turn",
    "gamma": 0.95,
    "normalize": "rms",
    "advantage_clip": 4.0,
    "baseline": "turn",
    "filter": "mixed_success",
    "min_groups": 4,
    "max_refill": 1.0,
    "groups_per_step": 5,
    "passes": 1,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "kl_kind": "low_var_kl",
    "kl_coefficient": 0.0,
    "entropy_coefficient": 0.005,
    "reduction": "token_mean",
    "constant_denominator": None,
    "old_log_probs": "rollout",
    "importance_cap": None,
    "mixed_versions": "drop",
    "max_log_prob_difference": None,
}
Changes = dict[str, Any]


@pytest.mark.parametrize(
    ("importance", "named_importance"),
    [
        ({}, {}),
        (
            {"importance_cap": 1.5, "old_log_probs": "recompute"},
            {"old_log_probs": "recompute", "importance": "truncated", "importance_args.cap": 1.5},
        ),
    ],
)
@pytest.mark.parametrize(
    ("bounds", "named_bounds"),
    [
        ({}, {}),
        (
            {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0},
            {"loss_args": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0}},
        ),
    ],
)
@pytest.mark.parametrize(
    ("credit", "named_credit"),
    [
        ({}, {}),
        ({"normalize": "none", "gamma": 0.5}, {"normalize": "none", "advantage_args.gamma": 0.5}),
        ({"normalize": "std"}, {"normalize": "none", "advantage_args.scale": "std"}),
        ({"baseline": "board"}, {"advantage_args.baseline": "state"}),
        (
            {"baseline": "board", "normalize": "std"},
            {"normalize": "none", "advantage_args.scale": "std", "advantage_args.baseline": "state"},
        ),
        ({"credit": "episode"}, {"advantage": "dr_grpo"}),
        ({"credit": "episode", "normalize": "none"}, {"advantage": "dr_grpo", "normalize": "none"}),
        ({"credit": "episode", "normalize": "std"}, {"advantage": "grpo", "normalize": "none"}),
    ],
)
def test_a_run_from_before_estimators_had_names_goes_on_with_the_same_computation(
    credit: Changes, named_credit: Changes, bounds: Changes, named_bounds: Changes,
    importance: Changes, named_importance: Changes,
) -> None:  # fmt: skip
    named = {f"grpo.{name}": value for name, value in (named_credit | named_bounds | named_importance).items()}
    options = with_value(TrainOptions(), named)
    current = loop_parameters(options, 0, {})
    old = {f"grpo.{name}": value for name, value in (BEFORE_ESTIMATORS | credit | bounds | importance).items()}
    stored = {name: value for name, value in current.items() if not name.startswith("grpo.")} | old
    assert differences(stored, current) == []
    assert GrpoOptions.model_validate(unflatten(stored)["grpo"]) == options.grpo  # as an audit reads them
    assert as_current({f"run.{name}": value for name, value in stored.items()}, "run.") == {
        f"run.{name}": value for name, value in current.items()
    }
    # With another value it is another run.
    other = loop_parameters(with_value(options, {"grpo.loss_args.clip_low": 0.7}), 0, {})
    (line,) = differences(stored, other)
    assert line == f"grpo.loss_args.clip_low: stored {old['grpo.clip_low']}, now 0.7"


OVER = {"rollout.over_sampling": 2.0, "processes": 1, "threads": 1}


@pytest.mark.parametrize(
    ("given", "path", "changed"),
    [
        # Validations that end the warm start.
        ({"warm_start.stop_below": 0.5}, "warm_start.validate_every", {"warm start", "loop"}),
        # Sizes, where they decide what is aborted.
        (OVER, "rollout.max_conversations", {"loop"}),
        (OVER, "rollout.max_environments", {"loop"}),
        (OVER, "rollout.prefill_tokens", {"loop"}),
        (OVER, "rollout.draft_share", {"loop"}),
        (OVER, "rollout.workers", {"loop"}),
    ],
)
def test_what_is_free_counts_where_results_depend_on_it(given: dict[str, Any], path: str, changed: set[str]) -> None:
    before = with_value(TrainOptions(), given)
    after = with_another_value(before, path)
    assert changed_stages(stages(before), stages(after)) == changed
    assert layout(before) == layout(after) and path not in layout(before)


def test_a_change_of_the_layout_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = layout_of(TrainOptions(), threads=1)
    compare_layout({}, before)  # a new run
    compare_layout(before, before)
    assert not caplog.records
    changed = with_value(TrainOptions(), {"optimizer.max_tokens": 256, "policy.attention": "eager"})
    compare_layout(before, layout_of(changed, threads=2))
    (record,) = caplog.records
    found = ["optimizer.max_tokens: stored 8192, now 256", "policy.attention: stored sdpa, now eager"]
    assert f"({'; '.join([*found, 'threads: stored 1, now 2'])})" in record.getMessage()


def test_seed_and_data_count() -> None:
    options = TrainOptions()
    assert changed_stages(stages(options), stages(options, seed=1)) == {"policy", "warm start", "loop"}
    assert changed_stages(stages(options), stages(options, data={"boxes": 2})) == {"warm start", "loop"}
    # Weights that are given do not depend on the seed.
    given = with_value(options, {"policy.source": "folder", "policy.path": "somewhere"})
    assert changed_stages(stages(given), stages(given, seed=1)) == {"warm start", "loop"}


ROWS = [
    {"id": "a", "prompt": "Which way?", "images": ["data:1", "data:2"], "answer": "3"},
    {"id": "b", "prompt": "And here?", "images": None, "answer": None},
]


def edit(number: int, **values: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: [{**row, **values} if n == number else row for n, row in enumerate(rows)]


PROMPTS: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "the text": edit(0, prompt="Which way!"),
    "an image": edit(0, images=["data:1", "data:3"]),
    "an image less": edit(0, images=["data:1"]),
    "no images": edit(0, images=None),
    "the order of images": edit(0, images=["data:2", "data:1"]),
    "the label": edit(0, answer="4"),
    "a label less": edit(0, answer=None),
    "a label more": edit(1, answer="0"),
    "an id": edit(1, id="c"),
    "the move limit of a level": edit(0, extra_info={"env_config": {"max_steps": 7}}),
    "an answer that demonstrations may give": edit(0, candidates=[{"rule": "sum", "label": "4"}]),
    "a column of the user's own": edit(0, difficulty=np.int32(3)),
    "the order": lambda rows: rows[::-1],
    "a row less": lambda rows: rows[:1],
    "a row twice": lambda rows: [*rows, rows[1]],
    "a text that moves to the next row": lambda rows: [{**rows[0], "prompt": ""}, {**rows[1], "prompt": "Which way?"}],
}


def inputs(rows: list[dict[str, Any]], digest: str = "abc", seed: int = 0, **options: Any) -> RunInputs:
    files = {"model.safetensors": {"bytes": 1, "blake2b": digest}, "config.json": {"bytes": 2, "blake2b": "def"}}
    policy = PolicyFolder(Path("nowhere"), {"files": files})
    given = with_value(TrainOptions(), options)
    return RunInputs("train_sokoban", seed, given, {"boxes": 1}, policy, rows, [])


def differing(first: RunInputs, second: RunInputs) -> list[str]:
    """What differs between the fingerprints of two loops."""
    lines = differences(loop_fingerprint(first), loop_fingerprint(second))
    return [line.partition(":")[0] for line in lines]


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_count(name: str) -> None:
    rows = PROMPTS[name](copy.deepcopy(ROWS))
    assert hash_rows(rows) != hash_rows(ROWS)
    assert differing(inputs(ROWS), inputs(rows)) == ["input.prompts"]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Everything that a row holds: its columns, and what lies inside them."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        yield (*at, name)
        yield from places(part, (*at, name))


def another(value: Any) -> Any:
    """A value of the same kind, or one where there was none."""
    if isinstance(value, dict):
        return value | {"further": 1}
    if isinstance(value, bool):
        return not value
    return [*value, None] if isinstance(value, list) else "x" if value is None else value + type(value)(1)


def changed_at(row: dict[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(row)
    *way, last = place
    holder: Any = changed
    for name in way:
        holder = holder[name]
    holder[last] = another(holder[last])
    return changed


@pytest.mark.parametrize(
    ("task", "columns"),
    [("sokoban", sokoban.PROMPTS), ("geo3k", geometry.PROMPTS), ("geo3k_multi_turn", geometry.PROMPTS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_value_of_a_prompts_table_counts(task: str, columns: Any, sokoban_rows: Any, geometry_rows: Any) -> None:
    """The level itself in `extra_info`, difficulties, candidates, hashes: no column is left out, nor a part of one."""
    rows = sokoban_rows(2) if task == "sokoban" else geometry_rows(2, task)
    assert set(columns.names) <= set(rows[1])
    found = list(places(rows[1]))
    assert {place[0] for place in found} == set(rows[1]) and len(found) > len(rows[1])
    for place in found:
        assert differing(inputs(rows), inputs([rows[0], changed_at(rows[1], place)])) == ["input.prompts"], place
    for name in columns.names:
        without = [rows[0], {column: value for column, value in rows[1].items() if column != name}]
        assert hash_rows(without) != hash_rows(rows), name


def test_equal_rows_have_one_hash_whatever_holds_them() -> None:
    rows = [{**row, "length": 3} for row in ROWS]
    assert hash_rows([dict(reversed(row.items())) for row in rows]) == hash_rows(rows)
    assert hash_rows([{**row, "length": np.int32(3)} for row in rows]) == hash_rows(rows)


def test_the_policy_and_the_validation_prompts_count() -> None:
    """The best checkpoint is chosen by the latter."""
    other = dataclasses.replace(inputs(ROWS), validation_prompts=ROWS[:1])
    assert differing(inputs(ROWS), other) == ["input.validation_prompts"]
    assert differing(inputs(ROWS), inputs(ROWS, digest="abd")) == ["input.policy"]
    files = {name: {"blake2b": name} for name in "ab"}
    assert hash_files(files) == hash_files(dict(reversed(files.items())))
    assert hash_files({"b": files["a"], "a": files["b"]}) != hash_files(files)


@pytest.mark.parametrize(
    "other",
    [
        inputs(ROWS[::-1]),
        inputs(ROWS, digest="other"),
        inputs(ROWS, seed=1),
        inputs(ROWS, **{"grpo.advantage_args.gamma": 0.5}),
        RunInputs("train_sokoban", 0, TrainOptions(), {"boxes": 2}, inputs(ROWS).policy, ROWS, []),
    ],
    ids=["prompts", "policy", "seed", "options", "data"],
)
def test_a_loop_goes_on_only_with_what_it_began_with(other: RunInputs) -> None:
    """Before anything is loaded, which would fail here: there is no policy."""
    stored = loop_fingerprint(inputs(ROWS))
    check_fingerprint("the training", stored, loop_fingerprint(inputs(copy.deepcopy(ROWS))))
    resume = {"iteration": 3, "dir": Path("x"), "manifest": {"fingerprint": stored}, "complete": None, "stored": [3]}
    with pytest.raises(FingerprintError):
        next(run_grpo(other, resume, 0))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_layout_is_in_no_fingerprint(model: type[TrainOptions]) -> None:
    for name, fingerprint in stages(model()).items():
        assert not set(LAYOUT) & set(fingerprint), name
    assert {path for path in loop_parameters(model(), 0, {}) if path.startswith("loop.")} == {
        "loop.eval_interval",
        "loop.eval_prompts",
    }
