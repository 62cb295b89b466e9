"""`p2pavg launch`: starts one peer per machine, or several on this one.

Start at `cli`. `local` starts peers as processes of this machine, behind a bootstrap node of their own.
May import every floor below.
"""
