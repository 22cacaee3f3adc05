"""What computes a model on this machine: one class for each way, and the choice between them."""
