"""Moves a sequence's KV cache, and the sequence, from one node to another. No JAX.

P computed the prompt, D will decode. Both are ordinary nodes; roles are the controller's matter.

    P (sender)                              D (receiver)
    the last chunk is dispatched
    RESERVE sequence                   ->   reserves blocks and a seat, shares what its prefix
                                            cache holds already
                                       <-   GRANTED blocks to fill, with their generations
                                       or   DEFERRED reason (GRANTED follows when there is room)
                                       or   REFUSED reason
    the first token is read
    (it goes to the client from P)
    FILLED tokens sampled here         ->
    transfer of aligned runs           ->   bounds, generations, checksum: the transfer engine's
                                            part; the acknowledgement is its DONE
                                            the sequence runs here now
    frees its blocks
                                       <-   TAKEN   instead, where no block had to move
    WITHDRAW                           ->   frees what it reserved
                                       <-   RELEASED reason: it gave the reservation up

A sequence that has been decoded at P for a while moves the same way: RESERVE then follows the last
token that is read there, and says all tokens whose K/V are complete. It does not wait for room.

Rules that keep wrong bytes out and nothing stuck:
- D's reservation waits for nobody while it holds blocks; a deferred one holds none. P holds its
  blocks while it waits, but not for ever: after `handoff_wait_s` it asks for another node, or
  decodes by itself.
- P's blocks are pinned while a transfer reads them, D's from the grant until the transfer is final
  or can no longer begin. Whoever ends the sequence meanwhile frees them; they come free at unpin.
- A block given up by D has a new generation at once, so a transfer that comes too late is refused.
- Whatever ends the sequence on one side tells the other; losing the other side is the same.
- Each hand-off has an id of its own: answers to an earlier one find nothing.
- Notifications keep their order; a transfer may overtake FILLED, and waits for it then.
- A hand-off that fails in a way it should not is given up on both sides; the nodes go on.
"""
