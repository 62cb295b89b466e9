"""The asyncio shell around the rounds machine: it carries actions out and feeds events, and decides nothing.

May import every other room of `rounds`. Start reading at `driver`.
"""
