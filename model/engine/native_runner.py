"""Runs a step of the native decoder: layers, scores and draws are one call, without torch or Python between them."""

from contextlib import nullcontext

import torch

from attend.model.engine.plan import StepInput
from attend.model.engine.runner import ModelRunner, PendingStep, device_errors, other_groups
from attend.model.net.native.decoder import NativeDecoder, StepRows


class NativeRunner(ModelRunner):
    """A ModelRunner whose `net` is a NativeDecoder. Its steps are complete when `submit` returns."""

    net: NativeDecoder

    @device_errors()
    @torch.inference_mode()
    def submit(self, step: StepInput) -> PendingStep:
        """Compute a step, and return once it is done."""
        assert not step.pending, "a step on a CPU is submitted when the tokens before it are there"
        others, places, sources = other_groups(step.tables, self.has_states)
        drafts = [len(step.drafts.get(name, ())) for name in step.request_ids] if step.drafts else [0] * len(step.counts)
        kept = [count - draft for count, draft in zip(step.counts, drafts, strict=True)]
        rows = StepRows(step.tokens, step.starts, step.counts, kept, [step.tables[0], *others], sources, places)
        asked = bool(step.prompt_scores or step.hidden_sums)
        hidden_TE = torch.empty(len(step.tokens), self.net.config.hidden_size, dtype=torch.bfloat16) if asked else None
        with nullcontext() if self.adapters is None else self.adapters.active(step):
            tokens, logits_SV = self.net.step(self.cache, rows, step.draw_rows, step.draws, self.progress, hidden_TE)
        prompt_logprobs, sums = ({}, []) if hidden_TE is None else self._asked_of_hidden(step, hidden_TE)
        return PendingStep(step, None, None, logits_SV, prompt_logprobs, self.draw, self.logprobs, sums, tokens)
