"""When a node has done the work that it gives up.

    change                 gives up                  goes on with
    PREFILL -> DECODE      all it has                nothing
    HYBRID -> DECODE       prompts, hand-offs out    sequences it decodes
    DECODE -> HYBRID       nothing                   all
    leaves                 all it has                nothing

Two must agree: no booking is left of that work (it may be on its way to the node), and the node has
reported since the change began that it has none (it may do work that was booked elsewhere: by a
controller that has died). A node that never reports is believed to have none.
"""

from __future__ import annotations

from flowkv_jax.controller.node_lifecycle import NodeRecord


def is_drained(record: NodeRecord, booked_prompts: int, booked_decodes: int) -> bool:
    """Whether a node that is SWITCHING or LEAVING has done the work it gives up.

    Args:
        booked_prompts: to be computed there, or to be handed off from there.
        booked_decodes: to be decoded there.
    """
    role, next_role = record.role, record.next_role
    keeps_prefill = next_role is not None and role.can_prefill and next_role.can_prefill
    keeps_decode = next_role is not None and role.can_decode and next_role.can_decode
    if keeps_prefill == role.can_prefill and keeps_decode == role.can_decode:
        return True  # it gives up nothing
    if (booked_prompts and not keeps_prefill) or (booked_decodes and not keeps_decode):
        return False
    if record.report is None or record.is_reported_empty:
        return True
    if record.reported_s is None or record.reported_s <= record.state_since_s:
        return False
    load = record.report.load
    left = 0
    if not keeps_prefill:
        left += load.num_requests_waiting + load.num_requests_sending
    if not keeps_decode:
        left += load.num_requests_swapped + load.num_requests_receiving
    if not (keeps_prefill or keeps_decode):
        left += load.num_requests_running  # of both kinds: a report does not tell them apart
    return left == 0
