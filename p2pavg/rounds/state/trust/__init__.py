"""What donors say, and how far a newcomer goes by it. Pure: no asyncio, sockets, time, threads.

May import `rounds.state.results` and the floors below `rounds`. Start reading at `heads`.
"""
