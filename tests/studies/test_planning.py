"""Planning a study: overrides, order, run ids, data roots, and what counts as finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.parameters import section_model
from geo_sokoban_pipeline.runs.folders import JOURNAL
from geo_sokoban_pipeline.runs.provenance import COMMANDS_FILE
from geo_sokoban_pipeline.runs.storage import MANIFEST, write_json
from geo_sokoban_pipeline.studies.plan import merge, plan_members
from geo_sokoban_pipeline.studies.run import StudyFolder

CONF = Path(__file__).parents[2] / "conf" / "base" / "parameters"
ROOT = Path("/data")


def read(name):
    return yaml.safe_load((CONF / f"{name}.yml").read_text(encoding="utf-8"))


TRAIN = read("train_sokoban")["train_sokoban"]
BASE = {"train_sokoban": TRAIN, "sokoban": read("sokoban")["sokoban"], "tracking": {"enabled": True}}


def plan(study, name="default", root=ROOT):
    return plan_members(name, section_model("study_default").model_validate(study), BASE, root)


@pytest.mark.parametrize(
    ("base", "changes", "merged"),
    [
        ({"a": 1, "b": 2}, [{"b": 3}], {"a": 1, "b": 3}),
        ({"a": {"b": 1, "c": 2}}, [{"a": {"c": 3}}], {"a": {"b": 1, "c": 3}}),
        ({"a": [1, 2]}, [{"a": [3]}], {"a": [3]}),
        ({"a": {"b": 1}}, [{"a": 5}], {"a": 5}),
        ({"a": 5}, [{"a": {"b": 1}}], {"a": {"b": 1}}),
        ({}, [{"a": {"b": 1}}, {"a": {"c": 2}}], {"a": {"b": 1, "c": 2}}),
    ],
)
def test_merge(base, changes, merged):
    before = repr(base)
    assert merge(base, *changes) == merged
    assert repr(base) == before


def test_compared_recipes_begin_with_the_warm_start_of_their_seed():
    recipes = {"rloo": {"grpo": {"advantage": "rloo"}}, "short": {"loop": {"iterations": 9}}}
    train = {"loop": {"eval_interval": 0}}
    members = plan({"seeds": [3, 1], "train": train, "recipes": recipes}, name="estimators")
    found = {member.run_id: member for member in members}
    assert list(found) == [f"estimators-seed{seed}{end}" for seed in (3, 1) for end in ("", "-rloo", "-short")]
    own, rloo, short = (found[f"estimators-seed3{end}"] for end in ("", "-rloo", "-short"))
    assert (rloo.kind, rloo.part, rloo.after, own.part) == ("train", "rloo", own.run_id, "")
    given, base = (member.parameters["train_sokoban"] for member in (rloo, own))
    assert given["policy"]["path"] == str(own.models / "policy") and given["warm_start"]["steps"] == 0
    assert given["grpo"]["advantage"] == "rloo" and given["loop"] == base["loop"]
    assert short.parameters["train_sokoban"]["loop"] == {**base["loop"], "iterations": 9}
    longer = plan(
        {"seeds": [3, 1], "train": {**train, "warm_start": {"steps": 7}}, "recipes": recipes}, name="estimators"
    )
    assert longer[1].run_id == "estimators-seed3-rloo" and longer[1].parameters != rloo.parameters
    for wrong in ({"seeds": [3]}, {"controls": ["teacher"], "recipes": {"teacher": {}}}):
        with pytest.raises(ValueError, match="recipes"):
            plan({"seeds": [3, 1], "recipes": recipes, **wrong})
    with pytest.raises(ParameterError, match=r"study_default\.recipes\.wrong\.train"):
        plan({"recipes": {"wrong": {"grpo": {"advantage": "nothing"}}}})


def test_longest_first_and_each_after_what_it_needs():
    sets = [{"name": "longer", "title": "Longer", "sokoban": {"max_solution": 12}}]
    members = plan({"seeds": [3, 1], "controls": ["teacher", "optimal"], "evaluations": sets})
    assert [(member.run_id, member.after) for member in members] == [
        ("default-seed3", None),
        ("default-seed1", None),
        ("default-seed3-teacher", "default-seed3"),
        ("default-seed3-optimal", "default-seed3"),
        ("default-seed1-teacher", "default-seed1"),
        ("default-seed1-optimal", "default-seed1"),
        ("default-seed3-longer", "default-seed3"),
        ("default-seed1-longer", "default-seed1"),
    ]
    assert {member.kind: member.pipelines for member in members} == {
        "train": ["train_sokoban"],
        "control": ["control_sokoban"],
        "evaluate": ["data_sokoban", "evaluate_sokoban"],
    }


def test_parameters_of_members():
    study = {
        "seeds": [1],
        "train": {"warm_start": {"teacher": {"name": "random_legal"}}},
        "controls": ["optimal"],
        "evaluations": [{"name": "longer", "title": "L", "train": {"rollout": {"max_turns": 16}}}],
    }
    train, control, evaluation = plan(study, "from_zero")
    # Sections are given whole, so that what the study's own command was told reaches its members.
    assert train.params == {
        **BASE,
        "run_id": "from_zero-seed1",
        "seed": 1,
        "train_sokoban": merge(TRAIN, study["train"], {"threads": 1, "processes": 1}),
    }
    # All defaults are filled in, and what the study does not name is the base's.
    resolved = train.parameters["train_sokoban"]
    assert resolved["warm_start"]["teacher"] == {**resolved["warm_start"]["teacher"], "name": "random_legal"}
    assert resolved["warm_start"]["steps"] == TRAIN["warm_start"]["steps"]
    assert control.params["control_sokoban"] == {
        "source": {"run": "train_sokoban", "run_id": "from_zero-seed1"},
        "imitate": "optimal",
    }
    assert control.params["train_sokoban"] == train.params["train_sokoban"]
    assert evaluation.params["train_sokoban"]["rollout"] == {**TRAIN["rollout"], "max_turns": 16}
    assert evaluation.params["train_sokoban"]["warm_start"]["teacher"]["name"] == "random_legal"
    assert evaluation.params["tracking"] == {"enabled": False}
    source = evaluation.params["evaluate_sokoban"]["source"]
    assert source["checkpoint"] == "/data/06_models/train_sokoban/from_zero-seed1/final_policy"


@pytest.mark.parametrize(("asked", "share", "given"), [(4, 1, 1), (4, 2, 2), (4, 8, 4), (1, 8, 1)])
def test_processes_of_a_member(asked, share, given):
    base = {**BASE, "train_sokoban": {**TRAIN, "processes": asked, "threads": None}}
    (member,) = plan_members("x", section_model("study_default")(seeds=(0,)), base, Path("/data"), share)
    assert (member.params["train_sokoban"]["threads"], member.params["train_sokoban"]["processes"]) == (1, given)
    # How many cores there were is no reason to repeat a run.
    assert not {"threads", "processes"} & member.parameters["train_sokoban"].keys()


def test_data_roots():
    sets = [{"name": "longer", "title": "Longer"}]
    assert [member.root for member in plan({"seeds": [0], "evaluations": sets})] == [
        ROOT,
        ROOT / "studies/default/longer",
    ]
    own = plan({"seeds": [0], "controls": ["teacher"], "evaluations": sets, "sokoban": {"max_solution": 5}})
    assert [member.root for member in own] == [
        ROOT / "studies/default",
        ROOT / "studies/default",
        ROOT / "studies/default/longer",
    ]
    assert {member.params["sokoban"]["max_solution"] for member in own} == {5}


def test_data_of_another_task_are_refused():
    with pytest.raises(ValueError, match="sokoban: this study is of the task geo3k"):
        section_model("study_default").model_validate({"task": "geo3k", "sokoban": {"height": 7}})


@pytest.mark.parametrize(
    ("study", "message"),
    [
        (
            {"train": {"loop": {"iteration": 5}}},
            "study_default.train.loop.iteration=5: unknown name. Did you mean study_default.train.loop.iterations?",
        ),
        ({"sokoban": {"max_solution": 0}}, "study_default.sokoban.max_solution=0"),
        (
            {"evaluations": [{"name": "a", "title": "A", "sokoban": {"hight": 8}}]},
            "study_default.evaluations.0.sokoban.hight=8: unknown name",
        ),
    ],
)
def test_wrong_overrides_are_named(study, message):
    with pytest.raises(ParameterError) as error:
        plan(study)
    assert message in str(error.value)


def test_a_password_reaches_no_file_of_a_member():
    base = {**BASE, "tracking": {"uri": "postgresql://u:swordfish@h/db"}}
    with pytest.raises(ParameterError, match=r"tracking: uri=postgresql://\*\*\*@h/db: a password must not stand"):
        plan_members("default", section_model("study_default").model_validate({"seeds": [1]}), base, ROOT)


STUDIES = {name: study for path in (CONF / "studies").iterdir() for name, study in read(f"studies/{path.stem}").items()}


@pytest.mark.parametrize("name", STUDIES)
def test_the_studies_of_the_project_can_be_planned(name):
    study = section_model(name).model_validate(STUDIES[name])
    task, counts = study.task, {"counts": {"train": 8, "validation": 4, "eval": 4}}
    base = BASE | {f"train_{task}": read(f"train_{task}")[f"train_{task}"], task: {} if task == "sokoban" else counts}
    members = plan_members(name.removeprefix("study_"), study, base, ROOT)
    assert len({member.run_id for member in members}) == len(members)
    assert {member.pipelines[-1] for member in members} <= {
        f"{kind}_{task}" for kind in ("train", "control", "evaluate")
    }
    assert {f"train_{task}", task} <= members[0].parameters.keys()
    runs = [member for member in members if member.kind == "train"]
    assert len(runs) == len(study.seeds) * (1 + len(study.recipes)) + len(study.beside)


def test_finished_are_members_with_the_same_parameters_and_all_files(tmp_path):
    (member,) = plan({"seeds": [0]}, root=tmp_path)
    (other,) = plan({"seeds": [0], "train": {"loop": {"iterations": 77}}}, root=tmp_path)
    folder = StudyFolder.of(tmp_path, "default")
    folder.write_record(member, 12.5, 2, {"version": "1"})
    assert not folder.is_finished(member)
    for path in member.outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert folder.is_finished(member)
    assert not folder.is_finished(other)
    record = folder.read_record(member)
    assert (record["seconds"], record["workers"], record["maker"]) == (12.5, 2, {"version": "1"})
    # An option that is a constant by now counts where its value was another one.
    for momentum, finished in ((0.95, True), (0.5, False)):
        stored = {"parameters": merge(member.parameters, {"train_sokoban": {"optimizer": {"momentum": momentum}}})}
        write_json(folder.record(member), record | stored)
        assert folder.is_finished(member) is finished
    write_json(folder.record(member), record)
    member.summary.unlink()
    assert not folder.is_finished(member)


def test_a_new_generation_forgets_what_was_finished(tmp_path):
    old, added = plan({"seeds": [0, 1]}, root=tmp_path)
    folder = StudyFolder.of(tmp_path, "default")
    for path in old.outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    folder.write_record(old, 1.0, 1, {})
    stored = folder.record(old).read_bytes()
    assert folder.is_finished(old) and not folder.is_outdated(old)
    folder.begin_generation([old])
    # A record that was not deleted in time does not count either.
    folder.record(old).write_bytes(stored)
    assert folder.is_outdated(old) and not folder.is_finished(old)  # nothing has begun yet
    write_json(old.folders.outputs / COMMANDS_FILE, [{"began": 1}])
    assert not folder.is_outdated(old) and not folder.is_finished(old)
    # Killed while the older run is set aside: it comes back, unless the new one has a checkpoint.
    write_json(old.folders.models / JOURNAL, {"state": "aside"})
    assert folder.is_outdated(old)
    write_json(old.folders.models / "checkpoints" / "iter=00000" / MANIFEST, {"files": {}})
    assert not folder.is_outdated(old)
    write_json(old.folders.models / JOURNAL, {"state": "moving"})
    assert folder.is_outdated(old)
    old.folders.delete_replaced()
    folder.write_record(old, 1.0, 1, {})
    assert folder.is_finished(old)
    # What joins the study later is not made anew: it may have been run by hand.
    assert not folder.is_outdated(added)
    folder.begin_generation([old, added])
    assert folder.is_outdated(old) and folder.is_outdated(added)
