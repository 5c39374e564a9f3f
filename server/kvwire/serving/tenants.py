"""How tenants are named: by a digest of their salt, which itself is never kept."""

from __future__ import annotations

import re
from typing import Final

from kvwire.errors import InvalidArgument
from kvwire.keys import salt_digest

NO_SALT: Final = "none"
"""No digest looks like this."""

_NAME: Final = re.compile(r"[0-9a-f]{16}|none")


def is_tenant(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def tenant_name(salt: str, tenant: str) -> str:
    """By the one that was given. Raises InvalidArgument."""
    if bool(salt) is bool(tenant):
        raise InvalidArgument("salt", f"and tenant: name the tenant by one of them ({NO_SALT}: no salt)")
    return salt_digest(salt) if salt else _checked(tenant)


def digest_wanted(tenant: str) -> str | None:
    """The digest ("": no salt) that a request is limited to; None: it is not. Raises InvalidArgument."""
    return digest_of(_checked(tenant)) if tenant else None


def digest_of(name: str) -> str:
    return "" if name == NO_SALT else name


def name_of(digest: str) -> str:
    return digest or NO_SALT


def _checked(tenant: str) -> str:
    if not is_tenant(tenant):
        raise InvalidArgument(
            "tenant", f"is not the digest of a salt (16 hex digits, as listings show it), nor {NO_SALT}"
        )
    return tenant
