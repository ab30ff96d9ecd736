"""Version 1: `flowkv.proto`; the other files are made by `python -m flowkv_jax.rpc.generate`."""
