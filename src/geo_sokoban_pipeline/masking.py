"""Masking: possible secrets in commands and addresses are shown and stored as stars.

The rules rather mask too much: where it is open how far a secret goes, everything to the end is masked.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_VARIABLE = re.compile(r"\benvironment[^=:,]*([=:])\s*")
# As in `--params`: a comma and a parameter's name begin the next value. `==`, the end of base64, gives no value.
_NEXT_PARAMETER = re.compile(r",\s*[a-z][\w.\[\]]*=(?!=|$)")
_NESTED = re.compile(r"[\[{\"']")  # a value in brackets or quotes may itself hold commas and names
_WITHIN = re.compile(r"[{\"']")  # the name itself may stand in brackets: `environment[NAME]`
# SQLAlchemy lets a password hold everything but `@`; a second `@` is taken to the password as well.
_PASSWORD = re.compile(r"://[^:/]*:.*@", re.DOTALL)
_LOGIN = re.compile(r"://(?:[^/@]*@|[^:/]*:.*@)", re.DOTALL)
_SECRET_QUERY = re.compile(r"[?&;][\w.-]*(?:pass|passwd|password|pwd|secret|token|api_?key|odbc_connect)=", re.I)


def mask_word(word: str) -> str:
    """A word of a command with stars in place of servers' variables and of passwords in addresses."""
    return mask_addresses(_mask_variables(word))


def mask_addresses(text: str) -> str:
    """A text with stars in place of `user:password` before `@` in addresses, and of secrets in their queries."""
    masked = _PASSWORD.sub("://***@", text)
    found = _SECRET_QUERY.search(masked)
    return masked if found is None else f"{masked[: found.end()]}***"


def holds_password(uri: str) -> bool:
    """Whether a URI holds a password: before its host, or in its query. A user name alone is none."""
    return _PASSWORD.search(uri) is not None or _SECRET_QUERY.search(unquote(uri)) is not None


def without_login(uri: str) -> str:
    """A URI without user name and password."""
    return _LOGIN.sub("://", uri)


def _mask_variables(word: str) -> str:
    """The word with stars for the values of `environment.NAME=value` and `environment: {NAME: value}`."""
    if (found := _VARIABLE.search(word)) is None:
        return word
    head, rest = word[: found.end()], word[found.end() :]
    following = _NEXT_PARAMETER.search(rest)
    if following is None or found[1] == ":" or _WITHIN.search(head) or _NESTED.search(rest[: following.start()]):
        return f"{head}***"
    return f"{head}***{_mask_variables(rest[following.start() :])}"
