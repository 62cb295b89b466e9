"""Metrics for Prometheus: their names, and the port at which a peer exports its own.

May import `report` and the floors below. Start reading at `catalogue` (every metric, once), then
`exposition` (values as text), `own` (the values of one peer) and `endpoint` (the port). The monitor's page
exports the same names.
"""
