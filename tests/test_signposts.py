"""Signposts reach their listeners, and nothing else."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.signposts import listen, reached


def test_listeners_hear_only_inside_their_block():
    heard: list[str] = []
    reached("before")
    with listen(heard.append):
        reached("one")
        with listen(lambda name: heard.append(name.upper())):
            reached("two")
        reached("three")
    reached("after")
    assert heard == ["one", "two", "TWO", "three"]


def test_same_listener_twice_hears_twice():
    heard: list[str] = []
    with listen(heard.append), listen(heard.append):
        reached("a")
    assert heard == ["a", "a"]


def test_exceptions_of_listeners_pass_and_listening_ends():
    def stop(name: str) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError), listen(stop):
        reached("a")
    reached("a")
