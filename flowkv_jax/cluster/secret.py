"""The secret that a front and its workers share. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flowkv_jax.errors import ConfigError

SECRET_VARIABLE = "FLOWKV_CLUSTER_SECRET"


def read_secret(file: str | None, environ: Mapping[str, str]) -> bytes:
    """The secret in `file`, without the white space around it, else that of the environment; empty
    where there is neither.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if file is None:
        return environ.get(SECRET_VARIABLE, "").encode()
    try:
        secret = Path(file).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cluster_secret_file={file!r} cannot be read: {error.strerror}",
            parameter="cluster_secret_file",
            value=file,
        ) from error
    if not secret:
        raise ConfigError(
            f"cluster_secret_file={file!r} is empty", parameter="cluster_secret_file", value=file
        )
    return secret


def wrong_secret(error: Exception) -> str:
    """What a worker is told whose proof the front refused, or the other way round."""
    return (
        f"{error}: front and worker need the same secret, from cluster_secret_file or the "
        f"environment variable {SECRET_VARIABLE}"
    )
