"""Files and batches, as OpenAI's API has them: lines of requests that are computed when nobody else needs the engine.

All that a restart needs is in one folder: a SQLite database of the files and batches, and the files themselves.
This room knows neither HTTP nor the engine: `http_api` gives it a function that answers a line as its route would.
"""
