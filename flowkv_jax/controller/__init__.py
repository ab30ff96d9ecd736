"""Decides which nodes serve a request, which role each node has, how many there are. No JAX.

Nothing here has a clock, a thread, or a socket: every call brings its time, one owner makes all
calls, and what is to be done in the world comes back from `Controller.tick`. So the same code runs
in a process with its nodes, in front of many, and in tests that replay an hour in a second.

    joins, reports, hand-offs  ->  window, score, rates, directory  ->  node table, records
    place                      ->  router: filter, score, pick      ->  booking, log
    tick                       ->  policy: levels, regime           ->  drains, actions, log

Rules: choosing changes nothing, booking happens in one place and at once, work is counted once, and
each decision is logged with what it was decided by.
"""
