"""K/V handed over between two servers that a router drives, as vLLM's P/D contract has it. No JAX.

    router               P: a server that prefills          D: a server that decodes
    Generate, max_tokens=1,
      do_remote_decode ->  computes the prompt, holds its
                           cached blocks (`holds`)
                       <-  kv_transfer_params: who, where, what
    Generate, kv_transfer_params ------------------------->  is P one of ours? (`addresses`)
                                      <- PULL sequence       connects, and asks (`remote_nodes`)
                           starts the sequence on the node
                           that has its prompt (`lender`)
                           first token, then the hand-off
                           of `flowkv_jax.handoff`       ->  takes the sequence over, decodes
                       <------------------------------------ the answer

To D's dispatcher the node at P is a prefill node like any other, good for this one sequence: its
news are taken in, and its loss, its refusal and its silence are failed over, as for any node: D
places the sequence anew on a node of its own, which computes the prompt. So what P still has when
D asks is a matter of speed and never of the answer.

P samples the first token by D's parameters and seed. All but the last, unfilled block of the prompt
come from P's prefix cache.
"""
