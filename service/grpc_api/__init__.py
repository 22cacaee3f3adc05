"""gRPC: `servicer` has the methods; `register` gives them to Ray Serve, and `server` to the server of one process."""
