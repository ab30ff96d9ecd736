"""The live page at `/`: what the nodes do, drawn from what the recorder remembers. Read-only.

`page` puts the assets together into one document with its Content-Security-Policy; it holds no
data, so it is open. `state` is what the document asks for once a second, behind the key; `routes`
serves both, and the timeline.
"""
