"""The work at a step boundary: hand in the sums, get an outcome, step, at once or behind the next epoch.

Start reading at `update`.
"""
