from __future__ import annotations

import torch

from p2pavg.optim.gradients.uneven import RetainedSums


def test_a_late_step_of_another_size_keeps_its_weight() -> None:
    """Sums of two steps of uneven size are, times unit / samples, the mean over all their samples."""
    first, second = torch.tensor([3.0, -1.0]), torch.tensor([0.5, 2.0])  # means over 6 and 2 samples
    sums = torch.zeros(2)
    retained = RetainedSums(lambda: [sums])
    retained.weigh(0, 6)
    sums += first
    retained.keep(6, 6)
    sums += second
    retained.weigh(6, 2)
    torch.testing.assert_close(sums * 2 / 8, (6 * first + 2 * second) / 8)


def test_a_step_that_was_counted_is_not_weighed() -> None:
    """Sums that a round took, or that were dropped since, are left as they are."""
    sums = torch.zeros(2)
    retained = RetainedSums(lambda: [sums])
    retained.keep(6, 6)
    sums += torch.tensor([0.5, 2.0])
    retained.weigh(0, 2)
    assert sums.tolist() == [0.5, 2.0]
    retained.keep(0, 2)
    retained.weigh(0, 6)
    assert sums.tolist() == [0.5, 2.0]
