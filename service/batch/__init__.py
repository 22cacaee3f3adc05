"""OpenAI's Files and Batches API: requests in a file that are computed with the engine's spare capacity.

All that a restart needs is in one folder: a SQLite database of the files and batches, and the files themselves.
This room knows neither HTTP nor the engine: `http_api` gives it a function that answers a line as its route would.
"""
