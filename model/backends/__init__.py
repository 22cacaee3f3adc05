"""The backends, which compute a model on this machine: a class for each, and the choice among them."""
