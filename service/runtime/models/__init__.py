"""Several models in one server: `attend serve --models FILE`.

`entries` reads the file. `run` is the server: it holds the public ports, judges who calls (`door`), and passes each call
(`http`, `grpc`) to the process of its model (`process`, `child`), which `pool` starts at the first call and ends when it is
idle or memory is short. `site` has the routes that are of no model, `numbers` the metrics.
"""
