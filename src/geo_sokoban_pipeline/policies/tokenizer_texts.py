"""Texts that the tiny policy's vocabularies are made from: one for each world, fixed, so that they never change unseen.

What stands in every turn is repeated until each of its words is one token; what the policy writes again and again in
the same form is added whole (`markup`), so that a reply costs little more than its answer.
"""

from __future__ import annotations

from dataclasses import dataclass

_TAGS = ("<answer>", "</answer>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_ROLES = ("user", "assistant", "system")
_FIGURES = ("vertical angles", "linear pair", "complementary angles", "inscribed angle", "intercepted arc")


@dataclass(frozen=True)
class Texts:
    """What a vocabulary is made from.

    Attributes:
        frequent: words that have to be one token each.
        corpus: further text.
        markup: tokens that are added whole, besides Qwen's own.
    """

    frequent: tuple[str, ...]
    corpus: str
    markup: tuple[str, ...]


_SOKOBAN = Texts(
    frequent=("Up", "Down", "Left", "Right", "up", "down", "left", "right", *_ROLES, "Next"),
    corpus="""
Up Down Left Right,Up,Down,Left,Right up down left right
system user assistant You are playing Sokoban. Push the yellow box onto the red target. The board is shown in the image.
You are the green player. Walls are brick. Floor is black. You push boxes, you never pull them. Avoid walls and corners.
Reply with up to three moves, for example: Up, Left. Decide the next action: Current Observation: see the image.
Actions executed: None. Next move? Choose your next moves from Up, Down, Left and Right.
Find the angle, the length x, the area, the perimeter. The answer is boxed. Answer: \\boxed{12} calc_score
\\frac{1}{2} \\sqrt{3} \\pi 0 1 2 3 4 5 6 7 8 9 10 20 30 45 60 90 100 180 360 degrees
triangle circle parallel lines square rectangle find the value
name arguments answer {"name": "calc_score", "arguments": {"answer": "5"}} correct wrong try again last chance
""",
    markup=_TAGS,
)

_GEOMETRY = Texts(
    frequent=(*_ROLES, "Find", " $", "$.", "boxed", "answer", " answer", "wrong", " wrong", "correct", " try", " again")
    + (" last", " chance", " no", " tool", "name", " name", "calc", "_score", "arguments", '":', ' "', '",', ' {"'),
    corpus="""
Find $x$. Find $y$. Find x. Find the measure of the angle. Find the length of the side. Find the area of the figure.
Find the perimeter. Find the value of the variable. Round to the nearest tenth if necessary, to the nearest degree.
Think step by step, then write the answer inside \\boxed{}. Answer: \\boxed{$Answer}
<tool_call>{"name": "calc_score", "arguments": {"answer": }}</tool_call> \\boxed{}
wrong, try again wrong, last chance correct no answer, try again no tool, try again no tool_call
\\frac { 1 } { 2 } \\sqrt { 3 } 5 \\sqrt { 2 } 6 \\pi \\angle \\triangle \\overline { A B } A B C D E F G M N P Q R S T
a = 46 180 - a 90 - a a / 2 2 a + b c x = 134 degrees parallel lines triangle circle square rectangle trapezoid
""",
    markup=(*_TAGS, *_FIGURES, "\\boxed{", '{"name": "calc_score", "arguments": {"answer": "', '"}}'),
)

TEXTS = {"sokoban": _SOKOBAN, "geo3k": _GEOMETRY}
