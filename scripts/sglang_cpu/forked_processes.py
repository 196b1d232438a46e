"""Makes the processes of a server forks of its first one: they have the imports, and share their memory.

SGLang has them start anew, since a fork cannot use a GPU that its parent has used. Without a GPU each of them would
import the same libraries for nothing, which is two thirds of the work of a start. SGLang starts its processes before it
starts threads, so a fork inherits no lock that a thread holds. A `.pth` file of the environment imports this module at
every start.
"""

from __future__ import annotations

import multiprocessing

_set_start_method = multiprocessing.set_start_method


def _set_fork(method: str | None, force: bool = False) -> None:
    """As `multiprocessing.set_start_method`, with fork in place of spawn."""
    _set_start_method("fork" if method == "spawn" else method, force)


multiprocessing.set_start_method = _set_fork
