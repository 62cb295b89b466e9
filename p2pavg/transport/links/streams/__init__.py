"""The data streams of a link: how many there should be, and who opens and closes them.

May import `links.link` and what that may. Start reading at `keeper`; `count` decides and is pure, `tuner`
feeds it with what transfers measured.
"""
