"""Grading of mathematical answers: is what stands in the last box of a response the label?"""

from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import decimal_text, label_text
from geo_sokoban_pipeline.rewards.math_answer.grader import Grader, grade_answer, prepare_grade
from geo_sokoban_pipeline.rewards.math_answer.pool import GradingPool, GradingWorkerError
from geo_sokoban_pipeline.rewards.math_answer.verdict import Grade

__all__ = [
    "Grade",
    "Grader",
    "GradingPool",
    "GradingWorkerError",
    "decimal_text",
    "grade_answer",
    "label_text",
    "prepare_grade",
]
