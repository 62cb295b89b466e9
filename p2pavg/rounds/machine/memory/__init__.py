"""What one machine knows of itself: where it stands, what it promised, which ballots it holds or leads.

Plain data with the verbs that change it; may import `rounds.protocol`, and `rules` and `events` beside it.
Start reading at `standing`.
"""
