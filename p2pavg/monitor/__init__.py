"""`p2pavg monitor` and `p2pavg report`: a run watched live, or read back from its reports.

May import every floor below the roof; nothing imports it but the command line and `forecast`, which takes
`history`. Start reading at `cli`, then `watcher` (links to the members), `picture` (what they told, as one
state), and as people see it `screen` (a terminal), `web` (the live page, whose files are in `p2pavg/web`) and
`plots` (of `report`). `heard`, `picture`, `shown`, `story` and `history` are pure.
"""
