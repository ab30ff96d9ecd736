"""The base of every structure of the configuration."""

from __future__ import annotations

import math

import msgspec

from flowkv_jax.errors import ConfigError


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every structure: immutable, keyword-only, unknown keys are errors."""

    def require_positive(self, *keys: str) -> None:
        """Raise `ConfigError` unless each is None, or above 0 and finite."""
        for key in keys:
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"{key}={value} must be positive and finite", parameter=key, value=value
                )

    def require_at_most(self, **bounds: int) -> None:
        """Raise `ConfigError` unless each is None, or at most its bound."""
        for key, high in bounds.items():
            value = getattr(self, key)
            if value is not None and value > high:
                raise ConfigError(
                    f"{key}={value} must be at most {high}", parameter=key, value=value
                )
