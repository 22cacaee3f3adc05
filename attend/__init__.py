"""Attend, by the name under which it is installed and imported.

`model`, `service` and `protos` beside this file are links to the folders of those names at the top of the source tree; `v1` is
one to `protos/attend/v1`: the code that protoc generates imports itself as `attend.v1`, here as in a caller's own folder.
"""
