"""Servers that a run talks to: which there are, whether they answer, and whether they let this user in.

A local run needs none. Each server is one `Server`, so an engine behind a port adds its own to `needed_servers`.
"""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.preflight.checks import Check, State

_GROUP = "network"
_FOUND, _REFUSED, _UNKNOWN = 200, (401, 403), 404


@dataclass(frozen=True)
class Server:
    """A server that a run needs.

    Attributes:
        name: for the table.
        uri: `http(s)://host[:port][/path]`.
        state: of a server that does not answer.
        way_out: what to do then.
        login: what to do where it refuses this user.
        header: that shows who asks, and is shown nowhere; None: MLflow's login, which no other server gets.
    """

    name: str
    uri: str
    state: State
    way_out: str
    login: str
    header: Mapping[str, str] | None = field(default=None, repr=False)


def needed_servers(parameters: ProjectParameters) -> list[Server]:
    """Servers of a run's parameters."""
    uri = parameters.tracking.uri
    if not parameters.tracking.enabled or uri is None or not uri.startswith(("http://", "https://")):
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
    found = []
    for server in servers:
        try:
            found.append(_check_server(server, timeout))
        except (OSError, HTTPException, ValueError) as error:
            text = f"{_shown(server.uri)}: {type(error).__name__}: {error}"
            found.append(Check(_GROUP, server.name, server.state, text, server.way_out))
    return found


def check_keys(parameters: ProjectParameters, run: str, timeout: float, *, has_policy: bool = False) -> list[Check]:
    """Whether what comes from the hub can be had with the token that is set; tokens are never shown.

    Args:
        run: namespace of the run.
        timeout: seconds that the hub has.
        has_policy: the run has its own copy of the policy that it started from, and asks for none.
    """
    options = getattr(parameters, run)
    data = getattr(parameters, options.task)
    wanted = []
    if options.policy.source == "hub" and not has_policy:
        wanted.append(("policy", "models", options.policy.path))
    if data.source == "hub" and not os.path.isdir(data.hub.dataset):
        wanted.append(("data", "datasets", data.hub.dataset))
    if not wanted:
        return [Check(_GROUP, "keys", "ok", "none needed: nothing comes from the hub")]
    return [_check_hub(*entry, timeout) for entry in wanted]


def _check_server(server: Server, timeout: float) -> Check:
    parts = urlsplit(server.uri)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    shown = _shown(server.uri)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout):
            pass
    except OSError as error:
        text = f"{shown}: port {port} of {parts.hostname} does not answer ({error})"
        return Check(_GROUP, server.name, server.state, text, server.way_out)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    header = _login_header(parts.username) if server.header is None else server.header
    code = _status(bare, timeout, header)
    if code in _REFUSED:
        return Check(_GROUP, server.name, server.state, f"{shown}: refuses this user ({code})", server.login)
    return Check(_GROUP, server.name, "ok", f"{shown}: port {port} answers")


def _shown(uri: str) -> str:
    """Scheme, host and port of an address: what else stands in it may be a secret."""
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}"


def _check_hub(what: str, kind: str, repository: str, timeout: float) -> Check:
    from huggingface_hub import constants

    name = f"keys ({what})"
    token, shown = _hub_token()
    if constants.HF_HUB_OFFLINE:
        return Check(_GROUP, name, "skipped", f"{repository}: HF_HUB_OFFLINE is set; {shown}")
    header = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        code = _status(f"{constants.ENDPOINT}/api/{kind}/{quote(repository)}/auth-check", timeout, header)
    except (HTTPException, ValueError):
        code = None
    if code == _FOUND:
        return Check(_GROUP, name, "ok", f"{repository}: the hub lets this user in; {shown}")
    if code in _REFUSED:
        text = f"{repository}: the hub refuses access ({code}); {shown}"
        way_out = "accept its terms on the hub and set HF_TOKEN, or give a local folder"
        return Check(_GROUP, name, "failure", text, way_out)
    if code == _UNKNOWN:
        text = f"{repository}: the hub has none of this name, or hides it from this user ({code}); {shown}"
        return Check(_GROUP, name, "failure", text, "check the name, set HF_TOKEN, or give a local folder")
    text = f"{repository}: the hub does not answer{'' if code is None else f' the question ({code})'}; {shown}"
    way_out = "check the network and try again, or give a local folder; what is in the cache is used"
    return Check(_GROUP, name, "warning", text, way_out)


def _hub_token() -> tuple[str | None, str]:
    """Token of the hub, and where it comes from."""
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        return None, "no token"
    names = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)]
    return token, f"{names[0]} is set" if names else "with the token of `hf auth login`"


def _status(uri: str, timeout: float, header: Mapping[str, str]) -> int | None:
    """Status code of a GET; None where nobody answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(uri, headers=dict(header)), timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError:
        return None


def _login_header(user: str | None) -> dict[str, str]:
    """Login of MLflow from the environment; the user may stand in the address, a password may not."""
    import base64

    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"Authorization": f"Bearer {token}"}
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or unquote(user or "")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {}
