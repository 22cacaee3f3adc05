"""Chat: messages into a prompt, and an answer into reasoning, content and calls of tools.

`messages`, `tools` and `prompt` read a request. `forms` is the table of families: their markers, and how they write calls.
`parser` is one state machine over tokens and text; `grammars` makes calls obey the schemas of the tools.
"""
