"""Several models in one server: `attend serve --models FILE`.

`entries` reads the file. `run` is the server: it holds the public ports, admits callers (`admission`), and forwards each call
(`http`, `grpc`) to the process of its model (`process`, `child`), which `pool` starts at the first call and ends when it is
idle or memory is short.
"""
