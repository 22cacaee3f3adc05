"""HTTP: `routes` has every route, `body` reads, `*_writer` and `sse` write, `problems` writes errors."""
