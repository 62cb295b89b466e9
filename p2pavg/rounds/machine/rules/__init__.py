"""The rules by which the machine decides: who leads, who is at fault, which camp wins, how long to wait.

Pure functions of, and plain data from, `rounds.protocol`, events and each other; rules know no machine.
Start reading at `camps`.
"""
