"""Ports of launched servers."""

from __future__ import annotations

import socket


def find_ports(host: str, count: int) -> list[int]:
    """So many different ports that nobody listens on at the moment."""
    held = [socket.socket(_family(host)) for _ in range(count)]
    try:
        for one in held:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket(_family(host)) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a past connection is no obstacle
        try:
            one.bind((host, port))
        except OSError:
            return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
