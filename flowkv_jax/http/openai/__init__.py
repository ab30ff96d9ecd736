"""OpenAI's completions and chat completions over HTTP.

    endpoints    the handlers
    requests     what clients send, as strict structures (`fields` judges the names)
    sampling, prompts, conversation     -> what the engine takes
    exchange     one HTTP request = some engine requests; `generation` is their outputs, in one
                 mailbox, and `delivery` brings them to the client
    completions, chat                   outputs -> answers: `responses` whole, `chunks` as events
    logprobs     in the two shapes
    tools        calls of functions, read out of the answer's text

Admission is decided before the first byte: the status line waits for the engine's first output (or,
if the request has to queue, for as long as the first keep-alive comment may wait). From then on a
failure is an event of the stream. A client that leaves closes the engine's iterators at once.
"""
