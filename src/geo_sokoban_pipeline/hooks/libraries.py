"""Libraries send no usage data, and log only what people can use; set before a command does any work.

Libraries read these variables when they are imported, which happens in nodes and in the hook of the tracking: later.
"""

from __future__ import annotations

import os

from kedro.framework.hooks import hook_impl

from geo_sokoban_pipeline.console import enrich_logging, quieten_libraries

_SWITCHES = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "KEDRO_DISABLE_TELEMETRY": "1",
    "MLFLOW_CONFIGURE_LOGGING": "false",  # conf/logging.yml decides, not MLflow
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def switch_off_telemetry() -> None:
    """Set each variable that is not set: kedro-telemetry asks before a command is read, the libraries later."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)


class LibraryHooks:
    """Switches off what libraries send, and shortens what they log."""

    @hook_impl(tryfirst=True)
    def after_context_created(self) -> None:
        """Switch off what libraries send, and put the terminal's log handler in place."""
        switch_off_telemetry()
        enrich_logging()
        quieten_libraries()
