"""Greedy generation, one sequence at a time."""

import torch


@torch.inference_mode()
def generate(model, prompt, new_tokens):
    prefill = model.prefill
    decode_step = model.decode  # TODO: compile me, reduce-overhead
    state, token = prefill(prompt)
    out = [token]
    for _ in range(new_tokens - 1):
        state, token = decode_step(state, token)
        out.append(token)
    return torch.cat(out)
