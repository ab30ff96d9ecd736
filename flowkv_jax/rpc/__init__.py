"""The gRPC front door: protos, server, client. Nothing here imports JAX; the engine is passed in.

A request's way through the package, and the file that owns each step:

    client.py           prompts -> calls, streams -> `RequestOutput`s
    wire.py             values <-> messages; cluster_wire.py those of a cluster
    status.py           errors <-> statuses with details
    auth.py             bearer tokens, checked before a handler runs
    servicer.py         one handler a method; asks the engine
    cluster_servicer.py the same for `flowkv.v1.Cluster`; asks a `ClusterView` (cluster_view.py)
    generation.py       between the engine's pace and the wire's, also HTTP's
    merge.py            folds deltas that share a message
    transport.py        addresses, TLS files, channel settings, what may be bound
    server.py           start, health, drain, stop

`flowkv_jax.rpc.flowkv.v1` is generated; see `generate.py`.
"""
