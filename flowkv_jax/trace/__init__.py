"""What a cluster did lately, for the live page and as a timeline. No JAX.

`history` remembers; `timeline` makes of it what trace viewers open. `recorder` is the thread that
looks once a second.
"""
