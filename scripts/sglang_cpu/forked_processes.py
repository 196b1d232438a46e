"""Makes the processes of a server forks of its first one: they have the imports, and share their memory.

SGLang has them start anew, since a fork cannot use a GPU that its parent has used. Without a GPU each of them would
import the same libraries for nothing, which is two thirds of the work of a start. A server starts its processes before
it starts threads, so a fork inherits no lock that a thread holds. With several data-parallel replicas it forks from
threads, and to bind processes to NUMA nodes it asks for new ones: such a server is left as it is. A `.pth` file of the
environment imports this module at every start.
"""

from __future__ import annotations

import sys

# By the beginnings of options, which may be shortened.
_NEED_NEW_PROCESSES = ("--dp", "--dat", "--numa")


def _is_server() -> bool:
    """Whether this program is a server whose processes may be forks."""
    words = sys.orig_argv
    is_unlike = any(word.startswith(_NEED_NEW_PROCESSES) for word in words)
    return sys.platform == "linux" and "sglang.launch_server" in words and not is_unlike


if _is_server():
    import multiprocessing

    _set_start_method = multiprocessing.set_start_method

    def _set_fork(method: str | None, force: bool = False) -> None:
        """As `multiprocessing.set_start_method`, with fork in place of spawn."""
        _set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = _set_fork
