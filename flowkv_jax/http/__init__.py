"""The HTTP front door. No JAX.

Bare ASGI under uvicorn. `app` is the table of routes and what surrounds every handler:

    connection   `protocol`      bounds on heads and on slow clients, under uvicorn
    request      `app`           host, key (`security`), route, one log line, errors to answers
    handler      Route.handler   `async (Request, Surroundings) -> Response | None`

A handler returns a `Response`, or answers by itself through `Request.events()` and returns None.
What it raises becomes the answer (`error_answer`): before the first byte a status with OpenAI's
error object, behind it an event with the same object.
"""
