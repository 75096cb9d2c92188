"""What runs at serve time: a provider of positions, and an extern routine."""

import numpy as np
import torch


def axes(spec, step):
    """[3, T]: position, half of it, and position modulo 3; behind the prompt all three count on by one."""
    prompt = np.repeat(step.table.num_prompt_tokens[step.slots], step.counts)
    at = step.positions
    inside, behind = at < prompt, at - prompt
    return np.stack([at, np.where(inside, at // 2, prompt // 2 + behind), np.where(inside, at % 3, 3 + behind)]).astype(
        np.int32
    )


def center(centered: torch.Tensor, mean: torch.Tensor, work: torch.Tensor, x: torch.Tensor, factor: float) -> None:
    """centered = x - mean, mean = factor * mean of each row; work is as large as x."""
    torch.mul(x, factor, out=work)
    torch.mean(work, dim=-1, out=mean)
    torch.sub(x, mean[:, None], out=centered)
