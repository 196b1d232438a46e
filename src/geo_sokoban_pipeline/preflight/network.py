"""Servers that a run talks to: which there are, whether they answer, and whether they let this user in.

A local run needs none. Each server is one `Server`, so an engine behind a port adds its own to `needed_servers`.
"""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.preflight.checks import Check, State

_GROUP = "network"
_REFUSED = (401, 403)


@dataclass(frozen=True)
class Server:
    """A server that a run needs.

    Attributes:
        name: for the table.
        uri: `http(s)://host[:port][/path]`.
        state: of a server that does not answer.
        way_out: what to do then.
        login: what to do where it refuses this user.
    """

    name: str
    uri: str
    state: State
    way_out: str
    login: str


def needed_servers(parameters: ProjectParameters) -> list[Server]:
    """Servers of a run's parameters."""
    uri = parameters.tracking.uri
    if not parameters.tracking.enabled or uri is None or urlsplit(uri).scheme not in ("http", "https"):
        return []
    # Tracking only watches: a run goes on without it.
    way_out = "start the server, or set tracking.uri=null or tracking.enabled=false"
    login = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    return [Server("MLflow", uri, "warning", way_out, login)]


def check_servers(servers: list[Server], timeout: float) -> list[Check]:
    """Whether each server's port is open and its answer lets this user in.

    Args:
        timeout: seconds that a server has.
    """
    if not servers:
        return [Check(_GROUP, "ports", "ok", "none needed")]
    return [_check_server(server, timeout) for server in servers]


def check_keys(parameters: ProjectParameters, run: str, timeout: float) -> list[Check]:
    """Whether what comes from the hub can be had with the token that is set; tokens are never shown.

    Args:
        run: namespace of the run.
        timeout: seconds that the hub has.
    """
    options = getattr(parameters, run)
    data = getattr(parameters, options.task)
    wanted = []
    if options.policy.source == "hub":
        wanted.append(("policy", "models", options.policy.path))
    if data.source == "hub" and not os.path.isdir(data.hub.dataset):
        wanted.append(("data", "datasets", data.hub.dataset))
    if not wanted:
        return [Check(_GROUP, "keys", "ok", "none needed: nothing comes from the hub")]
    return [_check_hub(*entry, timeout) for entry in wanted]


def _check_server(server: Server, timeout: float) -> Check:
    parts = urlsplit(server.uri)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout):
            pass
    except OSError as error:
        text = f"{server.uri}: port {port} of {parts.hostname} does not answer ({error})"
        return Check(_GROUP, server.name, server.state, text, server.way_out)
    code = _status(server.uri, timeout, _login_header())
    if code in _REFUSED:
        return Check(_GROUP, server.name, server.state, f"{server.uri}: refuses this user ({code})", server.login)
    return Check(_GROUP, server.name, "ok", f"{server.uri}: port {port} answers")


def _check_hub(name: str, kind: str, repository: str, timeout: float) -> Check:
    from huggingface_hub import constants, get_token

    token = get_token()
    shown = "HF_TOKEN is set" if token else "no HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        return Check(_GROUP, f"keys ({name})", "skipped", f"{repository}: HF_HUB_OFFLINE is set; {shown}")
    header = {"Authorization": f"Bearer {token}"} if token else {}
    code = _status(f"{constants.ENDPOINT}/api/{kind}/{repository}", timeout, header)
    if code in _REFUSED:
        text = f"{repository}: the hub refuses access ({code}); {shown}"
        way_out = "accept its terms on the hub and set HF_TOKEN, or give a local folder"
        return Check(_GROUP, f"keys ({name})", "failure", text, way_out)
    if code is None:
        text = f"{repository}: the hub does not answer; {shown}"
        way_out = "check the network, or give a local folder; what is in the cache is used"
        return Check(_GROUP, f"keys ({name})", "warning", text, way_out)
    return Check(_GROUP, f"keys ({name})", "ok", f"{repository}: the hub lets this user in; {shown}")


def _status(uri: str, timeout: float, header: dict[str, str]) -> int | None:
    """Status code of a GET; None where nobody answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(uri, headers=header), timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError:
        return None


def _login_header() -> dict[str, str]:
    import base64

    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"Authorization": f"Bearer {token}"}
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {}
