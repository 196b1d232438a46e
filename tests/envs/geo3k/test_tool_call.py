"""Grammar of the scoring call: slime's worked examples, deviations from them, and a parser that no text stops."""

from __future__ import annotations

import json
import re
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.geo3k import parse_tool_call
from geo_sokoban_pipeline.envs.geo3k.tool_call import TOOL_NAMES, ToolCall

FIVE = ToolCall("calc_score", "5")


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def scored(answer: str = '"5"', name: str = "calc_score") -> str:
    return call(f'{{"name": "{name}", "arguments": {{"answer": {answer}}}}}')


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (scored(), FIVE),
        (f"I think so. {scored()} Answer: \\boxed{{5}}", FIVE),
        (scored(name="calc_geo3k_reward"), ToolCall("calc_geo3k_reward", "5")),
        (scored(name="  calc_score "), FIVE),
        (scored('"5\\ud800"', name="x\\udfff"), ToolCall("x?", "5?")),  # half a surrogate pair can be written to a file
        ('<tool_call> \n {"name": "calc_score",\n "arguments": {"answer": "5"}}\n </tool_call>', FIVE),
        (scored("5"), FIVE),
        (scored("0"), ToolCall("calc_score", "0")),
        (scored("5.50"), ToolCall("calc_score", "5.50")),
        (scored('" 5 "'), FIVE),
        (scored("[5]"), FIVE),
        (scored('["5", 7.5]'), ToolCall("calc_score", "5, 7.5")),
        (scored("[]"), ToolCall("calc_score", None)),
        (scored("false"), ToolCall("calc_score", "False")),
        (scored('"\\\\frac{1}{2}"'), ToolCall("calc_score", "\\frac{1}{2}")),
        (scored("0.00001"), ToolCall("calc_score", "0.00001")),
        (scored("1e16"), ToolCall("calc_score", "10000000000000000")),
        (scored("0.1234567890123456789"), ToolCall("calc_score", "0.1234567890123456789")),
        (scored("1e400"), ToolCall("calc_score", "1" + 400 * "0")),
        (scored("9" * 5000), ToolCall("calc_score", "9" * 5000)),
        (scored("9" * 700), ToolCall("calc_score", "9" * 700)),
        (scored("NaN"), ToolCall("calc_score", None)),
        (scored("-Infinity"), ToolCall("calc_score", None)),
        (scored("1e999999999"), ToolCall("calc_score", None)),
        # The form of OpenAI, with arguments as JSON text and as an object.
        (call(r'{"function": {"name": "calc_score", "arguments": "{\"answer\": \"5\"}"}}'), FIVE),
        (call('{"function": {"name": "calc_score", "arguments": {"answer": 5}}}'), FIVE),
        (call('{"name": "calc_score", "function": {"arguments": {"answer": 5}}}'), FIVE),
        # Another name is a call; what it means is for the environment.
        (scored(name="calc"), ToolCall("calc", "5")),
        (scored(name="CALC_SCORE"), ToolCall("CALC_SCORE", "5")),
        # Calls without an answer.
        (scored('""'), ToolCall("calc_score", None)),
        (scored('"  "'), ToolCall("calc_score", None)),
        (scored("null"), ToolCall("calc_score", None)),
        (call('{"name": "calc_score", "arguments": {"value": 5}}'), ToolCall("calc_score", None)),
        (call('{"name": "calc_score", "arguments": {}}'), ToolCall("calc_score", None)),
        (call('{"name": "calc_score"}'), ToolCall("calc_score", None)),
        (call('{"name": "calc_score", "arguments": ""}'), ToolCall("calc_score", None)),
        (call('{"name": "calc_score", "arguments": [5]}'), ToolCall("calc_score", None, True)),
        (call('{"name": "calc_score", "arguments": "[5]"}'), ToolCall("calc_score", None, True)),
        (call('{"name": "calc_score", "arguments": 5}'), ToolCall("calc_score", None, True)),
        # The last call counts.
        (scored("4") + scored("5"), FIVE),
        (scored("4") + " no, " + scored("5") + " and done", FIVE),
        # A call that nothing closes takes the next one with it.
        ("<tool_call>{ " + scored("5"), None),
        (scored("4") + '<tool_call>{"name": "calc_score"', ToolCall("calc_score", "4")),
        # No call.
        ("", None),
        ("Answer: \\boxed{5}", None),
        ('{"name": "calc_score", "arguments": {"answer": "5"}}', None),
        ('<TOOL_CALL>{"name": "calc_score", "arguments": {"answer": "5"}}</TOOL_CALL>', None),
        ('<tool_call>{"name": "calc_score", "arguments": {"answer": "5"}}', None),
        ('<tool_call>{"name": "calc_score", "arguments": {"answer": "5"}</tool_call>', None),
        (call('[{"name": "calc_score", "arguments": {"answer": "5"}}]'), None),
        (call("{'name': 'calc_score', 'arguments': {'answer': '5'}}"), None),
        (call('{"name": "calc_score", "arguments": {"answer": "5"},}'), None),
        (call('{"arguments": {"answer": "5"}}'), None),
        (call('{"name": "", "arguments": {"answer": "5"}}'), None),
        (call('{"name": 5, "arguments": {"answer": "5"}}'), None),
        (call('{"function": "calc_score", "arguments": {"answer": "5"}}'), None),
        (call('{"name": "calc_score", "arguments": "answer=5"}'), None),
        (call('{"name": "calc_score", "arguments": {"answer": "5"}} please'), None),
        (call("calc_score(5)"), None),
        # After the thoughts only.
        (f"<think>{scored('4')}</think> none", None),
        (f"<think>{scored('4')}</think>{scored('5')}", FIVE),
    ],
)
def test_grammar(response, expected):
    found = parse_tool_call(response)
    assert found == expected
    assert found is None or found.is_known == (found.name in ("calc_score", "calc_geo3k_reward"))


@pytest.mark.parametrize(
    "latex",
    [
        *(r"5\sqrt{3}", r"\frac{1}{2}", r"\text{A}", r"\theta", r"\beta", r"\nu", r"\rho+\tau", r"2\times 3", r"50\%"),
        *(r"\left(1, 2\right)", r"x \neq 5", r"\boxed{5}", r"\underline{AB}", r"\upsilon", r"\bar{x}", r"\tan 30"),
        *(r"\dfrac{\sqrt{3}}{2}\pi", r"5\\\sqrt{3}", r"\textbf{5}", r"\triangle ABC", r"\not= 5", r"\uparrow"),
        *(
            r"\rVert",
            r"\tbinom{5}{2}",
            r"\tag{1}",
            r"\triangleq 5",
            r"\thickapprox 5",
            r"\natural",
            r"\ncong",
            r"\nsim",
        ),
        *(r"\nless", r"\ngtr", r"5\newline", r"\rlap{5}", r"\rightleftharpoons"),
    ],
)
def test_latex_with_single_backslashes(latex):
    wanted = ToolCall("calc_score", latex.replace("\\\\", "\\"))
    assert parse_tool_call(scored(f'"{latex}"')) == wanted
    in_text = json.dumps(f'{{"answer": "{latex}"}}')
    assert parse_tool_call(call(f'{{"name": "calc_score", "arguments": {in_text}}}')) == wanted


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("5\\u00b0", "5°"),
        ('5\\"', '5"'),
        ("a\\nb", "a\nb"),
        ("a\\tb", "a\tb"),
        ("1\\r\\n2", "1\r\n2"),
        ("5\\/2", "5/2"),
        ("a\\f2", "a\f2"),
    ],
)
def test_escapes_of_json_stay_what_they_are(written, answer):
    assert parse_tool_call(scored(f'"{written}"')) == ToolCall("calc_score", answer)


@pytest.mark.parametrize(
    ("answer", "read"),
    [("0.00001", "1e-05"), ('"\\frac{1}{2}"', "rac{1}{2}"), ("NaN", "nan"), ("1e400", "inf"), ('"5\\sqrt{3}"', None)],
)
def test_the_original_reads_plain_json(answer, read):
    found = parse_tool_call(scored(answer), tolerate_latex=False)
    assert found == (None if read is None else ToolCall("calc_score", read))


ORIGINAL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        " ",
        "\n",
        '{"name": "calc_score", "arguments": {"answer": "5"}}',
        "x",
        "<",
    ]
)


@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=300, deadline=None)
def test_the_call_is_the_one_that_the_original_pattern_finds(text):
    found = ORIGINAL.findall(text)
    expected = None
    if found:
        try:
            json.loads(found[-1])
        except ValueError:
            pass
        else:
            expected = parse_tool_call(f"<tool_call>{found[-1]}</tool_call>")
    assert parse_tool_call(text, after_think=False) == expected


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 5, -1.5, float("nan"), "", " 5 ", '{"answer": 5}', "\ud800"]) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["answer", "x"]), inner, max_size=2),
    max_leaves=3,
)
PAYLOADS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from([*TOOL_NAMES, "x", "", 3, None]) | VALUES,
        "arguments": st.fixed_dictionaries({}, optional={"answer": VALUES}) | VALUES,
        "function": st.fixed_dictionaries({}, optional={"name": VALUES, "arguments": VALUES}) | VALUES,
    },
)
NOISE = st.text(alphabet=st.sampled_from("<>/tool_call{}[]\"':,\\ \n0e+-.ud8\ufffd"), max_size=60)
RESPONSES = st.one_of(
    PAYLOADS.map(json.dumps).map(call),
    st.tuples(PAYLOADS.map(json.dumps), NOISE, st.integers(0, 200)).map(
        lambda p: call(p[0][: p[2]] + p[1] + p[0][p[2] :])
    ),
    NOISE,
    NOISE.map(call),
    st.text(max_size=80),
    st.lists(PIECES, max_size=20).map("".join),
)


@given(RESPONSES)
@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_response_stops_the_parser(response):
    for text in (response, call(response), f"<think>{response}</think>{response}"):
        found = parse_tool_call(text, earlier_call_counts=True)
        assert found is None or (found.name == found.name.strip() and found.answer != "")
        if found is not None and found.answer is not None:
            (found.name + found.answer).encode("utf-8")


BIG = 200_000


@pytest.mark.parametrize(
    "response",
    [
        pytest.param("<tool_call>{" * BIG, id="opened"),
        pytest.param("<tool_call>{}" * BIG, id="opened and braced"),
        pytest.param("<tool_call>" + " " * BIG + "{", id="spaces in front"),
        pytest.param("<tool_call>{" + "} " * BIG, id="closing braces"),
        pytest.param("<tool_call>{}" + " " * BIG + "</tool_call" * 10, id="spaces behind"),
        pytest.param("</tool_call>" * BIG, id="closed"),
        pytest.param("</think>" * BIG, id="thoughts"),
        pytest.param(call('{"name":' * BIG + "}"), id="nested objects"),
        pytest.param(call('{"name":' + "[" * BIG + "}"), id="nested lists"),
        pytest.param(call('{"a":' * 900 + "1" + "}" * 900), id="nested up to the limit"),
        pytest.param(scored("[" * 900 + "]" * 900), id="an answer nested up to the limit"),
        pytest.param(scored("9" * 5000), id="a number of 5,000 digits"),
        pytest.param(scored("1e999999999"), id="a number beyond floats"),
        pytest.param(scored("NaN"), id="no number"),
        pytest.param(scored(json.dumps("5" * 5_000_000)), id="an answer of 5 MB"),
        pytest.param(call(json.dumps({"name": "calc_score", "arguments": {str(i): i for i in range(BIG)}})), id="keys"),
        pytest.param(scored("4") * 20_000, id="20,000 calls"),
        pytest.param(
            call('{"name": "calc_score", "arguments": ' + json.dumps('{"answer":' * 5000) + "}"), id="in text"
        ),
    ],
)
def test_large_responses_are_read_at_once(response):
    began = time.process_time()
    parse_tool_call(response, earlier_call_counts=True)
    assert time.process_time() - began < 1.0


def test_nothing_is_kept_of_a_response():
    responses = [scored(json.dumps(f"{index:09d}" * 1000)) for index in range(50)]
    tracemalloc.start()
    for response in responses:
        parse_tool_call(response)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 10_000
