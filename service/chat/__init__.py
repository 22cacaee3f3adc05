"""Chat: messages into a prompt, and an answer into reasoning, content and calls of tools.

`service/contract/conversation.py` has the shapes of messages and tools. `messages` and `tools` check what no shape can say, and
`prompt` writes the prompt. `forms` is the table of families: their markers, and how they write calls. `parser` is one state
machine over tokens and text; `grammars` makes calls obey the schemas of the tools.
"""
