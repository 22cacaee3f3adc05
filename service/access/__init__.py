"""Who may call, and how much of a replica one caller may take.

`keys` reads the file of API keys, finds a caller by a key, and follows changes of the file. `quota` charges a call to its
key: a request when it arrives, places for its answers, and its tokens.
"""
