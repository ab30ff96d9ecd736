"""The sequences that a node serves, by id."""

from __future__ import annotations

from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.engine.served import Served
from flowkv_jax.errors import DuplicateRequestError
from flowkv_jax.request import Request


class ServedTable:
    """At most one attempt of a sequence at a time. One owner.

    Attributes:
        num_host_dependent: how many need the tokens of a step before the next one is sampled.
    """

    def __init__(self) -> None:
        self.num_host_dependent = 0
        self._by_id: dict[str, Served] = {}

    def add(self, served: Served) -> None:
        self._by_id[served.spec.sequence_id] = served
        self.num_host_dependent += served.state.needs_host_tokens

    def remove(self, served: Served) -> None:
        """Raises KeyError if it is not here."""
        del self._by_id[served.spec.sequence_id]
        self.num_host_dependent -= served.state.needs_host_tokens

    def all(self) -> list[Served]:
        return list(self._by_id.values())

    def of(self, request: Request) -> Served | None:
        """Whose request it is, unless that has ended."""
        served = self._by_id.get(request.request_id)
        return served if served is not None and served.request is request else None

    def state_of(self, request: Request) -> SamplingState | None:
        """How it is sampled, unless it has ended."""
        served = self.of(request)
        return None if served is None else served.state

    def find(self, key: SequenceKey) -> Served | None:
        """This attempt at a sequence, if it is here."""
        served = self._by_id.get(key.sequence_id)
        return served if served is not None and served.key == key else None

    def older(self, served: Served) -> Served | None:
        """An earlier attempt at the same sequence, which has to give way.

        Raises:
            DuplicateRequestError: the one that is here is as new.
        """
        before = self._by_id.get(served.spec.sequence_id)
        if before is not None and before.spec.attempt >= served.spec.attempt:
            raise DuplicateRequestError(f"request_id={served.spec.sequence_id!r} is in use")
        return before
