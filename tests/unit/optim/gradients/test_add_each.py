from __future__ import annotations

import numpy as np
import torch
from torch import nn

from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.gradients.vectors import used


def test_sums_from_elsewhere_are_added_and_mark_what_they_reached() -> None:
    """A node's sums join those of the parameters; a parameter without any is as one that nobody reached."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    flat = FlatGradients(params)
    flat.add_each([torch.tensor([1.0, 2.0, 3.0]), None, torch.tensor([5.0], dtype=torch.float64)])
    flat.add_each([torch.tensor([1.0, 0.0, 0.0]), None, None])
    vector = flat.total(1.0)
    assert isinstance(vector, np.ndarray)
    at = flat.layout.offsets
    assert vector[at[0] : at[0] + 3].tolist() == [2.0, 2.0, 3.0]
    assert vector[at[1] : at[1] + 4].tolist() == [0.0] * 4
    assert vector[at[2]] == 5.0
    assert used(vector, flat.layout) == [True, False, True]
    flat.close()
