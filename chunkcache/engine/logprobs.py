"""Log probabilities of the tokens of an answer, as the model gave them, before any drawing."""

import torch

from chunkcache.results import TokenLogprob


def token_logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Look a drawn token up in the distribution that it was drawn from.

    Args:
        logits: fp32 ``[vocab]`` of the model, nothing masked.
        token_id: The token.
        num_top: How many of the most likely tokens to give, possibly none.
    """
    logprobs = torch.log_softmax(logits.cpu().double(), dim=-1)
    order = torch.sort(logprobs, descending=True, stable=True).indices[:num_top]
    top = tuple((int(i), float(logprobs[i])) for i in order)
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
