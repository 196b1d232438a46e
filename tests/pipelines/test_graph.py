"""The graph as Kedro sees it: every dataset has its catalog entry, and every node can be the start of a run."""

from __future__ import annotations

import logging
from inspect import isgeneratorfunction
from pathlib import Path

import pytest
from kedro.framework.project import configure_project
from kedro.framework.session import KedroSession
from kedro.runner import ParallelRunner, ThreadRunner
from kedro.validation import TypeExtractor

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import RolloutPipelineOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.config.study import CheckPipelineOptions, ControlOptions
from geo_sokoban_pipeline.envs.inspection import TABLES
from geo_sokoban_pipeline.parameters import section_model
from geo_sokoban_pipeline.pipeline_registry import register_pipelines
from geo_sokoban_pipeline.runs.folders import DATA_NOTE, POLICIES, RunFolders, SourceError, prompts_folder
from geo_sokoban_pipeline.runs.provenance import COMMANDS_FILE
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.index import SPLITS
from runs import ROOT, assert_same_run, read_run

pytestmark = pytest.mark.xdist_group("stored")

# Datasets that live in memory, each with the reason.
IN_MEMORY = {
    "command": "how this command runs itself; a hook puts it into the catalog",
}
REGISTERED = register_pipelines()
for _study in (name for name in REGISTERED if name.startswith("study_")):
    IN_MEMORY[f"{_study}.plan"] = "follows from the parameters alone"
    IN_MEMORY[f"{_study}.finished"] = "the plan once more, when its runs are done"
TASKS = sorted(name.removeprefix("train_") for name in REGISTERED if name.startswith("train_"))
ON_STORED_RUNS = (
    "rollout", "update", "evaluate", "regrade", "export", "report", "browse", "score", "fork", "credit", "control",
    "check", "estimate", "audit",
)  # fmt: skip
# The pipelines of all tasks are made by one template; the steps of the data are a task's own.
STARTED = ["data_geo3k_multi_turn", *(f"{kind}_sokoban" for kind in ("data", "train", *ON_STORED_RUNS))]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEO_SOKOBAN_DATA_ROOT", str(tmp_path_factory.mktemp("data")))
        patch.chdir(ROOT)
        configure_project("geo_sokoban_pipeline", preserve_logging=True)
        with KedroSession.create(ROOT, env="test") as session:
            yield session.load_context().catalog


def test_every_dataset_and_parameter_has_its_entry(catalog):
    used = {name for pipeline in REGISTERED.values() for name in pipeline.datasets()}
    assert {name for name in used if name not in catalog} == set(IN_MEMORY)
    for name in used:
        if ".source_" in name:
            catalog.get(name)  # raises for a part that there is not
    # Each node names the sections that it needs, so that Kedro checks them and kedro-viz draws them.
    assert "parameters" not in used


def test_code_without_a_catalog_looks_in_the_same_places(catalog):
    root, run = catalog.load("runs").root, "train_sokoban"
    folders, data = RunFolders.of(root, run, "default"), prompts_folder(root, "sokoban", "<data_id>")
    stored = [folders.models / name for name in (*POLICIES, "checkpoints", "budget.json")]
    stored += [folders.outputs / name for name in (*SPLITS, "metrics", "turn_values", COMMANDS_FILE)]
    stored += [folders.evaluation, folders.report, folders.reports / "audit.json"]
    places = {f"{run}.{path.stem}": path for path in stored}
    places |= {f"sokoban.{name}": data / f"{name}.parquet" for name in TABLES.values()}
    places["sokoban.identity"] = data / DATA_NOTE
    entries = {name: catalog.config_resolver.resolve_pattern(name) for name in places}
    found = {name: one.get("dataset", one) for name, one in entries.items()}  # an entry may wrap another
    assert {name: Path(one.get("path") or one["filepath"]) for name, one in found.items()} == places


@pytest.mark.parametrize("task", TASKS)
def test_nodes_get_the_options_of_their_task(catalog, task):
    """As models, whole or only the part that they need."""
    train = task_of(task).train_config
    assert type(catalog.load(f"params:train_{task}")) is train
    assert isinstance(catalog.load(f"params:train_{task}.policy"), PolicyOptions)
    assert catalog.load(f"params:train_{task}.task") == task
    assert isinstance(catalog.load(f"params:check_{task}"), CheckPipelineOptions)
    for kind, model in (("rollout", RolloutPipelineOptions), ("control", ControlOptions)):
        options = catalog.load(f"params:{kind}_{task}")
        assert type(options) is model and options.source.run == f"train_{task}"


@pytest.mark.parametrize("task", TASKS)
def test_data_sections_are_plain_values_for_every_node(catalog, task):
    """One hint in any pipeline makes a section a model everywhere: in reports, notebooks and the steps of own tasks."""
    assert type(catalog.load(f"params:{task}")) is dict
    assert task not in TypeExtractor(REGISTERED).extract_types_from_pipelines()


def test_kedro_reads_the_type_hints_of_every_node(caplog):
    """Else it warns in each command; a function whose hints it cannot resolve is put through `typed`."""
    with caplog.at_level(logging.WARNING, "kedro.validation"):
        found = TypeExtractor(REGISTERED).extract_types_from_pipelines()
    assert [record.getMessage() for record in caplog.records] == []
    sections = ("train_geo3k", "tracking", "study", "study_default", "check_sokoban")
    assert {name: found[name] for name in sections} == {name: section_model(name) for name in sections}


@pytest.mark.parametrize("name", [f"{kind}_{task}" for kind in ("train", "rollout", "update") for task in TASKS])
def test_what_yields_is_saved_as_it_comes(name):
    """Kedro collects all that a node gives whose own function is no generator."""
    names = (".train_grpo", ".collect_trajectories", ".update_on_stored")
    loops = [node for node in REGISTERED[name].nodes if node.name.endswith(names)]
    assert all(isgeneratorfunction(node.func) for node in loops) and len(loops) == 1


def test_the_source_is_found_when_a_node_calls_for_it(catalog):
    """In the catalog of this command; a run that is not there is named only then."""
    find = catalog.load("evaluate_sokoban.source_policy")
    with pytest.raises(SourceError, match="train_sokoban/default has no checkpoint; train it first"):
        find()
    assert catalog.load("evaluate_sokoban.source_prompts")() == (None, None)


@pytest.mark.parametrize("task", TASKS)
def test_tags_choose_nodes_by_stage_and_cost(task):
    """`gpu` marks what loads a policy and computes; the rest takes seconds on a processor."""
    train = REGISTERED[f"train_{task}"]
    stages = ("data", "policy", "sft", "grpo", "evaluation", "report")
    assert [len(set(stages) & node.tags) for node in train.nodes] == [1] * len(train.nodes)
    assert {node.name.partition(".")[2] for node in train.filter(tags=["gpu"]).nodes} == {
        "warm_start",
        "train_grpo",
        "evaluate_policies",
    }
    assert train.filter(tags=["data"]).nodes == REGISTERED[f"data_{task}"].nodes


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_data_are_the_same_when_threads_make_them(stored_run, project, task):
    project.run(f"data_{task}", runner=ThreadRunner())
    made = {path.relative_to(project.root): path for path in project.root.rglob("*") if path.is_file()}
    assert any(path.name == "newest.json" for path in made)
    for name, path in made.items():
        assert path.read_bytes() == (stored_run(task).root / name).read_bytes(), name


@pytest.mark.parametrize(
    ("pipeline", "way", "why"),
    [
        ("train_sokoban", {"runner": ThreadRunner()}, "runner=ThreadRunner: the parts of a GRPO iteration must be"),
        ("train_sokoban", {"runner": ParallelRunner()}, "runner=ParallelRunner: the parts of a GRPO iteration must be"),
        ("data_sokoban", {"runner": ParallelRunner()}, "runner=ParallelRunner: the nodes hold open readers"),
        ("train_sokoban", {"only_missing_outputs": True}, "only_missing_outputs: it would leave an evaluation"),
    ],
)
def test_other_ways_to_run_are_refused_before_any_work(project, pipeline, way, why):
    with pytest.raises(ParameterError, match=why):
        project.run(pipeline, **way)
    assert not project.root.exists()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", STARTED)
def test_every_node_can_be_the_start_of_a_run(stored_run, pipeline):
    """Each node alone, in their order: it finds what other commands have stored, and nothing is trained twice."""
    kind, _, task = pipeline.partition("_")
    project = stored_run(task)
    before = read_run(project.root, f"train_{task}")
    for node in REGISTERED[pipeline].nodes:
        if node.namespace == (task if kind == "data" else pipeline):
            project.run(pipeline, from_nodes=[node.name], to_nodes=[node.name])
    assert_same_run(before, read_run(project.root, f"train_{task}"))
