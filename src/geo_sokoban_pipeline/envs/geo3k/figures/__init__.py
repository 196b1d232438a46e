"""Generated geometry problems: seeded, exact, drawn to scale, no two alike."""

from geo_sokoban_pipeline.envs.geo3k.figures.exact import AnswerForm, ExactValue, answer_form, exact
from geo_sokoban_pipeline.envs.geo3k.figures.generation import (
    ProblemsExhaustedError,
    family_names,
    generate_problems,
    generate_splits,
)
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Candidate, Problem, problem_key

__all__ = [
    "AnswerForm",
    "Candidate",
    "ExactValue",
    "Problem",
    "ProblemsExhaustedError",
    "answer_form",
    "exact",
    "family_names",
    "generate_problems",
    "generate_splits",
    "problem_key",
]
