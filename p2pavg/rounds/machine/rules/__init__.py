"""The rules by which the machine decides: who leads, who is at fault, which camp wins, how long to wait.

Pure functions and plain data of `rounds.protocol`, of events, and of each other; they know no machine.
Start reading at `camps`.
"""
