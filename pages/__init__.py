"""The tables in docs/ that come from the code: what travels on the wire, rooms, floors and files.

`python -m pages` writes them; `python -m pages --check`, which a test runs, fails when one differs from the
code. A table stands between `<!-- code: NAME -->` and `<!-- end -->`. What stands in no dataclass is in
`words`; a message that `words` does not tell of, or that nobody sends, is an error.
"""
