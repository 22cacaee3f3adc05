"""Log probabilities by the plain equation, without engine, cache or server: python -m tests.clients.reference

Standard input holds a JSON list of [context ids, continuation ids]; standard output gets, of each, the sum of the
continuation's log probabilities and whether each of its tokens is the likeliest where it stands.
"""

import json
import sys

import torch
from torch import Tensor

from attend.model.config import DEFAULT_MODEL
from attend.model.net.attention import attend, causal_mask
from attend.model.net.checkpoint import load_decoder
from attend.model.net.transformer import Decoder


def plain(layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
    """The oracle's attention over one whole sequence."""
    return attend(q_THD, k_THD, v_THD, causal_mask(torch.arange(len(q_THD)), len(k_THD)))


def loglikelihood(net: Decoder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """(sum of log p(token | all before), whether greedy decoding would give the same tokens)."""
    tokens_T = torch.tensor(context + continuation)
    scores_TV = net.logits(net(tokens_T, torch.arange(len(tokens_T)), plain)).log_softmax(-1)[len(context) - 1 : -1]
    targets_T = tokens_T[len(context) :]
    chosen_T = scores_TV.gather(1, targets_T[:, None])[:, 0]
    return float(chosen_T.sum()), bool((chosen_T == scores_TV.amax(-1)).all())


def main() -> None:
    """Read, compute, write."""
    net = load_decoder(DEFAULT_MODEL, torch.float32, "cpu")
    with torch.inference_mode():
        json.dump([loglikelihood(net, *pair) for pair in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
