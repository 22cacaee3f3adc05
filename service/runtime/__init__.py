"""Processes: how a server starts, where its calls arrive, and how it ends.

`supervisor` starts `driver`, which starts Ray Serve with the deployment of `deployment`; each of its replicas is a `replica`.
`edge` is HAProxy in front of them. `single` is one replica in one process, with uvicorn (`front`) in place of Ray and
HAProxy. `hub`, `loading` and `checkpoint` fetch, load and check the files of a model before a server listens.
"""
