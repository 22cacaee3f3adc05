"""Several models in one server: `attend serve --models FILE`.

`entries` reads the file. `run` is the server: it holds the public ports, authenticates callers (`authentication`), and passes
each call (`http`, `grpc`) to the process of its model (`process`, `child`), which `pool` starts at the first call and ends when
it is idle or memory is short. `routes` has the routes that are of no model, `metrics` the metrics.
"""
