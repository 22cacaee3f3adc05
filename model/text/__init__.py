"""Text and token ids: the tokenizer, chat templates in their sandbox, and grammars with the masks that enforce them."""
