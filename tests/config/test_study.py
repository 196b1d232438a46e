"""Options of studies and controls: what is refused, and with which words."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.config.study import CriterionOptions
from task_options import ControlOptions, StudyDefinition, StudyOptions

SET = {"name": "longer", "title": "Longer"}


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (
            StudyOptions,
            {"name": "defalt"},
            "study.name=\"defalt\": input should be 'default', 'one_behind', 'from_zero', 'long', 'geo3k' or "
            "'geo3k_multi_turn'",
        ),
        (StudyOptions, {"workers": 0}, "study.workers=0: input should be greater than or equal to 1"),
        (StudyDefinition, {"seeds": []}, "study.seeds=[]"),
        (StudyDefinition, {"seeds": [1, 1]}, "seeds and beside names something twice: 1, 1"),
        (StudyDefinition, {"chosen_on": [10, 10]}, "chosen_on names something twice: 10, 10"),
        (
            StudyDefinition,
            {"controls": ["teacher", "solver"]},
            "study.controls.1=\"solver\": input should be 'teacher'",
        ),
        (StudyDefinition, {"controls": ["teacher", "teacher"]}, "controls names something twice"),
        (StudyDefinition, {"evaluations": [SET, SET]}, "evaluations names something twice: longer, longer"),
        (StudyDefinition, {"evaluations": [{**SET, "name": "8x8/two"}]}, "string should match pattern"),
        (StudyDefinition, {"max_minutes": 0}, "study.max_minutes=0"),
        (CriterionOptions, {"player": "final"}, "a criterion needs exactly one of at_least and at_most"),
        (CriterionOptions, {"player": "final", "at_least": 1, "at_most": 2}, "a criterion needs exactly one of"),
        (CriterionOptions, {"player": "final", "at_least": 1, "apart": True}, "apart=true needs `over`"),
        (ControlOptions, {"imitate": "expert"}, "input should be 'teacher' or 'optimal'"),
        (ControlOptions, {"share": 0}, "study.share=0: input should be greater than 0"),
    ],
)
def test_what_is_refused(model, values, message):
    with pytest.raises(ParameterError) as error:
        validate_parameters(values, model, prefix="study")
    assert message in str(error.value)


def test_defaults_are_a_study():
    assert StudyDefinition().seeds == (0, 1, 2)
    assert ControlOptions().source.run == "train_sokoban"
