"""The graph as Kedro sees it: every dataset has its catalog entry, and every node can be the start of a run."""

from __future__ import annotations

import pytest
from kedro.framework.project import configure_project
from kedro.framework.session import KedroSession

from geo_sokoban_pipeline.pipeline_registry import register_pipelines
from runs import ROOT

# Datasets that live in memory, each with the reason.
IN_MEMORY = {
    "command": "how this command runs itself; a hook puts it into the catalog",
    "study_sokoban.plan": "follows from the parameters alone",
    "study_geo3k.plan": "follows from the parameters alone",
    "study_sokoban.finished": "the plan once more, when its runs are done",
    "study_geo3k.finished": "the plan once more, when its runs are done",
}
REGISTERED = register_pipelines()
TASKS = sorted(name.removeprefix("train_") for name in REGISTERED if name.startswith("train_"))
# A node of the data starts the data pipeline; a whole run from there is what the other tests do.
STARTS = [
    (task, pipeline, node.name)
    for task in TASKS
    for pipeline in (f"data_{task}", f"train_{task}")
    for node in REGISTERED[pipeline].nodes
    if (node.namespace == task) == pipeline.startswith("data_")
]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEO_SOKOBAN_DATA_ROOT", str(tmp_path_factory.mktemp("data")))
        patch.chdir(ROOT)
        configure_project("geo_sokoban_pipeline", preserve_logging=True)
        with KedroSession.create(ROOT, env="test") as session:
            yield session.load_context().catalog


@pytest.mark.parametrize("pipeline", REGISTERED)
def test_every_dataset_has_its_catalog_entry(catalog, pipeline):
    names = {name for name in REGISTERED[pipeline].datasets() if name.partition(":")[0] not in ("params", "parameters")}
    assert {name for name in names if name not in catalog} <= set(IN_MEMORY)


def test_what_lives_in_memory_is_used(catalog):
    used = {name for pipeline in REGISTERED.values() for name in pipeline.datasets()}
    assert set(IN_MEMORY) <= used and not any(name in catalog for name in IN_MEMORY)


@pytest.mark.parametrize("pipeline", REGISTERED)
def test_every_parameter_that_a_node_takes_is_in_the_files(catalog, pipeline):
    names = {name for name in REGISTERED[pipeline].datasets() if name.startswith("params:")}
    assert {name for name in names if name not in catalog} == set()


@pytest.mark.slow
@pytest.mark.parametrize(("task", "pipeline", "node"), STARTS, ids=[node for _, _, node in STARTS])
def test_every_node_can_be_the_start_of_a_run(stored_run, task, pipeline, node):
    """The stored run goes on from there: what is stored is found again, nothing is trained twice."""
    stored_run(task).run(pipeline, from_nodes=[node])
