"""What an operator sees: metrics, log lines, traces, capacity, and the number of replicas that the load needs.

`metrics` has every metric and counts each call once. `exposition` and `scrape` make one page of all replicas.
`cluster_state` knows which replicas and proxies live. `capacity` and `autoscaling` turn the engine's load into an estimate
and a decision.
"""
