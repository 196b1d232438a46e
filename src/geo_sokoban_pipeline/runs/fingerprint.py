"""Fingerprints: what a stored result depends on, as a flat table that can be hashed, compared and shown.

A stored result is continued or reused only if its fingerprint equals the current one; else the command stops before any
work, with the names that differ. Settings that change no result are not in it: lengths, intervals, paths,
logging. The layout of the work, which changes the order of sums alone, is not in it either; manifests hold it beside
the fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from geo_sokoban_pipeline.config.estimators import ESTIMATORS, Kind
from geo_sokoban_pipeline.config.grpo import GrpoOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.formats import leaves
from geo_sokoban_pipeline.runs.own_code import hash_own_code
from geo_sokoban_pipeline.seeding import content_hash

Fingerprint = dict[str, Any]
_SHOWN = 12
_ABSENT = "(absent)"
# Options of the rollout that shape a demonstration.
_DEMONSTRATED = {"max_turns", "preset", "rules", "max_context_tokens", "max_response_tokens"}

# The layout: where and in which parts the work is done. No result depends on it beyond the order of sums, so a run that
# was out of memory continues with smaller parts, or on other ranks. A name stands for its section too.
_LAYOUT = frozenset(
    {
        "backend",
        "megatron",
        "optimizer.gradient_checkpointing",
        "optimizer.gradient_sync",
        "optimizer.logit_chunk",
        "optimizer.max_tokens",
        "optimizer.offload",
        "optimizer.vision_patches",
        "placement",
        "policy.attention",
        "policy.device",
        "processes",
        "rank_timeout",
        "replicas",
        "rollout.worker_restarts",
        "rollout.worker_timeout",
        "sharding",
        "threads",
        "warm_start.max_tokens",
    }
)
# These also decide when a response is there, and with over-sampling that decides which groups are aborted.
_ROLLOUT_LAYOUT = frozenset(
    {
        "rollout.draft_share",
        "rollout.max_conversations",
        "rollout.max_environments",
        "rollout.prefill_tokens",
        "rollout.reuse_cache",
        "rollout.workers",
    }
)
# Limits at which a run, or an episode, ends.
_LIMITS = frozenset({"optimizer.max_skipped", "rollout.env_timeout", "rollout.max_failed_share"})
# Options that are constants now, with their values: a run that was stored with these goes on.
_FORMER: Fingerprint = {
    "optimizer.decay_to": 0.1,
    "optimizer.matrix_rate": 2.0,
    "optimizer.max_skipped": 3,
    "optimizer.momentum": 0.95,
    "prompts.smoothing": 0.1,
    "warm_start.decay_to": 0.05,
    "warm_start.matrix_rate": 2.0,
    "warm_start.momentum": 0.95,
    "warm_start.teacher.solved_only": False,
}
# Options of GRPO that are options of an estimator now.
_BEFORE_ESTIMATORS = (
    "credit",
    "gamma",
    "normalize",
    "baseline",
    "clip_low",
    "clip_high",
    "dual_clip",
    "importance_cap",
)
_CODE = ":"  # between the option that names own code and a file of it, which no name of an option holds


class FingerprintError(RuntimeError):
    """Stored results were made with other parameters or inputs."""


def flatten(values: Mapping[str, Any]) -> Fingerprint:
    """Nested mappings as one flat one with dotted names; lists and scalars are leaves, as JSON values.

    An empty mapping leaves nothing, so that a difference is always in the names that one side has.
    """
    return {path: json.loads(json.dumps(value)) for path, value in leaves(values) if not isinstance(value, Mapping)}


def unflatten(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Nested options of a fingerprint under their current names, without hashes of own code and empty mappings."""
    nested: dict[str, Any] = {}
    for name, value in as_current(fingerprint).items():
        if _CODE not in name and name not in _FORMER:
            *path, last = name.split(".")
            place = nested
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
    return nested


def changed_code(fingerprint: Mapping[str, Any], options: Sequence[str]) -> str | None:
    """Which own code of a stored run is another one by now, or gone; None: all of it is as it was.

    Args:
        options: that name the code, such as `reward.function`.
    """
    current = _own_code({option: str(fingerprint[option]) for option in options})
    stored = {name: value for name, value in fingerprint.items() if name.partition(_CODE)[0] in options}
    changed = [name for name, digest in stored.items() if _CODE in name and current.get(name) != digest]
    return f"{_described(changed[0])} has changed since" if changed else None


def differences(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """One line per name that differs, sorted; empty where both are equal but for limits that change no result."""
    return [f"{_described(name)}: stored {_short(before)}, now {_short(now)}"
            for name, before, now in _unequal(as_current(stored), current) if name not in _LIMITS]  # fmt: skip


def layout_differences(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """One line per part of the layout that differs, sorted; none for parts that only one side knows."""
    both = stored.keys() & current.keys()
    return [f"{name}: stored {before}, now {now}" for name, before, now in _unequal(stored, current) if name in both]


def as_current(stored: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    """Stored options under their current names, without those that are constants now, where they had the same values.

    Args:
        prefix: of the options' names.
    """
    former = {f"{prefix}{name}": value for name, value in _FORMER.items()}
    kept = {name: value for name, value in stored.items() if name not in former or value != former[name]}
    return _name_estimators(kept, f"{prefix}grpo.")


def _name_estimators(stored: Fingerprint, prefix: str) -> Fingerprint:
    """Options of GRPO as they were before its estimators had names, under the names that compute the same."""
    if any(f"{prefix}{name}" not in stored for name in _BEFORE_ESTIMATORS):
        return stored
    old = {name: stored[f"{prefix}{name}"] for name in _BEFORE_ESTIMATORS}
    named: Fingerprint = {
        "advantage": "grpo" if old["normalize"] == "std" else "dr_grpo",
        "normalize": "rms" if old["normalize"] == "rms" else "none",
        "overlong": None,
        "loss": "ppo",
        **{f"loss_args.{name}": old[name] for name in ("clip_low", "clip_high", "dual_clip")},
        "importance": "none" if old["importance_cap"] is None else "truncated",
    }
    if old["credit"] == "turn":
        named |= {
            "advantage": "turn_return",
            "advantage_args.gamma": old["gamma"],
            "advantage_args.baseline": "state" if old["baseline"] == "board" else "turn",
            "advantage_args.leave_one_out": False,
            "advantage_args.scale": "std" if old["normalize"] == "std" else "none",
        }
    if old["importance_cap"] is not None:
        named |= {
            "importance_args.level": "token",
            "importance_args.per": "episode",
            "importance_args.cap": old["importance_cap"],
        }
    gone = {f"{prefix}{name}" for name in _BEFORE_ESTIMATORS}
    kept = {name: value for name, value in stored.items() if name not in gone}
    return kept | {f"{prefix}{name}": value for name, value in named.items()}


def _unequal(stored: Fingerprint, current: Fingerprint) -> list[tuple[str, Any, Any]]:
    """(name, stored value, current value) where they differ, sorted by name."""
    pairs = ((name, stored.get(name, _ABSENT), current.get(name, _ABSENT)) for name in sorted({*stored, *current}))
    return [(name, before, now) for name, before, now in pairs if before != now]


def check_fingerprint(what: str, stored: Fingerprint, current: Fingerprint) -> None:
    """Stop unless stored results were made with the current parameters and inputs.

    Raises:
        FingerprintError: with the differences and the two ways out.
    """
    if lines := differences(stored, current):
        raise FingerprintError(describe_differences(what, lines))


def describe_differences(what: str, lines: Sequence[str]) -> str:
    """Message of a `FingerprintError`: whose settings differ, in which lines, and the two ways out."""
    shown = "\n  ".join([*lines[:_SHOWN], *([f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])])
    return (
        f"{what} of this run id already exists with different settings:\n  {shown}\n"
        "Give the new settings a run of their own with --params run_id=<new>, or start over with --params fresh=true."
    )


def policy_parameters(options: PolicyOptions, seed: int) -> Fingerprint:
    """Parameters that the starting weights depend on; the seed only where the project makes them."""
    chosen = options.model_dump(mode="json", exclude=set() if options.source == "tiny" else {"tiny"})
    return _identity({"policy": chosen, **({"seed": seed} if options.source == "tiny" else {})})


def warm_start_parameters(options: TrainOptions, seed: int, data: Mapping[str, Any]) -> Fingerprint:
    """Parameters that the warm-start policy depends on."""
    rollout = options.rollout.model_dump(mode="json", include=_DEMONSTRATED)
    values = options.model_dump(mode="json", include={"task", "policy", "env"}) | {"warm_start": _sft(options)}
    named = options.env.named_code
    if options.warm_start.steps:  # without steps, no expert is asked
        named["warm_start.teacher.factory"] = options.warm_start.teacher.factory
    return {**_identity({**values, "rollout": rollout, "seed": seed, "data": dict(data)}), **_own_code(named)}


def loop_parameters(options: TrainOptions, seed: int, data: Mapping[str, Any]) -> Fingerprint:
    """Parameters that the loop and its validations depend on; its length, saving and layout are not."""
    included = {"eval_interval", "eval_prompts"} | ({"max_staleness"} if options.loop.max_staleness else set())
    values = {
        **options.model_dump(mode="json", exclude={"loop", "evaluation", "warm_start", "ray"}),
        "rollout": _playing(options),
        "warm_start": _sft(options),
        "loop": options.loop.model_dump(mode="json", include=included),
        "evaluation": {"sampling": options.evaluation_sampling.model_dump(mode="json")},
        "seed": seed,
        "data": dict(data),
    }
    named = named_code(options)
    del named["warm_start.teacher.factory"]
    return _identity(values) | _own_code(named)


def hash_code(options: TrainOptions) -> Fingerprint:
    """Hash of each file of own code that a training run and its warm start depend on; empty: there is none."""
    return _own_code(named_code(options))


def named_code(options: TrainOptions) -> dict[str, str]:
    """Code that a training run names, by option: this project's or the user's, of estimators the user's alone."""
    return {
        **options.env.named_code,
        "reward.function": options.reward.function,
        "rollout.function": options.rollout.function,
        "warm_start.teacher.factory": options.warm_start.teacher.factory,
        **own_estimators(options.grpo),
    }


def own_estimators(grpo: GrpoOptions) -> dict[str, str]:
    """Estimators that are none of this project's, by the option that names them."""
    named: dict[Kind, str] = {kind: getattr(grpo, kind) for kind in ESTIMATORS}
    return {f"grpo.{kind}": spec for kind, spec in named.items() if spec not in ESTIMATORS[kind]}


def layout_parameters(options: TrainOptions) -> Fingerprint:
    """Options of a run's layout, for its manifests: none of them is in a fingerprint."""
    values = flatten(options.model_dump(mode="json"))
    return {name: value for name, value in values.items() if _is_layout(name, options.rollout.over_sampling)}


def _identity(values: Mapping[str, Any]) -> Fingerprint:
    """Options, flat, without those of the layout."""
    flat = flatten(values)
    over_sampling = flat.get("rollout.over_sampling", 1.0)
    # Runs that are older than these options have no name for their absence.
    absent = {name for name in ("policy.adapter", "rollout.max_environments") if flat.get(name, ...) is None}
    return {name: value for name, value in flat.items() if name not in absent and not _is_layout(name, over_sampling)}


def _is_layout(name: str, over_sampling: float) -> bool:
    parts = name.split(".")
    begins = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return not begins.isdisjoint(_LAYOUT if over_sampling > 1 else _LAYOUT | _ROLLOUT_LAYOUT)


def _own_code(named: Mapping[str, str]) -> Fingerprint:
    """Hash of each file of own code, by the option that names it and the file; nothing of this project's own code."""
    hashes = ((option, hash_own_code(spec)) for option, spec in named.items())
    return {f"{option}{_CODE}{file}": digest for option, files in hashes for file, digest in files.items()}


def _described(name: str) -> str:
    option, mark, file = name.partition(_CODE)
    return f"{option}, code in {file}" if mark else name


def _playing(options: TrainOptions) -> dict[str, Any]:
    """Options of the rollout; of servers only what responses depend on, and nothing where there are none."""
    values = options.rollout.model_dump(mode="json", exclude={"server"})
    if options.rollout.engine == "sglang":
        values["server"] = options.rollout.server.shaping
    return values


def _sft(options: TrainOptions) -> dict[str, Any]:
    """Options of the warm start without how often it is looked at, unless that decides when it stops."""
    looks = {"play_every"} | ({"validate_every"} if options.warm_start.stop_below is None else set())
    return options.warm_start.model_dump(mode="json", exclude=looks)


def hash_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Content hash of prompts, in their order: every column, because an environment is built from the whole row."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY
    return content_hash(*(orjson.dumps(dict(row), default=str, option=options).decode() for row in rows))


def hash_files(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Hash of a manifest's files."""
    return content_hash(*(f"{name}:{files[name]['blake2b']}" for name in sorted(files)))


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "…"
