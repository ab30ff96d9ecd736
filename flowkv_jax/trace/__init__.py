"""What a cluster did lately, for the live page and as a timeline. No JAX.

`history` remembers, and `recorder` is the thread that has it look once a second. `stays` tells
where a sequence was and what was done with it there; `chrome` writes that down as trace viewers
read it.
"""
