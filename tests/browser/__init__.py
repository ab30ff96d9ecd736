"""The live page in a real browser: `make test-browser`. Needs Chromium, and is no part of
`make test`."""
