"""The engine: scheduler, batches, sampler, runner, the node that drives them, and `Engine` on top.

`scheduler`, `batch`, `sampling_*` and `output_processor` decide and never import JAX;
`model_runner` acts on the device; `node` owns both on one thread; `engine` is the public face.
"""
