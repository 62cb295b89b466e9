"""What watching a run costs the swarm, and how soon a browser shows it."""
