"""The engine in Python on asyncio, the native pump's twin.

May import `transport.engine`, `transport.frames`, `transport.pacing`. Start reading at `engine`.
"""
