"""The Open Inference Protocol: `kserve.proto`; the other files are made by
`python -m flowkv_jax.rpc.generate`."""
