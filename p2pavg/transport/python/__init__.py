"""The engine in Python on asyncio, the native pump's twin.

May import `transport.engine`, `transport.frames`, `transport.limiter`. Start reading at `engine`.
"""
