"""The tables of `docs/scaling.md` and of the presets in `docs/full_size.md`, by the plan of the pre-flight.

Every figure of `docs/scaling.md` is a count of `preflight/memory.py` with the launch values of `train_geo3k` in
`conf/qwen3vl`, or, for Megatron-Core's ranks, in `conf/megatron`. The presets are commands as they are typed, with what
`estimate_<task>` gives for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from geo_sokoban_pipeline.config.grpo import MegatronOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.estimate import describe_run
from geo_sokoban_pipeline.preflight.memory import (
    MEMORY_SHARE,
    Gpu,
    RankPlan,
    StepLoad,
    least_server_bytes,
    place_on_gpus,
    plan_rank,
)
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape
from geo_sokoban_pipeline.preflight.published_sizes import PUBLISHED, published_config
from geo_sokoban_pipeline.reporting.study_docs import replace_section
from geo_sokoban_pipeline.runs.fingerprint import unflatten
from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS
from geo_sokoban_pipeline.studies.plan import merge

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scaling.md"
PRESETS_PAGE = ROOT / "docs" / "full_size.md"
MACHINES = {"1 × 80 GB": (1, 80), "8 × 80 GB": (8, 80), "1 × 141 GB": (1, 141)}
ADAPTED = {"1 × 24 GB": 24, "1 × 80 GB": 80}  # GB of the GPU that an adapter is trained on
ADAPTER = {"policy": {"adapter": {"rank": 16}}}
_SMALL = 40  # GB
# A problem of Geometry3K with its largest diagram: 1,248 patches.
EPISODE = EpisodeShape(prompt=600, observation=0, response=4096, patches=1248, image_tokens=312, image_bytes=100_000)
_RUN = "train_geo3k"
_GB = 1e9
_LEAST_CACHE = 4  # GB of keys and values for a server
_FRACTION = 0.82  # of a GPU for a server, as in conf/qwen3vl
_SMALL_FRACTION = 0.7  # of a GPU of 24 GB that a server shares, so that contexts have room
_BASE = {"offload": False, "gradient_sync": "step"}
DENSE = ("2B", "4B", "8B")
# Megatron-Core's ranks: those that split matrices, and groups of them.
TENSOR_AND_DATA = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))


@dataclass(frozen=True)
class Layout:
    """Parameters of `train_geo3k` that spread a run over GPUs.

    Attributes:
        training: of the trainer.
        servers: of `rollout.server`.
    """

    training: dict[str, Any]
    servers: dict[str, Any]

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return int(self.training.get("processes", 1))

    def options(self, base: TrainOptions) -> TrainOptions:
        """The options of a run with this layout."""
        server = base.rollout.server.model_copy(update=self.servers)
        changes = {
            **self.training,
            "rollout": base.rollout.model_copy(update={"server": server}),
            "optimizer": base.optimizer.model_copy(update={**_BASE, **self.training.get("optimizer", {})}),
            "policy": _policy(self.training.get("policy", {})),
        }
        return base.model_copy(update=changes)


@lru_cache
def launch_options(env: str = "qwen3vl") -> TrainOptions:
    """Options of `train_geo3k` in an environment of the configuration, without the variables of a launcher."""
    found: TrainOptions = getattr(parameters_of(env), _RUN)
    return found


def parameters_of(env: str, changes: str = "") -> ProjectParameters:
    """All parameters of an environment, with words of `--params`."""
    words = [word.partition("=") for word in changes.split(",") if word]
    given = unflatten({name: yaml.safe_load(value) for name, _, value in words})
    loader = ProjectConfigLoader(conf_source=str(ROOT / "conf"), env=env, runtime_params=given, **CONFIG_LOADER_ARGS)
    return ProjectParameters.model_validate(loader["parameters"])


def layouts(model: ModelShape, gpus: int, gigabytes: int) -> Iterator[Layout]:
    """Layouts to be tried, the simplest first."""
    weights = 2 * model.parameters / _GB
    offload = {"optimizer": {"offload": True}}
    least = {"optimizer": {"offload": True, "gradient_sync": "micro_batch"}}
    if gpus == 1:
        for training in ({}, offload, least):
            yield Layout(training, {"memory_fraction": _SMALL_FRACTION} if gigabytes < _SMALL else {})
        return
    # GPUs of a server: a power of two that holds the weights.
    each = 1 << max(math.ceil(math.log2((weights + _LEAST_CACHE) / (_FRACTION * gigabytes))), 0)
    for ranks in (1, 2, 4, 6):
        servers: dict[str, Any] = {"colocated": False, "first_gpu": ranks, "count": (gpus - ranks) // each}
        servers["tensor_parallel"] = each
        spread = {} if ranks == 1 else {"processes": ranks, "threads": 4, "sharding": "full"}
        yield Layout(spread, servers)
        if ranks == 6:
            yield Layout({**spread, "optimizer": {"gradient_sync": "micro_batch"}}, servers)
            yield Layout({**spread, **offload}, servers)
            yield Layout({**spread, **least}, servers)


def plan(name: str, layout: Layout) -> tuple[RankPlan, TrainOptions]:
    """Plan of a rank with a published model."""
    options = layout.options(launch_options())
    return _plan(name, options), options


def plan_megatron(name: str, tensor: int, data: int) -> RankPlan:
    """Plan of a rank of Megatron-Core with a published model."""
    layout = MegatronOptions(tensor_parallel=tensor, sequence_parallel=True)
    return _plan(name, launch_options("megatron").model_copy(update={"processes": tensor * data, "megatron": layout}))


def _plan(name: str, options: TrainOptions) -> RankPlan:
    longest = EPISODE.prompt + EPISODE.response
    model = shape_of(name, adapted=options.policy.adapter is not None)
    return plan_rank(options, model, StepLoad.of(options, EPISODE, longest), on_gpu=True)


@lru_cache
def shape_of(name: str, *, adapted: bool = False) -> ModelShape:
    """A published model without weights."""
    return ModelShape.of(_policy(ADAPTER["policy"] if adapted else {}), published_config(name))


def _policy(changes: dict[str, Any]) -> PolicyOptions:
    policy = launch_options().policy
    return type(policy).model_validate({**policy.model_dump(), **changes})


def fits(name: str, layout: Layout, gpus: int, gigabytes: int) -> bool:
    """Whether every GPU has room for what lies on it; of one with a server alone, for what the server is given."""
    rank, options = plan(name, layout)
    size = int(gigabytes * _GB)
    longest = EPISODE.prompt + EPISODE.response
    least = least_server_bytes(options, shape_of(name), longest)
    places = place_on_gpus(options, rank, [Gpu(size, size)] * gpus, least=least)
    return options.rollout.server.count > 0 and all(place.total <= MEMORY_SHARE * size for place in places)


def write_presets(page: str) -> str:
    """The page of full size with its table as it is now."""
    return replace_section(page, "presets", preset_table(), PRESETS_PAGE)


def write_page(page: str) -> str:
    """The page with its tables as they are now, between their marks."""
    tables = {"layouts": layout_table, "adapters": adapter_table, "megatron": megatron_table, "parts": part_table}
    for name, table in tables.items():
        page = replace_section(page, name, table(), PAGE)
    return page


@dataclass(frozen=True)
class Preset:
    """A command of full size.

    Attributes:
        task: that is trained.
        env: environment of the configuration.
        gpu: kind of its GPUs.
        words: of `--params`.
    """

    task: str
    env: str = "qwen3vl"
    gpu: str = "H100"
    words: str = ""

    def describe(self) -> dict[str, Any]:
        """What `estimate_<task>` gives, without the variables of a launcher."""
        found = parameters_of(self.env, self.words)
        settings = getattr(found, f"estimate_{self.task}").model_copy(update={"gpu": self.gpu})
        return describe_run(f"train_{self.task}", getattr(found, f"train_{self.task}"), settings)


_ADAPTED = "train_{0}.policy.adapter.rank=16,train_{0}.optimizer.learning_rate=1e-5,train_{0}."
_LARGER = "train_geo3k.policy.path=Qwen/Qwen3-VL-{0}-Instruct"
_LEAST = ",train_geo3k.optimizer.gradient_sync=micro_batch"
PRESETS = (
    *(Preset(task, env) for env in ("qwen3vl", "cluster") for task in ("sokoban", "geo3k_multi_turn", "geo3k")),
    Preset(
        "sokoban",
        gpu="RTX 4090",
        words=f"{_ADAPTED.format('sokoban')}rollout.server.memory_fraction={_SMALL_FRACTION}",
    ),
    Preset("geo3k", words=f"{_ADAPTED.format('geo3k')}optimizer.offload=false"),
    *(
        Preset("geo3k", env, words=_LARGER.format(name) + further)
        for name in ("30B-A3B", "235B-A22B")
        for env, further in (("qwen3vl", _LEAST), ("cluster", ""))
    ),
)


def preset_table() -> str:
    """The commands of full size with what each takes."""
    sizes = "peak of a rank | a GPU, its server counted | memory of the CPU, a rank"
    head = f"| model | GPUs | `kedro run --pipelines=train_` | {sizes} | an iteration, predicted | fits |"
    rows = [head, _rule(8)]
    for preset in PRESETS:
        found = preset.describe()
        rank, largest = found["rank"], max(place["total"] for place in found["memory"].values())
        counts = (rank["peak"], largest, sum(rank["host"].values()))
        cells = [
            found["model"],
            f"{found['gpus']} × {preset.gpu}",
            f"`{preset.task} --env={preset.env}{f' --params {preset.words}' if preset.words else ''}`",
            *(f"{count / _GB:,.0f} GB" for count in counts),
            f"{found['iteration']:,.0f} s",
            "yes" if found["fits"] else f"no, by {found['lacking'] / _GB:,.0f} GB",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def layout_table() -> str:
    """Which layout fits, by model and machine."""
    rows = ["| model | GPUs | training | servers | peak of a rank | parameters of `train_geo3k` |", _rule(6)]
    for name in PUBLISHED:
        for machine, (gpus, gigabytes) in MACHINES.items():
            tried = list(layouts(shape_of(name), gpus, gigabytes))
            found = next((layout for layout in tried if fits(name, layout, gpus, gigabytes)), None)
            rows.append(f"| {name} | {machine} | {_cells(name, found, tried[-1])} |")
    return "\n".join(rows)


def adapter_layout(name: str, gigabytes: int) -> Layout:
    """An adapter on one GPU, with a server beside it."""
    return Layout(ADAPTER, next(layouts(shape_of(name), 1, gigabytes)).servers)


def adapter_table() -> str:
    """Which models fit one GPU with an adapter, by model and GPU."""
    rows = ["| model | GPU | training | servers | peak of a rank | parameters of `train_geo3k` |", _rule(6)]
    for name in DENSE:
        for machine, gigabytes in ADAPTED.items():
            layout = adapter_layout(name, gigabytes)
            found = layout if fits(name, layout, 1, gigabytes) else None
            rows.append(f"| {name}, adapter | {machine} | {_cells(name, found, layout)} |")
    return "\n".join(rows)


def _cells(name: str, found: Layout | None, last: Layout) -> str:
    rank, _ = plan(name, found or last)
    peak = f"{rank.total / _GB:.0f} GB"
    if found is None:
        return f"no layout tried fits | – | {peak} in the phase `{rank.phase}` | with `{_parameters(last.training)}`"
    training = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks, `full`"
    if found.training.get("optimizer", {}).get("offload"):
        training += f", {sum(rank.host.values()) / _GB:.0f} GB a rank in the memory of the CPU"
    server = found.servers
    where = f"{server['count']} on GPUs of their own" if "count" in server else "in turns on the same GPU"
    parameters = _parameters(merge(found.training, {"rollout": {"server": server}} if server else {}))
    return f"{training} | {where} | {peak} | {f'`{parameters}`' if parameters else '–'}"


def _parameters(changes: dict[str, Any], prefix: str = "") -> str:
    words = []
    for name, value in changes.items():
        if isinstance(value, dict):
            words.append(_parameters(value, f"{prefix}{name}."))
        else:
            words.append(f"{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(words)


def megatron_table() -> str:
    """Parts of a rank of Megatron-Core, by model and layout."""
    columns = {
        "weights, gradients, moments": ("weights", "gradients", "optimizer moments"),
        "activations of a micro-batch": ("activations of a micro-batch",),
        "logits": ("logits of a micro-batch",),
        "vision activations": ("vision activations",),
        "gathered weights": ("gathered weights",),
        "gradients of whole weights": ("gradients of whole weights",),
    }
    head = " | ".join(columns)
    rows = [f"| GB | tensor × data | {head} | **peak** | fits a GPU of 80 GB |", _rule(4 + len(columns))]
    for name in DENSE:
        for tensor, data in TENSOR_AND_DATA:
            rank = plan_megatron(name, tensor, data)
            sizes = (sum(rank.parts.get(part, 0) for part in parts) / _GB for parts in columns.values())
            cells = " | ".join(f"{size:.1f}" for size in sizes)
            fit = "yes" if rank.total <= MEMORY_SHARE * 80 * _GB else "no"
            rows.append(f"| {name} | {tensor} × {data} | {cells} | **{rank.total / _GB:.1f}** | {fit} |")
    return "\n".join(rows)


def part_table() -> str:
    """Parts of one rank that trains alone, without and with what bounds its memory."""
    plain = {"optimizer": {"gradient_checkpointing": False, "vision_patches": None}}
    plans = {
        (name, kind): plan(name, Layout(training, {}))[0]
        for name in PUBLISHED
        for kind, training in (("nothing bounded", plain), ("`conf/qwen3vl`", {}))
    }
    parts = list(dict.fromkeys(part for found in plans.values() for part, count in found.parts.items() if count))
    head = "| GB | " + " | ".join(f"{name}, {kind}" for name, kind in plans) + " |"
    lines = [head, _rule(1 + len(plans))]
    for part in parts:
        sizes = (found.parts.get(part, 0) / _GB for found in plans.values())
        lines.append(f"| {part} | " + " | ".join(f"{size:.1f}" for size in sizes) + " |")
    lines.append("| **peak** | " + " | ".join(f"**{found.total / _GB:.1f}**" for found in plans.values()) + " |")
    return "\n".join(lines)


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
