"""The engine in Python on asyncio, the native pump's twin.

May import `transport.engine`, what is below it, and the floors below `transport`. Start reading at `engine`.
"""
