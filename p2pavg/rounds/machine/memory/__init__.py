"""What one machine knows of its own peer: where the peer stands, what it promised, which ballots it holds or
leads.

Plain data with the verbs that change the data; may import `rounds.protocol`, and `rules` and `events` beside
it. Start reading at `standing`.
"""
