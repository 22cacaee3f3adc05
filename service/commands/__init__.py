"""What a person types: a module for each verb of `attend`.

`cli` has the verbs and their flags, and imports what a verb needs when it runs. The modules beside it do the work of the
verbs that are more than a call: checking a running server, generating without one, inspecting and measuring a checkpoint,
explaining a text, keeping API keys. Nothing else of the service imports from here.
"""
