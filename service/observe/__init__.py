"""What an operator sees: metrics, log lines, traces, capacity, and the number of replicas that the load needs."""
