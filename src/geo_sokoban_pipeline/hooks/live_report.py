"""The report of a training that goes on: written with its first checkpoint, then as often as its share of time allows.

The page replaces the one before by a rename, so a killed command leaves a whole page. A failure of the page is a
warning and ends the writing of pages, never the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline.node import Node

from geo_sokoban_pipeline.config.grpo import SourceOptions, TrainOptions
from geo_sokoban_pipeline.hooks.parameters import ContextHooks

log = logging.getLogger(__name__)
_LOOP = ".train_grpo"  # the node's name after its namespace


@dataclass
class ReportBudget:
    """Seconds that the pages of a loop may take.

    Attributes:
        share: of the loop's time; the first page is written whatever it takes, 0 allows none.
        spent: seconds of all pages.
        longest: seconds of the slowest one, which the next one is expected to take.
    """

    share: float
    spent: float = 0.0
    longest: float | None = None

    def allows(self, elapsed: float) -> bool:
        """Whether a page may be written now.

        Args:
            elapsed: seconds since the loop began.
        """
        if self.longest is None:
            return self.share > 0
        return self.spent + self.longest <= self.share * elapsed

    def note(self, seconds: float) -> None:
        """Count a page that took so many seconds."""
        self.spent += seconds
        self.longest = max(self.longest or 0.0, seconds)


class LiveReportHooks(ContextHooks):
    """Writes the report of each training run of the command while its loop goes on."""

    @hook_impl
    def before_node_run(self, node: Node, catalog: DataCatalog) -> None:
        """Begin the budget of a loop, and end it with the next node."""
        self._run, is_loop, self._catalog = node.name.removesuffix(_LOOP), node.name.endswith(_LOOP), catalog
        options: TrainOptions | None = getattr(self._parameters, self._run, None) if is_loop else None
        self._began = time.perf_counter()
        self._budget = None if options is None else ReportBudget(options.loop.report_share)

    @hook_impl(trylast=True)
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Write the page once an iteration is committed, if the budget allows it."""
        budget = self._budget
        if budget is None or dataset_name != f"{self._run}.checkpoints" or not (isinstance(data, Mapping) and data):
            return
        began = time.perf_counter()
        if not budget.allows(began - self._began):
            return
        try:
            self._write()
        except Exception as error:  # whatever is wrong with a page, hours of training go on
            log.warning("the report of %s is written at the end alone. %s: %s", self._run, type(error).__name__, error)
            self._budget = None
            return
        budget.note(time.perf_counter() - began)
        log.debug("report of %s: %.2f s so far", self._run, budget.spent)

    def _write(self) -> None:
        # These modules import pyarrow, which the start of a command need not wait for.
        from geo_sokoban_pipeline.reporting.live import read_report_inputs
        from geo_sokoban_pipeline.reporting.report import build_report

        options, dumped = getattr(self._parameters, self._run), self._parameters.model_dump(mode="json")
        shown = {name: dumped[name] for name in ("seed", self._run.removeprefix("train_"), self._run)}
        source = SourceOptions(run=self._run, run_id=self._parameters.run_id)
        page = build_report(read_report_inputs(self._data_root, source, options.loop.iterations, shown))
        self._catalog.save(f"{self._run}.report", page)
