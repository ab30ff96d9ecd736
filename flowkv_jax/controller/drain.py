"""When a node has done the work that it gives up.

    change                 gives up                  goes on with
    PREFILL -> DECODE      prompts                   hand-offs out
    HYBRID -> DECODE       prompts                   hand-offs out, sequences it decodes
    DECODE -> PREFILL      sequences, hand-offs in   nothing
    DECODE -> HYBRID       nothing                   all
    leaves                 all it has                nothing

Hand-offs out end by themselves and are not waited for: a prefill node that is to help overloaded
decode nodes may have many that wait for these very nodes.

Two must agree: no booking is left of that work (it may be on its way to the node), and the node has
reported since the change began that it has none (it may do work that was booked elsewhere: by a
controller that has died). A node that never reports is believed to have none.
"""

from __future__ import annotations

from flowkv_jax.controller.node_lifecycle import NodeRecord


def is_drained(
    record: NodeRecord, booked_prefills: int, booked_sends: int, booked_decodes: int
) -> bool:
    """Whether a node that is SWITCHING or LEAVING has done the work it gives up.

    Args:
        booked_prefills, booked_sends, booked_decodes: prompts to compute there, sequences to hand
            off from there, and to decode there.
    """
    role, next_role = record.role, record.next_role
    keeps_prefill = next_role is not None and role.can_prefill and next_role.can_prefill
    keeps_decode = next_role is not None and role.can_decode and next_role.can_decode
    if keeps_prefill == role.can_prefill and keeps_decode == role.can_decode:
        return True  # it gives up nothing
    leaves = next_role is None
    if (booked_prefills and not keeps_prefill) or (booked_decodes and not keeps_decode):
        return False
    if leaves and booked_sends:
        return False
    if record.report is None or record.is_reported_empty:
        return True
    if record.reported_s is None or record.reported_s <= record.state_since_s:
        return False
    load = record.report.load
    left = 0
    if leaves:
        left += load.num_requests_sending
    if not keeps_prefill:
        left += load.num_requests_waiting
    if not keeps_decode:
        left += load.num_requests_swapped + load.num_requests_receiving
    if not (keeps_prefill or keeps_decode):
        left += load.num_requests_running  # of both kinds: a report does not tell them apart
    return left == 0
