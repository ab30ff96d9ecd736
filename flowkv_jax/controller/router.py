"""Chooses the nodes of one sequence: filter, score, pick. Reads the node table, writes nothing.

Filter. A prefill node takes prefill work of its role now; a decode node the same. Nodes that are
excluded, leave, or whose whole pool is too small for the sequence are never taken. If nobody of a
role is left, any usable node may do its work: roles are a policy, and a cluster that has lost its
prefill nodes goes on, on its decode nodes.

Score. Every term is in seconds, and the smallest sum wins:

    prefill    queue_s + prefill_s [+ load_s]
                   queue_s      until prompts booked or queued there are computed
                   prefill_s    for the part that its prefix cache lacks
                   load_s       decode_load_cost_s times the load of where it would be decoded, for
                                a node that would keep it; for others the least such load
    decode     transfer_s + load_s
                   transfer_s   of the blocks that it lacks; 0 where the K/V are already
                   load_s       decode_load_cost_s * (measured load + occupancy) / 2

Occupancy is the larger of the shares of sequences and of blocks that would be in use, counted from
bookings, so that of a burst each sequence sees the ones before it. While roles are imbalanced the
load of a prefill node is added to its cost as well. No term is ever switched off: a prefix draws
sequences to its node for as long as the time it saves is more than the queue there.

Pick. Costs within a microsecond are equal, then less booked work wins, then the name.

A hybrid node that prefilled a sequence keeps it while it has room: a move would have to pay for
itself, and its load was part of why it was chosen. And with `local_prefill_max_tokens` a prompt of
which little is to be computed may be prefilled where it is decoded, if that is no later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowkv_jax.controller.bookings import BookedWork
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.cost_model import TransferTimes, prefill_seconds
from flowkv_jax.controller.decision_log import Candidate
from flowkv_jax.controller.node_table import NodeTable
from flowkv_jax.controller.routing import NoNodeAvailable, RouteQuery

_EQUAL_S = 1e-6
_SHOWN_CANDIDATES = 5

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Route:
    """A choice, and why.

    Attributes:
        work: what to book, at which slots.
        reason: in words.
        candidates: the best of those weighed for each purpose, best first.
    """

    work: BookedWork
    reason: str
    candidates: tuple[Candidate, ...]


class Router:
    """Chooses. Its own state is its settings; the table and the measured times are the caller's."""

    def __init__(self, config: ControllerConfig, transfers: TransferTimes) -> None:
        self._config = config
        self._transfers = transfers

    def route(
        self,
        table: NodeTable,
        query: RouteQuery,
        matches: dict[int, int],
        now_s: float,
        *,
        is_imbalanced: bool = False,
    ) -> Route:
        """Choose the nodes of a sequence.

        Args:
            matches: cached blocks of the prompt by slot.
            is_imbalanced: the policy found one role overloaded and the other idle.

        Raises:
            NoNodeAvailable: nobody may serve it.
        """
        n = table.num_slots
        usable = table.is_usable[:n].copy()
        for name in query.exclude:
            slot = table.slot_of(name)
            if slot is not None:
                usable[slot] = False
        view = _View.of(table, query, matches, usable, self._config)
        if query.prefill_node is not None:
            return self._route_computed(view, query.prefill_node)
        if not view.usable.any():
            raise self._nobody(table, query)
        if np.count_nonzero(usable) == 1:
            return view.only(int(np.argmax(usable)))
        return self._route_prompt(view, now_s, is_imbalanced)

    def _nobody(self, table: NodeTable, query: RouteQuery) -> NoNodeAvailable:
        return NoNodeAvailable(
            f"no node can serve {query.sequence_id!r} ({query.num_tokens} tokens): of {len(table)} "
            f"nodes, {len(query.exclude)} are excluded, and others leave or have too small a pool"
        )

    def _route_computed(self, view: _View, prefill_node: str) -> Route:
        """The prompt is computed; choose who decodes it."""
        source = view.table.slot_of(prefill_node)
        if source is None:
            raise NoNodeAvailable(f"prefill_node={prefill_node!r} is not here any more")
        if not view.usable.any():
            raise NoNodeAvailable(
                f"no node but {prefill_node!r} is left to decode {view.query.sequence_id!r}"
            )
        decode, why, candidates = self._pick_decode(view, source)
        return Route(view.work(source, decode, is_prefilled=True), why, candidates)

    def _route_prompt(self, view: _View, now_s: float, is_imbalanced: bool) -> Route:
        table, config, n = view.table, self._config, view.table.num_slots
        prefillers, note = view.of_role(table.can_prefill[:n], "prefill")
        decoders, decode_note = view.of_role(table.can_decode[:n], "decode")
        queue_s = table.queue_s(now_s)
        token_s = queue_s + view.prefill_s
        load_s = config.decode_load_cost_s * view.decode_load
        cost_s = token_s + np.where(decoders, load_s, load_s[decoders].min())
        if is_imbalanced:
            cost_s += config.decode_load_cost_s * table.prefill_load[:n]
        source = view.pick(prefillers, cost_s)
        terms = {
            "queue_s": queue_s,
            "prefill_s": view.prefill_s,
            "cached_tokens": view.cached_tokens,
            "prefill_load": table.prefill_load[:n],
        }
        shown = view.candidates("prefill", source, prefillers, cost_s, terms)
        reason = note or ("least load, roles imbalanced" if is_imbalanced else "earliest token")
        if decoders[source] and view.has_room[source]:
            why = "; ".join(filter(None, (reason, decode_note, "stays")))
            return Route(view.work(source, source), why, shown)
        local = decoders & (view.uncached_tokens <= config.local_prefill_max_tokens)
        if local.any():
            here = view.pick(local, token_s + load_s)
            transfer_s = view.transfer_s(self._transfers, source)[here]
            if token_s[here] <= token_s[source] + transfer_s:
                more = view.candidates("local prefill", here, local, token_s + load_s, terms)
                return Route(view.work(here, here), "short prompt, no hand-off", shown + more)
        decode, why, more = self._pick_decode(view, source)
        return Route(view.work(source, decode), f"{reason}; {why}", shown + more)

    def _pick_decode(self, view: _View, source: int) -> tuple[int, str, tuple[Candidate, ...]]:
        table, n = view.table, view.table.num_slots
        decoders, note = view.of_role(table.can_decode[:n], "decode")
        if decoders[source] and view.has_room[source]:
            return source, "stays", ()
        roomy = decoders & view.has_room
        if roomy.any():
            decoders = roomy
        else:
            note = note or "no decode node has room now"
        transfer_s = view.transfer_s(self._transfers, source)
        cost_s = transfer_s + self._config.decode_load_cost_s * view.decode_load
        terms = {
            "transfer_s": transfer_s,
            "decode_load": table.decode_load[:n],
            "occupancy": view.occupancy,
            "reused_tokens": view.cached_tokens,
        }
        decode = view.pick(decoders, cost_s)
        shown = view.candidates("decode", decode, decoders, cost_s, terms)
        return decode, note or "least transfer and load", shown


@dataclass(frozen=True, slots=True)
class _View:
    """What one query sees of the table; arrays are by slot."""

    table: NodeTable
    query: RouteQuery
    usable: Mask
    cached_tokens: Ints
    uncached_tokens: Ints
    prefill_s: Floats
    prompt_blocks: Ints
    total_blocks: Ints
    occupancy: Floats
    decode_load: Floats
    has_room: Mask

    @classmethod
    def of(
        cls,
        table: NodeTable,
        query: RouteQuery,
        matches: dict[int, int],
        usable: Mask,
        config: ControllerConfig,
    ) -> _View:
        n = table.num_slots
        block_size = np.maximum(table.block_size[:n], 1)
        matched = np.zeros(n, np.int64)
        for slot, blocks in matches.items():
            matched[slot] = blocks
        # The last token is always computed: its output is the first new token.
        cached = np.minimum(matched * block_size, max(query.num_tokens - 1, 0))
        uncached = query.num_tokens - cached
        rate = np.maximum(table.prefill_tokens_per_s[:n], 1e-9)
        to_come = min(query.max_new_tokens, config.expected_output_tokens)
        prompt_blocks = -(-query.num_tokens // block_size)
        total_blocks = -(-(query.num_tokens + to_come) // block_size)
        usable &= -(-(query.num_tokens + 1) // block_size) <= table.num_blocks[:n]
        blocks = table.booked_blocks[:n] + table.unbooked_blocks[:n] + total_blocks
        sequences = table.booked_decodes[:n] + table.unbooked_sequences[:n] + 1
        num_blocks = np.maximum(table.num_blocks[:n], 1)
        kv_share = blocks / num_blocks
        occupancy = np.maximum(sequences / np.maximum(table.max_num_seqs[:n], 1), kv_share)
        return cls(
            table=table,
            query=query,
            usable=usable,
            cached_tokens=cached,
            uncached_tokens=uncached,
            prefill_s=prefill_seconds(uncached, cached, rate, config.attention_context_tokens),
            prompt_blocks=prompt_blocks,
            total_blocks=total_blocks,
            occupancy=occupancy,
            decode_load=(table.decode_load[:n] + occupancy) / 2,
            has_room=blocks <= table.num_blocks[:n],
        )

    def of_role(self, has_role: Mask, role: str) -> tuple[Mask, str]:
        """Usable nodes of a role; all that are usable, with a note, if there are none."""
        mask = self.usable & has_role
        return (mask, "") if mask.any() else (self.usable, f"no {role} node left, any may do it")

    def transfer_s(self, transfers: TransferTimes, source: int) -> Floats:
        table, n = self.table, self.table.num_slots
        # Whole blocks that are there already are not sent.
        to_send = self.prompt_blocks - self.cached_tokens // np.maximum(table.block_size[:n], 1)
        data_bytes = to_send.astype(np.float64) * float(table.block_bytes[source])
        return transfers.predict(source, table.host_id[:n], data_bytes)

    def pick(self, mask: Mask, cost_s: Floats) -> int:
        """Slot of the least cost; equal ones by booked work, then name."""
        slots = np.flatnonzero(mask)
        costs = cost_s[slots]
        slots = slots[costs <= costs.min() + _EQUAL_S]
        if len(slots) > 1:
            table = self.table
            booked = (
                table.booked_prefills[slots] + table.booked_sends[slots]
            ) + table.booked_decodes[slots]
            slots = slots[booked == booked.min()]
            slots = slots[np.argmin(table.name_rank[slots])][None]
        return int(slots[0])

    def work(self, source: int, decode: int, *, is_prefilled: bool = False) -> BookedWork:
        return BookedWork(
            prefill_slot=source,
            decode_slot=decode,
            prefill_tokens=0 if is_prefilled else int(self.uncached_tokens[source]),
            prefill_us=0 if is_prefilled else int(self.prefill_s[source] * 1e6),
            prompt_blocks=int(self.prompt_blocks[source]),
            total_blocks=int(self.total_blocks[decode]),
            is_prefilled=is_prefilled,
        )

    def only(self, slot: int) -> Route:
        return Route(self.work(slot, slot), "the only node", ())

    def candidates(
        self,
        purpose: str,
        chosen: int,
        mask: Mask,
        cost_s: Floats,
        terms: dict[str, Floats | Ints],
    ) -> tuple[Candidate, ...]:
        """The best few of the slots in `mask`, the chosen one first."""
        slots = np.flatnonzero(mask)
        if len(slots) > _SHOWN_CANDIDATES:
            slots = slots[np.argpartition(cost_s[slots], _SHOWN_CANDIDATES)[:_SHOWN_CANDIDATES]]
        slots = slots[np.argsort(cost_s[slots], kind="stable")]
        order = [chosen, *(s for s in slots.tolist() if s != chosen)][:_SHOWN_CANDIDATES]
        columns = {name: column[order].tolist() for name, column in terms.items()}
        return tuple(
            Candidate(
                self.table.names[slot],
                purpose,
                cost,
                {name: float(values[i]) for name, values in columns.items()},
            )
            for i, (slot, cost) in enumerate(zip(order, cost_s[order].tolist(), strict=True))
        )
