"""Lines that long work writes where there is no terminal."""

from __future__ import annotations

import logging

from geo_sokoban_pipeline import progress


def test_lines_come_after_five_seconds_and_then_every_ten(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "on_terminal", lambda: False)
    caplog.set_level(logging.INFO)
    with progress.track("solve levels", 40) as work:
        for second in range(1, 21):
            clock[0] = float(second)
            work.advance()
    assert [record.message for record in caplog.records] == [
        "solve levels 5/40, 35 s left",
        "solve levels 15/40, 25 s left",
    ]
