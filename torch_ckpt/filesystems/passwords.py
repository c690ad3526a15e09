"""Passwords in URLs: which URLs have one, and texts without them.

Messages and pickles contain the URL of a location, so it must not contain a password. Messages of
store clients contain the configured URLs of endpoints and proxies.
"""

from __future__ import annotations

import re

from torch_ckpt.errors import UnsupportedError

__all__ = ["cause_of", "has_password", "refuse_password", "without_secrets"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S*)")
_QUERY = re.compile(r"(?<!<)\?(?!>)[^\s\"')]*")  # In a signed URL; not the "<?xml" of an answer.
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]*\]")
_PORT = re.compile(r"[0-9]{1,5}")


def has_password(rest: str, *, may_have_port: bool = True) -> bool:
    """Returns whether the part of a URL after ``://`` contains ``user:password@``.

    A password may contain slashes. So ``a:b/c@d`` contains one, unless ``a:b`` is a host and port.
    ``a/b:c@d`` contains none: it is the path ``b:c@d`` on the host or bucket ``a``.
    """
    first, _, path = rest.partition("/")
    userinfo, _, host = first.rpartition("@")
    if ":" in userinfo:
        return True
    if "@" not in path:
        return False
    _, colon, port = _IPV6.sub("", host, count=1).partition(":")
    return bool(colon) and not (may_have_port and _PORT.fullmatch(port))


def refuse_password(scheme: str, rest: str, *, may_have_port: bool) -> None:
    """Raises UnsupportedError, without the password, for a URL that has one."""
    if has_password(rest, may_have_port=may_have_port):
        raise UnsupportedError(
            f"cannot reach a URL of {scheme}:// that has a password; set it in the environment or "
            "the configuration of the client"
        )


def without_secrets(text: str) -> str:
    """Returns a text of a client library without users, passwords and signatures in its URLs."""

    def url_without_user(found: re.Match[str]) -> str:
        scheme, rest = found[1], found[2]
        if has_password(rest):  # Up to the last "@", because the password may contain others.
            return f"{scheme}***@{rest.rpartition('@')[2]}"
        first, slash, path = rest.partition("/")
        user, at, host = first.rpartition("@")
        return f"{scheme}***@{host}{slash}{path}" if at and user else found[0]

    return _URL.sub(url_without_user, _QUERY.sub("", text))


def cause_of(error: Exception) -> Exception | None:
    """Returns the cause that an error may show; ``None`` if its text contains secrets."""
    return error if without_secrets(str(error)) == str(error) else None
