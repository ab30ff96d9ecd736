"""Clients that people have, each in an environment of its own, against a real server.

`python -m tests.clients [NAME ...]` (or `make test-clients CLIENTS="NAME ..."`) takes these steps:

    catalogue      says which clients there are: requirements, checks, and servers they want
    environments   build/clients/NAME/venv, made by uv from NAME's requirements, kept between runs
    servers        `flowkv serve` with the real model, started when first wanted, ended after the
                   last check that wants it
    checks/*.py    run inside the client's environment; see checks/checklist.py

The environments are apart because the clients' pins clash (two want protobuf below 7, one
registers its protos under names that others use). Nothing but a package registry is reached.
A client that cannot run is told as "not run" with the reason, and fails the run all the same:
name the others to leave it out.
"""
